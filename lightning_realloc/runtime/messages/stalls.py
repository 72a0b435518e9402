"""Find and describe a stall by the states of all ranks: who waits, for whom, since when, and in which line. Pure."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType

MAX_NAMED = 8
"""Ranks that a message names."""
WAITING_PACKAGES = ("lightning_realloc.runtime.messages", "lightning_realloc.runtime.transfer")
"""Packages of ours whose code blocks only to wait for other ranks."""


@dataclass(frozen=True, slots=True)
class RankState:
    """Activity of a rank, and the line of code that it runs."""

    activity: str
    """Names of its activities, the outermost first."""
    seconds: float
    """Duration of the outermost activity so far."""
    usual_s: float
    """Longest duration so far of activities of that name; 0 if it is the first."""
    place: str
    """Line of code, as ``file:line in function``."""
    waits_for: tuple[int, ...] | None
    """Ranks that it waits for, () for a collective of unknown ranks; None if it works."""
    stack: int = 0
    """Checksum of the lines that led to it, which differs once a rank has moved on to another wait."""
    answers: int = field(default=0, compare=False)
    """Number of the question that the state answers."""
    has_ended: bool = False
    """Whether its run has ended, so that it answers no further questions."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The ranks that wait, and those that do not, as two questions to all ranks have shown."""

    silent: tuple[int, ...]
    """Ranks that answered neither question."""
    working: tuple[tuple[int, RankState], ...]
    """The first `MAX_NAMED` ranks that work."""
    waiting: tuple[tuple[int, RankState], ...]
    """The first `MAX_NAMED` ranks that wait."""
    num_working: int
    num_waiting: int
    is_certain: bool
    """Whether it cannot be a slow start: no rank that answers is in the first call of a name, or one has ended.

    A silent rank may be loading, too: code that holds Python's lock for seconds keeps its thread from answering.
    """

    @classmethod
    def find(cls, first: Mapping[int, RankState | None], second: Mapping[int, RankState | None]) -> Stall | None:
        """Return the stall that the answers to two questions show; None if all ranks wait, but one has moved on.

        A rank that answers one of two questions is not silent. Ranks that wait for each other by turns, as in a set-up
        on a busy machine, are not stuck.

        Args:
            first: State of every rank; None for one that did not answer.
            second: The same, later.
        """
        states = {rank: state or first[rank] for rank, state in second.items()}
        known = [(rank, state) for rank, state in states.items() if state is not None]
        waiting = [(rank, state) for rank, state in known if state.waits_for is not None]
        working = [(rank, state) for rank, state in known if state.waits_for is None]
        if len(waiting) == len(states) and any(_place(first[rank]) != _place(state) for rank, state in waiting):
            return None
        return cls(
            silent=tuple(rank for rank, state in states.items() if state is None),
            working=tuple(working[:MAX_NAMED]),
            waiting=tuple(waiting[:MAX_NAMED]),
            num_working=len(working),
            num_waiting=len(waiting),
            is_certain=any(state.has_ended for _, state in known) or all(state.usual_s for _, state in known),
        )


def describe_stall(rank: int, own: RankState, stall: Stall) -> str:
    """Return a message about a rank that waits.

    Args:
        rank: This rank, whose call takes too long.
        own: Its state.
        stall: The ranks that wait, and those that do not.
    """
    waited = f"rank {rank} has waited {own.seconds:.0f} s in {own.activity} ({own.place})"
    culprits = [f"rank {one}, which does not answer: it is stopped, or its host is lost" for one in stall.silent]
    culprits += [f"rank {one}, which {_doing(state)}" for one, state in stall.working]
    if culprits:
        culprits = culprits[:MAX_NAMED] + _rest(len(stall.silent) + stall.num_working - MAX_NAMED)
        return f"{waited} for {'; and for '.join(culprits)}"
    others = [f"rank {one} {_doing(state)}" for one, state in stall.waiting if one != rank]
    others += _rest(stall.num_waiting - 1 - len(others))
    return (
        f"{waited}, and all other ranks wait, too: {'; '.join(others)}. Ranks that wait for each other made different "
        f"collective calls: look for code that runs on some ranks only, such as `if trainer.is_global_zero`"
    )


def _rest(number: int) -> list[str]:
    return [f"{number} further ranks"] if number > 0 else []


def _place(state: RankState | None) -> tuple[str, int] | None:
    return None if state is None else (state.activity, state.stack)


def _doing(state: RankState) -> str:
    usual = f", usually at most {state.usual_s:.1f} s" if state.usual_s else ""
    return f"has been in {state.activity} for {state.seconds:.0f} s ({state.place}{usual})"


def in_activity(state: RankState | None) -> str:
    """Return the end of a sentence about a rank: its call and its line of code; empty if they are not known."""
    if state is None:
        return ""
    return f" in {state.activity}" + (f", at last in {state.place}" if state.place else "")


# ---- lines of code
def handles_error(frame: FrameType | None) -> bool:
    """Return whether a thread runs Lightning's hooks after an error."""
    hooks = ("lightning.pytorch.trainer.call", "_interrupt")
    while frame is not None and (module_of(frame), frame.f_code.co_name) != hooks:
        frame = frame.f_back
    return frame is not None


def is_in_torch_distributed(frame: FrameType | None) -> bool:
    """Return whether torch's innermost frames of a thread belong to its collectives."""
    while frame is not None and module_of(frame).partition(".")[0] == "torch":
        if module_of(frame).startswith("torch.distributed"):
            return True
        frame = frame.f_back
    return False


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def place_of(frame: FrameType | None) -> str:
    """Return the innermost line outside of torch and the standard library."""
    inner = frame
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    frame = frame or inner
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def checksum_of(frame: FrameType | None) -> int:
    """Return a checksum of a thread's lines of code, without those that wait: it stays the same while they do."""
    lines = []
    while frame is not None:
        if not _is_library(frame) and not module_of(frame).startswith(WAITING_PACKAGES):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return zlib.crc32("\n".join(lines).encode())


def _is_library(frame: FrameType) -> bool:
    root = module_of(frame).partition(".")[0]
    return root in ("torch", "contextlib") or root in sys.stdlib_module_names
