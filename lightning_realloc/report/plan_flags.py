"""Flags of ``lightning-realloc plan``, and combinations of them that contradict each other."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, get_args

from jsonargparse import ArgumentParser, Namespace

from lightning_realloc.algorithms import (
    DPO,
    GRPO,
    KTO,
    ORPO,
    PPO,
    RLOO,
    SFT,
    BestOfN,
    OnlineDPO,
    OnPolicyDistillation,
    ProcessReward,
    ReinforcePlusPlus,
    ReMax,
    RewardModel,
)
from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.errors import PlanError, require_choice
from lightning_realloc.remote_path import expand_home
from lightning_realloc.runtime.model.structure import TrainVision
from lightning_realloc.tuning.memory.parts import HEADROOM

ALGORITHMS: dict[str, type[MultiModelModule]] = {
    "grpo": GRPO,
    "ppo": PPO,
    "sft": SFT,
    "dpo": DPO,
    "kto": KTO,
    "orpo": ORPO,
    "reward": RewardModel,
    "process-reward": ProcessReward,
    "rloo": RLOO,
    "reinforce++": ReinforcePlusPlus,
    "remax": ReMax,
    "best-of-n": BestOfN,
    "online-dpo": OnlineDPO,
    "distillation": OnPolicyDistillation,
}
"""Names for ``--algorithm``."""
ROLES = ("actor", "critic", "reference", "reward", "teacher")
"""Roles with flags of their own."""
PLAN_HELP = (
    "Find the best plan for models and a cluster that need not be there (default). Or compare plans (--compare), show "
    "how time and cost grow (--sweep), or show the memory that a plan needs on every rank (--check). It reads "
    "configurations alone: no device, no weights."
)
OWN_PLAN = ""
"""Value of ``--check`` without a file."""
DEFAULT_SEARCH_SECONDS = 10.0
"""Default CPU seconds of one search; raising it finds better plans for large clusters."""


def plan_parser() -> ArgumentParser:
    """Return the parser of ``lightning-realloc plan``."""
    parser = ArgumentParser(prog="lightning-realloc plan", description=PLAN_HELP, exit_on_error=False)
    add, add_text = parser.add_argument, partial(parser.add_argument, type=str, default=None)
    run_help = (
        "A configuration of `fit`, which gives algorithm, models, batch, lengths, precision, devices and plan. Flags "
        "take precedence."
    )
    add_text("--config", action="append", default=[], metavar="RUN.YAML", help=run_help)
    _add_model_flags(parser)
    add_text("--cluster", help='Devices, as in "h100:2x8" (nodes x devices); --check works without.')
    add_text("--memory-per-device", help='Memory of a device, as in "24GiB"; overrides --cluster.')
    room_help = f"Share of this memory that found plans leave free, since forecasts err; {HEADROOM:g}."
    add("--headroom", type=float, default=None, help=room_help)
    _add_workload_flags(parser)
    add("--seconds", type=float, default=None, help=f"CPU seconds of search at each size; {DEFAULT_SEARCH_SECONDS:g}.")
    add("--seed", type=int, default=None, help="Seed of the search (default: 0).")
    add("--save", type=expand_home, default=None, metavar="PLAN.YAML", help="File for the best plan.")
    add("--price-per-gpu-hour", type=float, default=None, help="Price of a device per hour.")
    add_text("--sweep", metavar="nodes=1,2,4", help="Search at several sizes.")
    add_text("--compare", nargs=2, metavar=("A.YAML", "B.YAML"), help="Price two plans.")
    check_help = "Show a plan's memory; fail if it does not fit. Without a file: the plan of --config."
    add_text("--check", nargs="?", const=OWN_PLAN, metavar="PLAN.YAML", help=check_help)
    return parser


def _add_model_flags(parser: ArgumentParser) -> None:
    model = "a Hugging Face name, a folder or config.json, or a shape: layers=32,hidden=4096,intermediate=14336,..."
    add = partial(parser.add_argument, type=str, default=None)
    add("--algorithm", default="grpo", help=f"One of {', '.join(ALGORITHMS)}.")
    add("--actor", help=f"Policy: {model}")
    add("--critic", help="Default: as --reward, else as --actor.")
    add("--reference", help='Default: as --actor, for grpo "none", which leaves it out.')
    add(
        "--reward",
        help='Default: as --critic; "none" for reward functions. Further ones: --model reward_2=...',
    )
    add("--teacher", help="Model that distillation learns from; it has no default.")
    add(
        "--model",
        action="append",
        default=[],
        metavar="ROLE=MODEL",
        help="Model of any role. If only --model is used, no role has a default model.",
    )
    add(
        "--peft",
        metavar="CONFIG",
        help="Adapters of trained roles, as an algorithm's peft_config: a mapping in YAML, as in "
        "'{r: 16, target_modules: all-linear}', one of these for each role, or a folder of saved ones.",
    )
    add("--train-vision", default="none", help="Trained parts that only images use: none, projector or all.")


def _add_workload_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--precision", type=str, default="bf16-mixed", help="bf16-mixed, bf16-true or 32-true.")
    add("--prompt-length", type=int, default=512, help="Tokens of the longest prompt, without its images.")
    add("--images-per-prompt", type=int, default=0, help="Images of each prompt, for a model of images and text: 0.")
    add("--image-size", type=str, default="1024x768", help="Width and height of an image in pixels: 1024x768.")
    add("--response-length", type=int, default=1024, help="Tokens of the longest response.")
    add("--batch", type=int, default=64, help="Sequences of an iteration: prompts times responses.")
    add("--responses-per-prompt", type=int, default=1, help="Responses that share a prompt's prefill.")
    add("--num-minibatches", type=int, default=1, help="Optimizer steps of an iteration.")
    add("--generation-chunks", type=int, default=1, help="Chunks of samples, as in ReallocStrategy.")
    add("--micro-batch-tokens", type=int, default=None, help="For plans of --check or --compare that set none: 8192.")


def parse_flags(parser: ArgumentParser, arguments: Sequence[str], *, defaults: bool = True) -> Namespace:
    """Return the flags of a command line, with the ``defaults`` of others.

    Raises:
        PlanError: for unknown flags, with the nearest known one.
    """
    try:
        return parser.parse_args(list(arguments), defaults=defaults)
    except argparse.ArgumentError as error:
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", str(error))
        near = get_close_matches(unknown[1], parser._option_string_actions, n=1) if unknown else ()
        meant = f"did you mean {near[0]}? " if near else ""
        raise PlanError(f"{error}; {meant}lightning-realloc plan --help lists all flags") from None


_MODES = ("check", "compare", "sweep")
_COUNTS = ["batch", "prompt_length", "response_length", "responses_per_prompt", "num_minibatches", "generation_chunks"]
_UNUSED_FLAGS: dict[str, tuple[str, ...]] = {
    "search": ("micro_batch_tokens",),
    "check": ("save", "seconds", "seed", "price_per_gpu_hour", "headroom"),
    "compare": ("save", "seconds", "seed", "headroom"),
    "sweep": ("micro_batch_tokens", "save"),
}
"""Mode -> flags that it does not use."""
_MODE_ADVICE = {
    "search": "it chooses the best value, and --check and --compare use it where a plan sets none",
    "check": "it neither searches nor prices: remove one",
    "compare": "it does not search: remove one",
    "sweep": "it finds the best plan of each size; remove one",
}


def refuse_contradictions(flags: Any) -> None:
    """Raise PlanError for two modes, flags that a mode does not use, and values out of range."""
    modes = [mode for mode in _MODES if flags[mode] is not None]
    if len(modes) > 1:
        raise PlanError(f"--{modes[0]} and --{modes[1]} are two modes; run them one after the other")
    mode = modes[0] if modes else "search"
    for name in _UNUSED_FLAGS[mode]:
        if flags[name] is not None:
            subject = f"--{mode}" if modes else "a search"
            raise PlanError(f"--{name.replace('_', '-')} does not apply to {subject}: {_MODE_ADVICE[mode]}")
    if flags.check == OWN_PLAN and not flags.config:
        raise PlanError("--check without a file checks the plan of a configuration; add --config RUN.YAML, or a file")
    if flags.cluster is None and modes != ["check"]:
        raise PlanError("--cluster is missing, but times depend on it; as in --cluster h100:2x8 (nodes x devices)")
    if flags.headroom is not None and not 0 <= flags.headroom < 1:
        raise PlanError(f"--headroom={flags.headroom:g} is a share of a device's memory; it must lie in [0, 1)")
    for name in ("seconds", "price_per_gpu_hour"):
        value = flags[name]
        if value is not None and not 0 < value < float("inf"):
            raise PlanError(f"--{name.replace('_', '-')}={value:g} must be a positive number")
    for name in (*_COUNTS, "images_per_prompt"):
        least = 0 if name == "images_per_prompt" else 1
        if flags[name] < least:
            raise PlanError(f"--{name.replace('_', '-')}={flags[name]} must be at least {least}")
    require_choice("--train-vision", flags.train_vision, get_args(TrainVision), PlanError)
    if re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", flags.image_size) is None:
        raise PlanError(f"--image-size={flags.image_size} must be a width and a height in pixels, as in 1024x768")
    if flags.num_minibatches > flags.batch:
        raise PlanError(
            f"--num-minibatches={flags.num_minibatches} divides the --batch={flags.batch} responses of an iteration; "
            f"use at most {flags.batch}"
        )
    each = flags.responses_per_prompt
    if flags.batch % each:
        raise PlanError(
            f"--batch={flags.batch} is a number of responses and must be a multiple of --responses-per-prompt={each}; "
            f"use {-(-flags.batch // each) * each}"
        )
    if flags.save is not None and (not Path(flags.save).parent.is_dir() or Path(flags.save).is_dir()):
        raise PlanError(f"--save={flags.save}: no file can be written there; name one in a folder that exists")
