"""Checks of settings, made when an algorithm is built, and how settings that are passed on are typed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_realloc.batch.training import TrainOptions, group_name
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import Speculation
from lightning_realloc.generation.core.sampling import is_of_kind

if TYPE_CHECKING:
    from typing import Unpack as Unpack
else:

    class Unpack:
        """Type ``**settings`` for editors and type checkers only (PEP 692).

        A TypedDict has no defaults. So at run time jsonargparse shall see plain ``**settings``, and read defaults and
        documentation from the base class that takes them.
        """

        def __class_getitem__(cls, item: object) -> object:
            return Any


EngineName = Literal["native", "hf"]
"""Generation engine: ``native`` is continuous batching, ``hf`` the model's own ``generate``."""


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(choices)}")


def check_not_negative(**settings: float) -> None:
    """Raise ConfigError for the first setting that is negative or NaN."""
    for name, value in settings.items():
        if not value >= 0:  # NaN too
            raise ConfigError(f"{name}={value} may not be negative; 0 switches it off")


def check_positive(**settings: float | None) -> None:
    """Raise ConfigError for the first setting that is given, and zero, negative or NaN."""
    for name, value in settings.items():
        if value is not None and not value > 0:  # NaN too
            raise ConfigError(f"{name}={value} must be positive; None leaves it out")


def check_share(**settings: float) -> None:
    """Raise ConfigError for the first setting outside 0..1."""
    for name, value in settings.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{name}={value} must lie between 0 and 1")


def check_kind(kind: type, **settings: object) -> None:
    """Raise ConfigError for the first setting that is given and no ``kind``: YAML takes a mapping, Python does not."""
    for name, value in settings.items():
        if value is not None and not is_of_kind(value, kind):
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; write {_example_of(kind)}")


def _example_of(kind: type) -> str:
    return {Real: "a number", bool: "True or False"}.get(kind, f"{kind.__name__}(...)")


def check_engine(
    engine: str, speculation: Speculation | None, *, max_cache_bytes: int | None, sample_reallocation: bool
) -> None:
    """Raise ConfigError for an engine that there is not, or that cannot do what it is asked for."""
    check_choice("engine", engine, get_args(EngineName))
    if engine == "hf" and speculation is not None:
        raise ConfigError("engine='hf' does not draft; leave speculation out, or use engine='native'")
    if engine == "hf" and sample_reallocation:
        raise ConfigError(
            "engine='hf' cannot hand samples over in the middle; leave sample_reallocation out, or use engine='native'"
        )
    if max_cache_bytes is None:
        return
    if engine == "hf":
        raise ConfigError(
            f"engine='hf' does not bound its cache, as max_cache_bytes={max_cache_bytes} asks; leave max_cache_bytes "
            "out, or use engine='native'"
        )
    if not 1 <= max_cache_bytes < math.inf:
        raise ConfigError(f"max_cache_bytes={max_cache_bytes} must be at least 1 and finite; leave it out for no bound")


def check_minibatches(num_samples: int, options: TrainOptions, *, group_size: int = 1) -> None:
    """Raise ConfigError when an iteration has fewer samples than mini-batches, before any of them is made.

    Args:
        group_size: How many samples stay together: 2 for pairs, of which whole ones go into a mini-batch.
    """
    found, what = num_samples // group_size, group_name(group_size, "sample")
    if found < options.num_minibatches:
        more = "raise batch_size or sampling.n" if group_size == 1 else "raise batch_size"
        raise ConfigError(
            f"num_minibatches={options.num_minibatches} needs as many {what}s in an iteration, and this one makes "
            f"{found}; lower num_minibatches, {more}, or leave drop_last on"
        )


def check_single_step(why: str, options: TrainOptions) -> None:
    """Raise ConfigError for options that take several optimizer steps from one batch.

    Args:
        why: What is worked out over the whole batch before the step.
    """
    if options.num_epochs != 1 or options.num_minibatches != 1:
        raise ConfigError(
            f"{why}, by the weights before the step: it takes one step a batch, not num_epochs={options.num_epochs} "
            f"and num_minibatches={options.num_minibatches}; set both to 1 and choose batch_size as large as a step "
            f"(micro_batch_tokens bounds memory)"
        )
