"""Read the run of a ``fit`` configuration for ``lightning-realloc plan``: algorithm, models, workload, devices, plan.

The algorithm is constructed from the settings that calls, roles and lengths follow from. Names stand for its models,
and a placeholder for its reward functions: no weights, no data and no code of the user are read. The flags of the
command line take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from lightning_realloc.algorithms.base.adapters import AdapterSource
from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.demonstrations import SFTDataModule
from lightning_realloc.data.feedback import BinaryFeedbackDataModule
from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.data.steps import StepDataModule
from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.dataflow.repeated_keys import refuse_repeated_keys
from lightning_realloc.errors import PlanError
from lightning_realloc.generation import SamplingParams
from lightning_realloc.remote_path import expand_home
from lightning_realloc.report.plan_flags import ROLES
from lightning_realloc.report.run_algorithm import (
    ALGORITHM_NAMES,
    Content,
    algorithm_class,
    model_name,
    own_name,
    placeholder_algorithm,
    refuse_unknown_settings,
)
from lightning_realloc.strategies.realloc import ReallocStrategy
from lightning_realloc_autoload import STRATEGIES

_DATA_MODULES: Mapping[str, type[RowDataModule]] = {
    cls.__name__: cls
    for cls in (PromptDataModule, SFTDataModule, PreferenceDataModule, BinaryFeedbackDataModule, StepDataModule)
}
_PRECISIONS: Mapping[str, str] = {"None": "32-true", "32": "32-true", "bf16": "bf16-mixed"}
"""Short names of precisions, as Lightning reads them."""
_NAMED_PLANS = ("heuristic", "static")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """The run of a configuration."""

    files: str
    """Names of its files, for messages."""
    module: MultiModelModule
    """Its algorithm, without models and reward functions."""
    roles: tuple[Role, ...]
    """The algorithm's roles. A source is a configuration without sizes, whose name is that of the model."""
    shares: Mapping[str, str]
    """Role -> role whose model it shares, without that role's adapters."""
    devices: tuple[int, int] | None
    """Nodes, and devices of each; None if the run takes all devices of a machine."""
    plan_source: Any
    """Setting ``plan`` of the strategy."""
    flags: Mapping[str, Any]
    """Flags of ``lightning-realloc plan`` that say the same, as far as the file does."""
    notes: tuple[str, ...]
    """Settings that change memory and are not counted."""
    data: Mapping[str, Any]
    """Settings of a data module of this package; empty for another one."""
    tokenizer: str | None
    """Folder or name of the tokenizer, and of the processor of images; None: that of the first trained role."""

    @property
    def dataflow(self) -> Dataflow:
        """Calls of the algorithm."""
        return self.module.dataflow

    @property
    def options(self) -> TrainOptions:
        """Training options of the first trained role, as in the run's own forecast."""
        return self.module.train_options_of(self.dataflow.trained_roles[0])

    @property
    def sources(self) -> dict[str, str]:
        """Role -> its model, as the user names it, in the order of the calls."""
        named = {role.name: model_name(role) for role in self.roles}
        return {name: named[name] for name in self.dataflow.roles}

    @property
    def adapters(self) -> dict[str, AdapterSource]:
        """Trained role -> adapters that are trained instead of its model."""
        return {role.name: role.peft for role in self.roles if role.trained and role.peft is not None}

    def micro_batch_tokens(self, *, is_cpu: bool) -> int:
        """Return the most tokens of a forward pass for which the plan sets no limit."""
        return self.options.micro_batch_tokens_on("cpu" if is_cpu else "cuda")

    def plan(self) -> ExecutionPlan:
        """Return the plan of the strategy.

        Raises:
            PlanError: if the run works out its plan when it starts, and for a plan that cannot be read.
        """
        source = self.plan_source
        if source in _NAMED_PLANS:
            raise PlanError(
                f"{self.files}: the strategy's plan is {source!r}, which the run works out when it starts: there is "
                f"nothing to check; search one with lightning-realloc plan --config ... --save PLAN.YAML, or name one: "
                f"--check PLAN.YAML"
            )
        try:
            return ExecutionPlan.load(source) if isinstance(source, str) else ExecutionPlan.from_mapping(source)
        except PlanError as error:
            raise PlanError(f"{self.files}: trainer.strategy.init_args.plan: {error}") from None


# ---- files
def read_content(files: Sequence[str]) -> dict[str, Any]:
    """Return the content of configurations of ``fit``; a later one changes the settings that it names.

    Raises:
        PlanError: for files that cannot be read, and for two that name different classes for one key.
    """
    merged: dict[str, Any] = {}
    for file in files:
        try:
            text = expand_home(Path(file)).read_text(encoding="utf-8-sig")
            refuse_repeated_keys(text)
            content = get_loader("yaml")(text)
        except OSError as error:
            raise PlanError(
                f"--config={file} cannot be read ({error.strerror}) in {Path.cwd()}; name another file"
            ) from None
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise PlanError(f"--config={file} cannot be read as a configuration of `fit`: {error}") from None
        if not isinstance(content, Mapping):
            raise PlanError(f"--config={file} is no configuration of `fit`; it has the keys trainer, model and data")
        merged = _merged(merged, content, file)
    return merged


def _merged(first: Content, second: Content, file: str) -> dict[str, Any]:
    result = dict(first)
    for key, value in second.items():
        before = result.get(key)
        if key == "plan" or not (isinstance(before, Mapping) and isinstance(value, Mapping)):
            result[key] = value
            continue
        paths = [part["class_path"] for part in (before, value) if "class_path" in part]
        if len(set(paths)) > 1:
            raise PlanError(
                f"--config={file}: key {key} names the class {paths[1]}, and an earlier file {paths[0]}; give one file "
                f"with all settings of the class"
            )
        result[key] = _merged(before, value, file)
    return result


# ---- the run
def planned_run(content: Content, files: str, models: Mapping[str, str], peft: Any = None) -> RunFile:
    """Return the run of a configuration. Pure.

    Args:
        content: The configuration.
        files: Names of its files, for messages.
        models: Role -> model that takes the place of the file's.
        peft: Adapters that take the place of the file's ``peft_config``; None: the file's.

    Raises:
        PlanError: for classes that are not of this package, and for settings that a run would refuse; with the key.
    """
    path, settings = _class_and_settings(content, "model", files)
    cls = algorithm_class(path, files)
    known = cls.dataflow_of(ROLES).roles
    settings |= {role: model for role, model in models.items() if role in known}  # others are refused below
    if peft is not None:
        settings["peft_config"] = peft
    module = placeholder_algorithm(cls, settings, files)
    roles = _roles(module, models, files)
    trainer = _mapping(content.get("trainer"), "trainer", files)
    strategy = _strategy_settings(trainer.get("strategy"), files)
    sampling = getattr(module, "sampling", None)
    devices, data = _devices(trainer, files), _own_data(content, files)
    return RunFile(
        files=files,
        module=module,
        roles=roles,
        shares=_shares(roles, settings),
        devices=devices,
        plan_source=strategy.get("plan") or "heuristic",
        flags={
            "algorithm": ALGORITHM_NAMES[cls.__name__],
            "train_vision": module.loading.train_vision,
            "num_minibatches": module.train_options_of(module.dataflow.trained_roles[0]).num_minibatches,
            **_trainer_flags(trainer, strategy, devices, settings, files),
            **_sequence_flags(content, sampling, files),
        },
        notes=_notes(settings),
        data=data,
        tokenizer=next(
            (one for one in (data.get("tokenizer"), settings.get("tokenizer")) if isinstance(one, str)), None
        ),
    )


def _class_and_settings(content: Content, key: str, files: str) -> tuple[str, dict[str, Any]]:
    given = content.get(key)
    if isinstance(given, str):
        return given, {}
    if not isinstance(given, Mapping) or not isinstance(given.get("class_path"), str):
        raise PlanError(
            f"{files}: the key {key} must name a class, as in {key}: {{class_path: ..., init_args: {{...}}}}; it is "
            f"{given!r:.60}"
        )
    return given["class_path"], _mapping(given.get("init_args"), f"{key}.init_args", files)


def _mapping(given: object, key: str, files: str) -> dict[str, Any]:
    """Return a copy of a mapping, empty for None. Raises PlanError for another value of the key."""
    if given is not None and not isinstance(given, Mapping):
        raise PlanError(f"{files}: the key {key} is {given!r:.60}; write a mapping of settings to values")
    return dict(given or {})


def _count(given: object, key: str, files: str) -> int | None:
    """Return a whole number of at least 1, or None. Raises PlanError for another value of the key."""
    if given is None:
        return None
    if not str(given).isdecimal() or not int(str(given)):
        raise PlanError(f"{files}: the key {key} is {given!r:.60}; write a whole number of at least 1")
    return int(str(given))


def _roles(module: MultiModelModule, models: Mapping[str, str], files: str) -> tuple[Role, ...]:
    roles = tuple(module.roles())
    names = [role.name for role in roles]
    for role in models:
        if role not in names:
            raise PlanError(
                f"--{role}: the run of {files} has no role {role!r}, it has {', '.join(names)}; change its settings, "
                f"such as kl_coef for a reference"
            )
    return roles


def _shares(roles: Sequence[Role], settings: Content) -> dict[str, str]:
    """Return the roles that share a model, also for a reference that is named as the actor's base."""
    shares = {role.name: role.shares for role in roles if role.shares is not None}
    actor = next((role for role in roles if role.name == "actor"), None)
    is_base = "reference" in {role.name for role in roles} and settings.get("reference") == settings.get("actor")
    return shares | ({"reference": "actor"} if is_base and actor is not None and actor.has_adapters else {})


def _strategy_settings(given: object, files: str) -> Content:
    """Return the settings of the strategy. Raises PlanError for one that runs no plans."""
    if given is None:
        return {}
    if isinstance(given, str) and given in STRATEGIES:
        return STRATEGIES[given]
    path, settings = _class_and_settings({"trainer.strategy": given}, "trainer.strategy", files)
    if path.rpartition(".")[2] != "ReallocStrategy":
        raise PlanError(f"{files}: trainer.strategy={path} runs no plans; use realloc, or ReallocStrategy")
    refuse_unknown_settings(ReallocStrategy, settings, f"{files}: trainer.strategy")
    return settings


def _devices(trainer: Content, files: str) -> tuple[int, int] | None:
    """Return nodes, and devices of each; None if the run takes all that there are."""
    given: Any = trainer.get("devices")
    if isinstance(given, str):
        given = [part for part in given.split(",") if part.strip()] if "," in given else given.strip()
    count = len(given) if isinstance(given, list | tuple) else int(given) if str(given).isdecimal() else 0
    if not count and trainer.get("accelerator") == "cpu":
        count = 1
    return (_count(trainer.get("num_nodes"), "trainer.num_nodes", files) or 1, count) if count else None


def _trainer_flags(
    trainer: Content, strategy: Content, devices: tuple[int, int] | None, settings: Content, files: str
) -> dict[str, Any]:
    precision = str(trainer.get("precision"))
    chunks = _count(strategy.get("generation_chunks"), "trainer.strategy.init_args.generation_chunks", files)
    flags = {
        "precision": _PRECISIONS.get(precision, precision),
        "generation_chunks": chunks,
        "memory_per_device": strategy.get("memory_per_device"),
        "cluster": strategy.get("cluster") if isinstance(strategy.get("cluster"), str) else None,
        "peft": _flow_text(settings.get("peft_config")),
    }
    if trainer.get("accelerator") == "cpu" and flags["cluster"] is None and devices is not None:
        flags["cluster"] = f"cpu:{devices[0]}x{devices[1]}"
    return {name: value if name == "generation_chunks" else str(value) for name, value in flags.items() if value}


def _flow_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).strip()


def _sequence_flags(content: Content, sampling: SamplingParams | None, files: str) -> dict[str, int]:
    """Return the flags about numbers and lengths of sequences, as far as the file bounds them."""
    num_responses = 1 if sampling is None else sampling.n
    flags = {"responses_per_prompt": num_responses}
    if sampling is not None:
        flags["response_length"] = sampling.max_new_tokens
    if content.get("data") is None:
        return flags
    path, settings = _class_and_settings(content, "data", files)
    rows, longest_prompt, longest = (
        _count(settings.get(name), f"data.init_args.{name}", files)
        for name in ("batch_size", "max_prompt_tokens", "max_tokens")
    )
    if (cls := _DATA_MODULES.get(own_name(path))) is not None:
        refuse_unknown_settings(cls, settings, f"{files}: data")
        if rows is not None:
            flags["batch"] = rows * cls.group_size * num_responses
    if longest_prompt is not None:
        flags["prompt_length"] = longest_prompt
    if longest is not None:  # of both together; a response may have all but one
        flags |= {"prompt_length": 1, "response_length": max(1, longest - 1)}
    return flags


def _own_data(content: Content, files: str) -> dict[str, Any]:
    """Return the settings of a data module of this package; empty for another one, and without one."""
    path, settings = ("", {}) if content.get("data") is None else _class_and_settings(content, "data", files)
    return settings if own_name(path) in _DATA_MODULES else {}


def _notes(settings: Content) -> tuple[str, ...]:
    uncounted = {
        "quantization_config": "4-bit weights count as 16-bit or 32-bit ones",
        "optimizer": "its state counts as that of AdamW",
        "optimizers": "their states count as that of AdamW",
    }
    return tuple(f"{name}: {text}." for name, text in uncounted.items() if settings.get(name))
