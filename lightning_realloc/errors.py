"""Exceptions of the package, all derived from :class:`ReallocError`.

Every message gives the rule, the values that broke it and the way out.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

Shared = TypeVar("Shared", bound="ReallocError")
_OF_GLOO = re.compile(r"\[\S*gloo/\S+:\d+\] ?|[. ]*GLHF!\s*[^\s\w)]*")
"""Places in gloo's source and its wishes, in messages that quote its errors."""


class ReallocError(Exception):
    """Base class of the package's exceptions.

    Example:
        >>> from lightning_realloc import Layout, ReallocError
        >>> try:
        ...     Layout.parse("tp0@0")
        ... except ReallocError as error:
        ...     print(type(error).__name__)
        LayoutError
    """

    is_shared = False
    """Whether all ranks raise it, so that only the rank it comes from and rank 0 print its message."""


class RankLost(ReallocError):
    """Another rank ended while this one waited for it; that rank's log gives the cause."""

    def __init__(self, message: str) -> None:
        super().__init__(_OF_GLOO.sub("", message))


class LayoutError(ReallocError, ValueError):
    """Invalid layout: its text, its degrees, or its fit to a model."""


class PlanError(ReallocError, ValueError):
    """Execution plan or dataflow that contradicts itself, the model or the cluster."""


class DeviceFull(PlanError):
    """Device whose memory does not suffice for a call, or for the models."""


class DataError(ReallocError, ValueError):
    """Training data that cannot be read or used."""


class RewardError(ReallocError, ValueError):
    """Reward function that failed or returned something other than one finite number per sample."""


class GenerationError(ReallocError, ValueError):
    """Generation request that the engine or the model cannot serve."""


class WeightMismatch(ReallocError):
    """Rank whose weights are not those of the replica that they came from."""


class CheckpointError(ReallocError, ValueError):
    """Checkpoint that does not belong to this run."""


class UnwrittenCheckpoint(CheckpointError):
    """Save that a disk or an object store ended; earlier checkpoints are unchanged."""


class ConfigError(ReallocError, ValueError):
    """Setting of the trainer or the strategy that cannot work."""


def shared(error: Shared) -> Shared:
    """Mark an error as one that all ranks raise, and return it."""
    error.is_shared = True
    return error


def class_name(error: BaseException) -> str:
    """Return the name of an error's class, or of the class of this module that it derives from, for other ranks."""
    bases = (kind.__name__ for kind in type(error).__mro__ if globals().get(kind.__name__) is kind)
    return next(bases, type(error).__name__)


def describe_error(error: BaseException) -> str:
    """Return the class and the first line of an error, to quote it in another one."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def one_line_message(error: BaseException, rank: int) -> str:
    """Return the line that a rank prints for a mistake of the caller; a short one, if rank 0 prints the same."""
    if rank and isinstance(error, ReallocError) and error.is_shared:
        return f"error on rank {rank}: the error of rank 0\n"
    return f"error{f' on rank {rank}' if rank else ''}: {' '.join(str(error).split())}\n"


def error_line(error: BaseException) -> str:
    """Return `` in file.py, line 3``: the first line outside of this package that an error passed; empty if none."""
    own = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    return f" in {Path(frames[0].filename).name}, line {frames[0].lineno}" if frames else ""


def counted(number: int, noun: str) -> str:
    """Return a number with a noun: ``1 image``, ``2 images``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def described(value: object) -> str:
    """Return the class of a value, and the beginning of its text."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def require_choice(name: str, value: object, choices: Sequence[str], error: type[ReallocError] = ConfigError) -> None:
    """Raise an error unless a setting's value is one of the choices."""
    if value not in choices:
        raise error(f"{name}={value!r} must be one of {', '.join(choices)}")
