"""Check settings when an algorithm is constructed, and type the settings that are passed on."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_realloc.batch.shares import group_name
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.core.params import is_of_kind

if TYPE_CHECKING:
    from typing import Unpack as Unpack
else:

    class Unpack:
        """Type ``**settings`` for editors and type checkers only (PEP 692).

        A TypedDict has no defaults. So jsonargparse has to see plain ``**settings`` at run time: then it reads types,
        defaults and documentation from the base class that takes them.
        """

        def __class_getitem__(cls, item: object) -> object:
            return Any


_T = TypeVar("_T")


def check_not_negative(**settings: float) -> None:
    """Raise ConfigError for the first setting that is negative or no number."""
    for name, value in settings.items():
        _check_number(name, value)
        if value < 0:
            raise ConfigError(f"{name}={value} may not be negative; write 0 or more")


def check_positive(**settings: float | None) -> None:
    """Raise ConfigError for the first setting that is zero, negative or no number; None is allowed."""
    for name, value in settings.items():
        if value is None:
            continue
        _check_number(name, value)
        if value <= 0:
            raise ConfigError(f"{name}={value} must be positive; None leaves it out")


def check_share(**settings: float) -> None:
    """Raise ConfigError for the first setting outside [0, 1]."""
    for name, value in settings.items():
        _check_number(name, value)
        if not 0 <= value <= 1:
            raise ConfigError(f"{name}={value} must lie between 0 and 1")


def check_positive_numbers(**settings: float) -> None:
    """Raise ConfigError for the first setting that is zero, negative or no number."""
    for name, value in settings.items():
        _check_number(name, value)
        if value <= 0:
            raise ConfigError(f"{name}={value} must be positive")


def _check_number(name: str, value: Any) -> None:
    """Raise ConfigError unless the value is a number, which NaN is not."""
    if not is_of_kind(value, Real):
        raise _wrong_type(name, value, Real)
    if math.isnan(value):
        raise ConfigError(f"{name}=nan is not a number; look at where the value is computed")


def check_type(kind: type, **settings: object) -> None:
    """Raise ConfigError for the first setting of another type than ``kind``; None is allowed."""
    for name, value in settings.items():
        if value is not None and not is_of_kind(value, kind):
            raise _wrong_type(name, value, kind)


def wrong_kind(name: str, value: object, wanted: str) -> ConfigError:
    """Return the error for a setting of another kind, which is perhaps the class of what is wanted."""
    if isinstance(value, type):
        return ConfigError(
            f"{name}={value.__name__} is a class; make an object of it, as in {value.__name__}(), or write {wanted}"
        )
    return ConfigError(f"{name}={value!r} is a {type(value).__name__}; write {wanted}")


def _wrong_type(name: str, value: object, kind: type) -> ConfigError:
    wanted = {Real: "a number", Integral: "a whole number", bool: "True or False"}.get(kind, f"{kind.__name__}(...)")
    if kind is Real and isinstance(value, str) and _is_number(value):
        wanted += " without quotes, and in YAML with a point before the exponent: 0.001 or 1.0e-3, not 1e-3"
    return wrong_kind(name, value, wanted)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def given(value: _T | None, default: _T) -> _T:
    """Return a group's field; the default if it is None."""
    return default if value is None else value


def check_minibatches(num_samples: int, options: TrainOptions, *, group_size: int = 1) -> None:
    """Raise ConfigError if an iteration has fewer samples than mini-batches, before generation starts.

    Args:
        group_size: Number of samples that stay together: 2 for pairs.
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
        why: Reason for the limit: the quantity that is computed over the whole batch before the step.
    """
    if options.num_epochs != 1 or options.num_minibatches != 1:
        raise ConfigError(
            f"{why}, by the weights before the step: it takes one step a batch, not num_epochs={options.num_epochs} "
            f"and num_minibatches={options.num_minibatches}; set both to 1, and batch_size to the samples of a step "
            f"(micro_batch_tokens bounds memory)"
        )
