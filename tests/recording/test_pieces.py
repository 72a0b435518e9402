"""Pieces of a rank's time cover it without gaps or overlaps, and belong to the innermost activity."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.recording.pieces import (
    ENVIRONMENTS,
    HOST,
    WAITING,
    TimePiece,
    divide_into_pieces,
    seconds_by_name,
    total_seconds,
)
from lightning_realloc.runtime.messages.environment_waits import EnvironmentWaits, WaitingOverTime
from lightning_realloc.runtime.messages.flight_record import Activity


def test_time_belongs_to_the_innermost_activity() -> None:
    activities = [
        Activity("waiting for data of rank 1", 2.0, 1, (1,), seconds=1.0, kind="wait"),
        Activity("-> actor.generate", 4.0, 2, seconds=0.5, kind="move"),
        Activity("moving weights for actor.generate", 3.5, 1, seconds=1.5, kind="wait"),
        Activity("actor.generate", 1.0, 0, seconds=7.0, kind="call"),
    ]
    assert divide_into_pieces(activities, 0.0, 10.0, zero=-100.0) == (
        TimePiece(HOST, "host", 100.0, 1.0),
        TimePiece("actor.generate", "call", 101.0, 1.0),
        TimePiece("waiting for data of rank 1", "wait", 102.0, 1.0),
        TimePiece("actor.generate", "call", 103.0, 0.5),
        TimePiece("moving weights for actor.generate", "wait", 103.5, 0.5),
        TimePiece("-> actor.generate", "move", 104.0, 0.5),
        TimePiece("moving weights for actor.generate", "wait", 104.5, 0.5),
        TimePiece("actor.generate", "call", 105.0, 3.0),
        TimePiece(HOST, "host", 108.0, 2.0),
    )


def test_waiting_without_an_activity_of_its_own_ends_the_call() -> None:
    generation = Activity("actor.generate", 0.0, 0, seconds=4.0, kind="call", waited_s=1.5)
    assert divide_into_pieces([generation], 0.0, 4.0) == (
        TimePiece("actor.generate", "call", 0.0, 2.5),
        TimePiece(WAITING, "wait", 2.5, 1.5),
    )


def test_spans_of_waiting_for_environments_are_pieces_within_their_call() -> None:
    samples = WaitingOverTime(begin=0.0, bin_s=0.5, means=(1.0,) * 6)
    waits = EnvironmentWaits(((0.5, 1.0), (2.0, 0.75)), samples)  # from the call's beginning, at 1 second
    generation = Activity("actor.generate", 1.0, 0, seconds=4.0, kind="call", environment_waits=waits)
    pieces = divide_into_pieces([generation], 1.0, 5.0)
    assert pieces == (
        TimePiece("actor.generate", "call", 1.0, 0.5),
        TimePiece(ENVIRONMENTS, "environment", 1.5, 1.0),
        TimePiece("actor.generate", "call", 2.5, 0.5),
        TimePiece(ENVIRONMENTS, "environment", 3.0, 0.75),
        TimePiece("actor.generate", "call", 3.75, 1.25),
    )
    assert seconds_by_name(pieces) == {"call": {"actor.generate": 2.25}, "environment": {ENVIRONMENTS: 1.75}}


def test_activities_are_cut_at_the_borders_of_an_iteration() -> None:
    save = Activity("saving a checkpoint", -1.0, 0, seconds=2.0, kind="save")
    assert divide_into_pieces([save], 0.0, 3.0) == (
        TimePiece("saving a checkpoint", "save", 0.0, 1.0),
        TimePiece(HOST, "host", 1.0, 2.0),
    )


@st.composite
def nested_activities(draw: st.DrawFn, begin: int = 0, end: int = 1000, depth: int = 0) -> list[Activity]:
    """Draw activities in [begin, end], which contain each other down to a depth of three."""
    bounds = sorted(draw(st.lists(st.integers(begin, end), max_size=6)))
    found = []
    for first, last in zip(bounds[::2], bounds[1::2], strict=False):
        kind = draw(st.sampled_from(["call", "move", "wait"]))
        inner = draw(nested_activities(first, last, depth + 1)) if depth < 3 else []
        found += [*inner, Activity(f"{kind} {depth}", first, depth, seconds=last - first, kind=kind)]
    return found


@settings(max_examples=30)
@given(nested_activities())
def test_pieces_have_no_gaps_and_add_up_to_the_whole_time(activities: list[Activity]) -> None:
    pieces = divide_into_pieces(activities, 0.0, 1000.0)
    assert pieces[0].start == 0.0 and pieces[-1].end == 1000.0
    for before, after in itertools.pairwise(pieces):
        assert before.end == after.start
    for moment in range(1000):
        around = [a for a in activities if a.began_at <= moment and moment + 1 <= a.began_at + (a.seconds or 0)]
        inner = max(around, key=lambda a: a.depth, default=None)
        piece = next(one for one in pieces if one.start <= moment and moment + 1 <= one.end)
        assert piece.name == (HOST if inner is None else inner.name)
    assert total_seconds(seconds_by_name(pieces)) == pytest.approx(1000.0)
