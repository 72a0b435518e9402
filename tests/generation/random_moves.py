"""Policies that move samples for no reason, to try what becomes of them, and rounds in which they can."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_realloc.generation.rebalance import migration
from lightning_realloc.generation.rebalance.balance import makespan_seconds
from lightning_realloc.generation.rebalance.load import MoveCost, RankLoad, SampleMove


def at_random(loads: Sequence[RankLoad], cost: MoveCost, *, step: int, **_: Any) -> tuple[SampleMove, ...]:
    """Move any sample anywhere where there is room, the same on all ranks."""
    rng, free = random.Random(step), {load.rank: load.free_slots - len(load.waiting) for load in loads}
    moves = []
    makespan_seconds(loads, cost)  # takes every sample to be in one place, as all policies do
    for load in loads:
        for sample in load.live:
            target = rng.choice([other.rank for other in loads])
            rests = sample.last_moved_step is not None and step - sample.last_moved_step < 2  # perhaps on its way
            if not rests and target != load.rank and rng.random() < 0.6 and free[target] > 0:
                free[target] -= 1
                how = "recompute" if sample in load.waiting else rng.choice(["send", "recompute"])
                moves.append(SampleMove(sample.sample_id, load.rank, target, how))  # type: ignore[arg-type]
    rng.shuffle(moves)
    return tuple(moves)


@contextmanager
def moving(*, every: int = migration.PERIOD_STEPS, **policy: Callable[..., Any]) -> Iterator[None]:
    """Let ranks meet after so many steps and plan by this policy.

    They wait for each other's reports, which short samples would not: these would be over before any came.
    """
    with (
        mock.patch.multiple(migration, PERIOD_STEPS=every, LEAST_PERIOD_S=0.0, **policy),
        mock.patch.object(migration._Call, "_is_time_to_meet", lambda call: call._steps_left <= 0),
    ):
        yield
