"""Describe a stall from the states of all ranks: who waits, for whom, since when, and in which line. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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


def describe_stall(rank: int, states: Mapping[int, RankState | None]) -> str | None:
    """Return a message about a rank that waits; None if it does not wait.

    Args:
        rank: This rank, whose call takes too long.
        states: State of every rank; None for a rank that does not answer.
    """
    own = states[rank]
    if own is None or own.waits_for is None:
        return None
    silent = [other for other, state in states.items() if state is None]
    working = [(other, state) for other, state in states.items() if state is not None and state.waits_for is None]
    waited = f"rank {rank} has waited {own.seconds:.0f} s in {own.activity} ({own.place})"
    culprits = [f"rank {other}, which does not answer: it is stopped, or its host is lost" for other in silent]
    culprits += [f"rank {other}, which {_doing(state)}" for other, state in working]
    if culprits:
        return f"{waited} for {'; and for '.join(culprits)}"
    others = [f"rank {other} {_doing(state)}" for other, state in states.items() if state and other != rank]
    return (
        f"{waited}, and all other ranks wait, too: {'; '.join(others)}. Ranks that wait for each other made different "
        f"collective calls: look for code that runs on some ranks only, such as `if trainer.is_global_zero`"
    )


def confirm_stall(
    first: Mapping[int, RankState | None], second: Mapping[int, RankState | None]
) -> dict[int, RankState | None] | None:
    """Return the states of a stall that two questions show; None if all ranks wait, but one of them has moved on.

    A rank that answers one of two questions is not silent. Ranks that wait for each other by turns, as in a set-up on
    a busy machine, are not stuck.
    """
    states = {rank: state or first[rank] for rank, state in second.items()}
    if any(state is None or state.waits_for is None for state in states.values()):
        return states
    has_moved = any(_whereabouts(first[rank]) != _whereabouts(state) for rank, state in states.items())
    return None if has_moved else states


def is_certain(states: Mapping[int, RankState | None]) -> bool:
    """Return whether a stall cannot be a slow start: no rank that answers is in the first call of a name.

    A silent rank may be loading, too: code that holds Python's lock for seconds keeps its thread from answering.
    """
    return all(state is None or state.usual_s for state in states.values())


def _whereabouts(state: RankState | None) -> tuple[str, int] | None:
    return None if state is None else (state.activity, state.stack)


def _doing(state: RankState) -> str:
    usual = f", usually at most {state.usual_s:.1f} s" if state.usual_s else ""
    return f"has been in {state.activity} for {state.seconds:.0f} s ({state.place}{usual})"


def in_activity(state: RankState | None) -> str:
    """Return the end of a sentence about a rank: its call and its line of code; empty if they are not known."""
    if state is None:
        return ""
    return f" in {state.activity}" + (f", at last in {state.place}" if state.place else "")
