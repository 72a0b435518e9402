"""``lightning-realloc fit | validate | test | predict | export | plan``: everything from one YAML file.

A LightningCLI whose model and data are chosen by class, and whose strategy is ``realloc`` unless the file says
otherwise. ``export`` needs no configuration: a checkpoint in, a Hugging Face folder out; nor does
``plan``, which tells a plan's memory. What a user can get wrong ends
with one message and exit code 2.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, _InstantiatorFn

# Imported for their names: a configuration may say GRPO or SFTDataModule without the module.
from lightning_realloc.algorithms import GRPO, PPO, SFT
from lightning_realloc.algorithms.module import MultiModelModule
from lightning_realloc.algorithms.role import Role, Task
from lightning_realloc.callbacks import AutoTuner, MemoryMonitor, ParameterReallocation, SaveHuggingFace
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.data.sft import SFTDataModule
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.export import export_checkpoint
from lightning_realloc.strategies.failures import OUR_ERRORS, end_started_ranks, told_in_a_line
from lightning_realloc.strategies.huggingface import parse_dtype
from lightning_realloc.strategies.memory import describe_roles, settings_of_precision
from lightning_realloc.strategies.precision import refuse_precision
from lightning_realloc.tuning.execution_plan import ExecutionPlan
from lightning_realloc.tuning.memory import MemoryForecast, forecast_memory
from lightning_realloc.tuning.memory_advice import find_excess
from lightning_realloc.tuning.memory_parts import Workload, parse_bytes

SHORT_NAMES = (
    GRPO,
    PPO,
    SFT,
    PromptDataModule,
    SFTDataModule,
    ReallocStrategy,
    ParameterReallocation,
    SaveHuggingFace,
    MemoryMonitor,
    AutoTuner,
)
"""Classes that a configuration names without their module; any other has its full class path."""
ALGORITHMS: dict[str, type[MultiModelModule]] = {"grpo": GRPO, "ppo": PPO, "sft": SFT}
"""What ``plan --algorithm`` may name."""
_TASKS: dict[str, Task] = {"critic": "token_classification", "reward": "sequence_classification"}
PLAN_HELP = "Show what a plan needs of every rank's memory; no device and no weights are needed."
EXPORT_HELP = "Write one role of a checkpoint as a folder that Hugging Face's from_pretrained reads."


class Parser(LightningArgumentParser):
    """Says less: an error without sixty lines of usage before it, help without every nn.Module there is."""

    def format_help(self, *args: Any, **options: Any) -> str:
        """Leave out lists of known subclasses that fill pages."""
        return re.sub(r",\s+known\s+subclasses:[^()]{2000,}\)", ")", super().format_help(*args, **options))

    def print_usage(self, file: Any = None) -> None:
        """Print nothing; only errors ask for it."""


class _Refusal(BaseException):
    """Carries an error of ours out of jsonargparse, which takes any Exception for "this value has another type"."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Instantiator(_InstantiatorFn):
    """Constructs a model or a data module, as Lightning does."""

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: Any, **kwargs: Any) -> Any:
        try:
            links = applied_instantiation_links
            return super().__call__(class_type, *args, applied_instantiation_links=links, **kwargs)
        except OUR_ERRORS as error:
            raise _Refusal(error) from error


def _construct(class_type: type, *args: Any, **kwargs: Any) -> Any:
    try:
        return class_type(*args, **kwargs)
    except OUR_ERRORS as error:
        raise _Refusal(error) from error


class ReallocCLI(LightningCLI):
    """LightningCLI for algorithms of several models, which build their optimizers themselves."""

    def __init__(self, args: Sequence[str] | None = None, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "subclass_mode_model": True,
            "subclass_mode_data": True,
            # Lightning would build an optimizer from parameters() before there are models.
            "auto_configure_optimizers": False,
            # A random one would differ between processes that were not started by Lightning.
            "seed_everything_default": 0,
            "trainer_defaults": {"strategy": "realloc"},
            "save_config_kwargs": {"overwrite": True},
            "parser_class": Parser,
        }
        given = list(args) if args is not None else None
        super().__init__(LightningModule, LightningDataModule, args=given, **defaults | options)

    def before_instantiate_classes(self) -> None:
        """Refuse a precision before Lightning does, which names another class and advises what cannot be used here."""
        strategy = self._get(self.config, "trainer.strategy")
        if str(getattr(strategy, "class_path", "")).endswith(ReallocStrategy.__name__):
            refuse_precision(str(self._get(self.config, "trainer.precision")))

    def instantiate_classes(self) -> None:
        """Construct the model, the data and the Trainer; what our classes refuse is raised as it is."""
        try:
            super().instantiate_classes()
        except _Refusal as refusal:
            raise refusal.error from None

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except OUR_ERRORS:
            end_started_ranks(self.trainer.strategy.launcher)  # they fail alike; the last word is this process's
            raise

    def _add_instantiators(self) -> None:
        self.parser.add_instantiator(_Instantiator(cli=self, key="model"), LightningModule, subclasses=True)
        self.parser.add_instantiator(_Instantiator(cli=self, key="data"), LightningDataModule, subclasses=True)
        self.parser.add_instantiator(_construct, object, subclasses=True)  # asked last: strategies, options, callbacks

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        # Only for --help: LightningCLI's subcommands are the Trainer's methods, so main() takes these itself.
        action = parser._subcommands_action
        assert action is not None, "LightningCLI has just added subcommands"
        action.add_subcommand("export", export_parser(), help=EXPORT_HELP)
        action.add_subcommand("plan", plan_parser(), help=PLAN_HELP)


def export_parser() -> ArgumentParser:
    """Return the parser of ``lightning-realloc export``."""
    parser = ArgumentParser(prog="lightning-realloc export", description=EXPORT_HELP)
    parser.add_argument("checkpoint", type=str, help="The folder that ModelCheckpoint or save_checkpoint wrote.")
    parser.add_argument("--output", type=str, required=True, help="A new or empty folder, or an earlier export.")
    parser.add_argument("--role", type=str, default="actor", help="Which model of the checkpoint.")
    parser.add_argument("--dtype", type=str | None, default=None, help="float32, bfloat16, ...; default: as trained.")
    return parser


def plan_parser() -> ArgumentParser:
    """Return the parser of ``lightning-realloc plan``."""
    parser = ArgumentParser(prog="lightning-realloc plan", description=PLAN_HELP)
    parser.add_argument("--check", type=str, required=True, help="The plan's YAML file.")
    parser.add_argument(
        "--model", action="append", type=str, required=True, metavar="ROLE=MODEL",
        help="A role and its Hugging Face name or folder, of which only config.json is read; once for each role.",
    )  # fmt: skip
    parser.add_argument("--algorithm", type=str, default="grpo", help=f"One of {', '.join(ALGORITHMS)}.")
    parser.add_argument("--cluster", type=str | None, default=None, help='As in "h100:2x8"; default: no budget.')
    parser.add_argument(
        "--memory-per-device", type=str | None, default=None, help='As in "24GiB"; overrides --cluster.'
    )
    parser.add_argument("--precision", type=str, default="bf16-mixed", help="bf16-mixed, bf16-true or 32-true.")
    parser.add_argument("--prompt-length", type=int, default=512, help="Tokens of the longest prompt.")
    parser.add_argument("--response-length", type=int, default=1024, help="Tokens of the longest response.")
    parser.add_argument("--batch", type=int, default=64, help="Sequences of an iteration: prompts times responses.")
    parser.add_argument("--responses-per-prompt", type=int, default=1, help="Which share a prompt's prefill.")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192, help="Where the plan sets none.")
    return parser


def _check_plan(chosen: Any) -> str:
    """Return the table of a plan's memory; PlanError, with the table before it, for one that does not fit."""
    if chosen.algorithm not in ALGORITHMS:
        raise PlanError(f"--algorithm={chosen.algorithm} is not one of {', '.join(ALGORITHMS)}")
    sources = dict(_role_and_model(text) for text in chosen.model)
    flow = ALGORITHMS[chosen.algorithm].dataflow_of(sources)
    plan = ExecutionPlan.load(chosen.check).completed(flow)
    cluster = None if chosen.cluster is None else ClusterSpec.parse(chosen.cluster)
    world_size = 1 + max(rank for layout in plan.layouts for rank in layout.ranks)
    plan.check(flow, world_size if cluster is None else cluster.num_devices)
    roles = [
        Role(name=name, source=source, trained=name in flow.trained_roles, task=_TASKS.get(name, "causal_lm"))
        for name, source in sources.items()
    ]
    workload = Workload(
        num_sequences=chosen.batch, prompt_tokens=chosen.prompt_length, response_tokens=chosen.response_length,
        micro_batch_tokens=chosen.micro_batch_tokens, samples_per_prompt=chosen.responses_per_prompt,
    )  # fmt: skip
    described = describe_roles(roles, {})
    plan.check_models(flow, {name: role.model for name, role in described.items()})
    settings = settings_of_precision(chosen.precision)

    def forecast(candidate: ExecutionPlan) -> MemoryForecast:
        return forecast_memory(flow, candidate, described, settings, workload, ranks=range(world_size))

    table = forecast(plan).summary()
    budget = None if cluster is None else cluster.device_memory_bytes
    if chosen.memory_per_device is not None:
        budget = parse_bytes(chosen.memory_per_device)
    excess = None if budget is None else find_excess(flow, plan, forecast, budget_bytes=budget)
    if excess is not None:
        sys.stdout.write(f"{table}\n")
        raise PlanError(excess)
    return table


def _role_and_model(text: str) -> tuple[str, str]:
    role, separator, model = text.partition("=")
    if not separator or not role or not model:
        raise PlanError(f"--model={text} must name a role and its model, as in --model actor=Qwen/Qwen3-0.6B")
    return role, model


def run(args: Sequence[str]) -> None:
    """Do what the arguments say; errors are raised."""
    if args[:1] == ["export"]:
        chosen = export_parser().parse_args(list(args[1:]))
        folder = export_checkpoint(
            Path(chosen.checkpoint), Path(chosen.output), role=chosen.role, dtype=parse_dtype(chosen.dtype)
        )
        sys.stdout.write(f"{chosen.role} of {chosen.checkpoint} written to {folder}\n")
    elif args[:1] == ["plan"]:
        sys.stdout.write(f"{_check_plan(plan_parser().parse_args(list(args[1:])))}\n")
    else:
        ReallocCLI()


def main() -> int:
    """Run the command line of this process, and return its exit code."""
    if os.getcwd() not in sys.path:  # reward functions are named by import paths, and mostly lie beside the file
        sys.path.insert(0, os.getcwd())
    try:
        run(sys.argv[1:])
    except OUR_ERRORS as error:
        rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        sys.stderr.write(told_in_a_line(error, rank))
        sys.stderr.flush()
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
