"""Translate the short flags of ``lightning-realloc grpo | ppo | sft | dpo | reward`` into arguments of ``fit``.

`configuration` is pure: flags in, nested settings of ``fit`` out. Settings of ``fit``, such as
``--model.learning_rate``, follow the configuration on the command line, so they take precedence.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import lightning_realloc
from lightning_realloc.commands.agent_settings import ENVIRONMENT_FORMS, TOOL_FORMS, agent_settings
from lightning_realloc.commands.command_parser import CommandParser
from lightning_realloc.commands.file_forms import flag_of
from lightning_realloc.commands.parsing import refuse_gguf
from lightning_realloc.commands.rewards_and_sets import (
    add_evaluation_flags,
    describe_names,
    evaluation_settings,
    reward_setting,
)
from lightning_realloc.data.sources import data_suffix, is_saved, matching_files
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.core.capabilities import EngineName
from lightning_realloc.remote_path import expand_home, is_path

SEQUENCES_PER_ITERATION = 128
"""Responses of an iteration, unless ``--batch-size`` is given. Larger: steadier gradients, slower iterations."""
ROWS_PER_ITERATION = 16
"""Rows or pairs of an iteration without generation, unless ``--batch-size`` is given."""
STEPS_PER_CHECKPOINT = 50
"""Default of ``--checkpoint-every``."""
STEPS_PER_TABLE = 10
"""Iterations between two tables of samples. Fewer make a larger file."""
LORA_RANK = 16
"""Rank of ``--lora`` without a number."""
_FIT_OPTIONS = frozenset(
    {"--config", "-c", "--ckpt_path", "--weights_only", "--seed_everything", "--print_config"}
    | {"--launcher", "--max_failures"}
)
_FIT_GROUPS = ("--trainer.", "--model.", "--data.")
_DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
_EPILOG = """\
Every setting of `fit` can follow, and takes precedence: --model.learning_rate 3e-6, --trainer.devices 2,
--data.val_fraction 0.1, --config more.yaml, --ckpt_path FOLDER. `lightning-realloc fit --help` lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortCommand:
    """One command for training, and its classes."""

    algorithm: str
    """Name of the algorithm's class."""
    data_module: str
    """Name of the data module's class."""
    role: str = "actor"
    """Setting of the algorithm that takes the model."""
    num_responses: int | None = None
    """Default number of responses per prompt; None for algorithms that generate nothing."""


COMMANDS: Mapping[str, ShortCommand] = {
    "grpo": ShortCommand(algorithm="GRPO", data_module="PromptDataModule", num_responses=8),
    "ppo": ShortCommand(algorithm="PPO", data_module="PromptDataModule", num_responses=1),
    "sft": ShortCommand(algorithm="SFT", data_module="SFTDataModule"),
    "dpo": ShortCommand(algorithm="DPO", data_module="PreferenceDataModule"),
    "reward": ShortCommand(algorithm="RewardModel", data_module="PreferenceDataModule", role="reward"),
}
"""Commands by name."""


def short_parser(name: str) -> CommandParser:
    """Return the parser of a command's short flags."""
    command = COMMANDS[name]
    classes = (getattr(lightning_realloc, cls) for cls in (command.algorithm, command.data_module))
    parser = CommandParser(name, epilog=_EPILOG, flag_of=partial(flag_of, *classes))
    add = parser.add_argument
    add("--model", metavar="NAME", help="Hugging Face name or folder of the model to train.")
    add("--data", metavar="DATA", help="JSONL, JSON, CSV or Parquet file, folder of a data set, or name on the hub.")
    if command.num_responses is not None:
        _add_generation_flags(parser, command)
        default_batch = f"{SEQUENCES_PER_ITERATION} / n"
    else:
        default_batch = str(ROWS_PER_ITERATION)
    add("--split", metavar="SPLIT", help="Split of the data set, such as train[:1000]. Default: train.")
    add("--config-name", metavar="NAME", help="Configuration of the data set on the hub, such as main.")
    add("--batch-size", type=int, metavar="N", help=f"Rows of the data per iteration. Default: {default_batch}.")
    add("--steps", type=int, metavar="N", help="Number of iterations. Default: one epoch.")
    add("--epochs", type=int, metavar="N", help="Number of epochs. Default: 1.")
    add("--learning-rate", type=float, metavar="RATE", help="Learning rate. Default: that of the algorithm.")
    add(
        "--lora",
        type=int,
        nargs="?",
        const=LORA_RANK,
        metavar="RANK",
        help=f"Train adapters; rank {LORA_RANK} by default.",
    )
    if command.role == "actor":
        add_evaluation_flags(add)
    add("--output", metavar="FOLDER", default=f"runs/{name}", help="Model, checkpoints and log. Default: %(default)s.")
    every = "Iterations between checkpoints. Default: %(default)s."
    add("--checkpoint-every", type=int, default=STEPS_PER_CHECKPOINT, metavar="N", help=every)
    add("--save-config", metavar="RUN.YAML", help="Write the configuration for `fit --config`, and do not train.")
    return parser


def _add_generation_flags(parser: CommandParser, command: ShortCommand) -> None:
    """Add the flags of commands that generate: rewards, tools, prompts and responses."""
    add = parser.add_argument
    add(
        "--reward",
        action="append",
        default=[],
        metavar="REWARD",
        help=f"Repeat it for several rewards: {describe_names()}.",
    )
    tools = f"Tools that the model may call, one or several: {TOOL_FORMS}."
    add("--tools", nargs="+", action="extend", default=[], metavar="TOOLS", help=tools)
    add("--environment", metavar="CLASS", help=f"Environment that answers the model: {ENVIRONMENT_FORMS}.")
    turns = "Most turns of the model in one response, with tools or an environment. Default: 8."
    add("--max-turns", type=int, metavar="N", help=turns)
    add("--prompt-column", metavar="NAME", default="prompt", help="Column with the prompts. Default: %(default)s.")
    add("--n", type=int, default=command.num_responses, help="Responses per prompt. Default: %(default)s.")
    add(
        "--max-new-tokens",
        type=int,
        default=512,
        metavar="N",
        help="Tokens of the longest response, with answers of tools. Default: %(default)s.",
    )
    add("--engine", choices=get_args(EngineName), help="Engine that generates. Default: native.")


@dataclass(frozen=True, slots=True)
class ShortRun:
    """A run that a command line asks for."""

    fit_arguments: tuple[str, ...]
    """Arguments of ``lightning-realloc`` that do the same, beginning with ``fit``."""
    save_config: Path | None
    """File to write the configuration to in place of training; None: train."""


def read_command_line(name: str, arguments: Sequence[str], *, precision: Callable[[], str | None]) -> ShortRun:
    """Return the run of a command line.

    Args:
        name: Command, one of `COMMANDS`.
        arguments: Arguments after the command.
        precision: Returns the Trainer's precision on this machine; None: Lightning's default.

    Raises:
        ConfigError: for a flag that is unknown, missing or out of range, and for data, rewards, tools or environments
            that are not there.
    """
    short, settings = split_arguments(arguments)
    flags = short_parser(name).parse(short)
    _check(name, flags)
    data = None if flags.data is None else data_setting(flags.data, flags.split, flags.config_name)
    agent = {} if COMMANDS[name].num_responses is None else agent_settings(flags)
    config = configuration(name, flags, data, precision(), agent=agent)
    if COMMANDS[name].role == "actor":
        config["trainer"]["callbacks"] += evaluation_settings(flags, partial(_held_out, config_name=flags.config_name))
    path = None if flags.save_config is None else expand_home(Path(flags.save_config))
    return ShortRun(("fit", "--config", json.dumps(config), *settings), path)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the short flags with their values, and the settings of ``fit`` with theirs.

    >>> split_arguments(["--model", "gpt2", "--model.learning_rate", "1e-6", "--steps", "3"])
    (['--model', 'gpt2', '--steps', '3'], ['--model.learning_rate', '1e-6'])
    """
    short: list[str] = []
    settings: list[str] = []
    target = short
    for argument in arguments:
        if argument.startswith("-") and not re.match(r"-\.?\d", argument):  # a negative number is a value
            is_setting = argument.startswith(_FIT_GROUPS) or argument.partition("=")[0] in _FIT_OPTIONS
            target = settings if is_setting else short
        target.append(argument)
    return short, settings


def configuration(
    name: str,
    flags: argparse.Namespace,
    data: str | Mapping[str, str] | None,
    precision: str | None,
    *,
    agent: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the nested settings of ``fit`` for a command's flags. Pure.

    Args:
        name: Command, one of `COMMANDS`.
        flags: Flags of the command's parser.
        data: The data module's ``data``; None leaves it out.
        precision: The Trainer's precision; None leaves it out.
        agent: Settings of the algorithm for tools and environments.
    """
    command = COMMANDS[name]
    generates = command.num_responses is not None
    default_batch = max(1, SEQUENCES_PER_ITERATION // flags.n) if generates else ROWS_PER_ITERATION
    model: dict[str, Any] = {command.role: flags.model, **(agent or {})}
    rows: dict[str, Any] = {"batch_size": flags.batch_size or default_batch}
    if data is not None:
        rows["data"] = data
    if generates:
        if flags.reward:
            model["reward"] = reward_setting(flags.reward)
        model["sampling"] = {"n": flags.n, "max_new_tokens": flags.max_new_tokens}
        if flags.engine is not None:
            model["engine"] = flags.engine
        rows |= {"prompt_column": flags.prompt_column, "text_prompts": "auto"}
    if flags.learning_rate is not None:
        model["learning_rate"] = flags.learning_rate
    if flags.lora is not None:
        model["peft_config"] = {
            "peft_type": "LORA",
            "r": flags.lora,
            "lora_alpha": 2 * flags.lora,
            "target_modules": "all-linear",
        }
    return {
        "trainer": _trainer(flags, precision, generates=generates),
        "model": {"class_path": command.algorithm, "init_args": model},
        "data": {"class_path": command.data_module, "init_args": rows},
    }


def _trainer(flags: argparse.Namespace, precision: str | None, *, generates: bool) -> dict[str, Any]:
    """Return the Trainer's settings: length, precision, log with a record, checkpoints, and the model at the end."""
    output = expand_home(Path(flags.output))
    table = {"every_n_steps": STEPS_PER_TABLE, "path": str(output / "rollouts.csv")}  # also without a logger
    every = flags.checkpoint_every if flags.steps is None else min(flags.checkpoint_every, flags.steps)
    length = {"max_epochs": flags.epochs or 1} if flags.steps is None else {"max_steps": flags.steps}
    return {
        **length,
        **({} if precision is None else {"precision": precision}),
        "default_root_dir": str(output),
        "log_every_n_steps": 1,
        "logger": {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": str(output), "name": "log", "flush_logs_every_n_steps": 1},
        },
        "callbacks": [
            {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {
                    "dirpath": str(output / "checkpoints"),
                    "every_n_train_steps": every,
                    "save_last": True,  # a link
                    "save_on_exception": True,
                    "enable_version_counter": False,
                },
            },
            {"class_path": "SaveHuggingFace", "init_args": {"dirpath": str(output / "model")}},
            {"class_path": "Timeline"},
            *([{"class_path": "RolloutTable", "init_args": table}] if generates else []),
        ],
    }


def data_setting(
    data: str, split: str | None, config_name: str | None, *, flag: str = "--data"
) -> str | dict[str, str]:
    """Return a data module's ``data``: a path that it reads itself, or a mapping for ``datasets``.

    Raises:
        ConfigError: for a file or folder that does not exist.
    """
    path = expand_home(Path(data))
    by_datasets, files = split is not None or config_name is not None, matching_files(path)
    if files:
        by_datasets |= data_suffix(path) in (".csv", ".json")
    elif path.is_dir():
        by_datasets |= not is_saved(path)
    elif data_suffix(path) in _DATA_FILES or is_path(data):
        raise ConfigError(
            f"{flag}: there is no {data!r} in {Path.cwd()}; give a file ({', '.join(_DATA_FILES)}), a folder, or the "
            f"name of a data set on the Hugging Face hub"
        )
    else:
        by_datasets = True
    if not by_datasets:
        return str(path)
    named = {} if config_name is None else {"name": config_name}
    return {"path": str(path) if files or path.exists() else data, "split": split or "train", **named}


def _held_out(data: str, config_name: str | None) -> str | dict[str, str]:
    """Return the rows of ``--eval-set``: for a name on the hub, those of the split test."""
    path = expand_home(Path(data))
    is_local = path.exists() or matching_files(path) or is_path(data) or data_suffix(path) in _DATA_FILES
    return data_setting(data, *((None, None) if is_local else ("test", config_name)), flag="--eval-set")


def _check(name: str, flags: argparse.Namespace) -> None:
    """Raise ConfigError for flags that are missing, out of range or contradict each other."""
    needed = {"--model": "a Hugging Face name or folder"}
    plays = getattr(flags, "environment", None) is not None
    if not plays or flags.steps is None:
        other = ", or --steps for an environment that writes the prompts" if plays else ""
        needed["--data"] = f"a file, a folder or the name of a data set{other}"
    if COMMANDS[name].num_responses is not None and flags.environment is None:
        needed["--reward"] = describe_names()
    for flag, example in needed.items():
        if not getattr(flags, flag.lstrip("-")):
            raise ConfigError(f"{name} needs {flag}: {example}")
    counts = ("n", "max_new_tokens", "max_turns", "batch_size", "steps", "epochs", "lora")
    for flag in (*counts, "checkpoint_every", "eval_every"):
        value = getattr(flags, flag, None)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')}={value} must be at least 1")
    rate = flags.learning_rate
    if rate is not None and not 0 < rate < math.inf:
        raise ConfigError(f"--learning-rate={rate} must be a positive number, such as 1e-6")
    if flags.steps is not None and flags.epochs is not None:
        raise ConfigError(f"--steps={flags.steps} and --epochs={flags.epochs} both end the run; give one of them")
    refuse_gguf(flags.model)
