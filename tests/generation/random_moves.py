"""A policy that moves samples at random, and frequent rounds for it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_realloc.generation.rebalance import balance_policy, protocol
from lightning_realloc.generation.rebalance.load import MoveCost, RankLoad, SampleMove


def makespan_seconds(loads: Sequence[RankLoad], cost: MoveCost | None, moves: Sequence[SampleMove] = ()) -> float:
    """Return the seconds until the last rank finishes, if ``moves`` are carried out."""
    forecasts = balance_policy._after(balance_policy._forecasts(loads), moves, cost)
    return balance_policy._makespan(forecasts)


def at_random(
    loads: Sequence[RankLoad], cost: MoveCost | None, *, current_round: int, **_: Any
) -> tuple[SampleMove, ...]:
    """Move samples at random to ranks with free slots, or to any rank if only queued samples move.

    All ranks plan the same moves.
    """
    rng, free = random.Random(current_round), {load.rank: load.free_slots - len(load.waiting) for load in loads}
    moves = []
    makespan_seconds(loads, cost)  # checks that every sample is in one place, as all policies do
    for load in loads:
        for sample in load.live if cost is not None else load.waiting:
            target = rng.choice([other.rank for other in loads])
            moved_in = sample.last_moved_round
            is_fixed = moved_in is not None and current_round - moved_in < 2  # it may still be on its way
            if not is_fixed and target != load.rank and rng.random() < 0.6 and (cost is None or free[target] > 0):
                free[target] -= 1
                ways = ["recompute"] if sample in load.waiting else ["send", "recompute"]
                how = rng.choice(ways if cost is None or cost.bytes_per_token < math.inf else ["recompute"])
                moves.append(SampleMove(sample.sample_id, load.rank, target, how))  # type: ignore[arg-type]
    rng.shuffle(moves)
    return tuple(moves)


@contextmanager
def moving(*, every: int = protocol.PERIOD_STEPS, **policy: Callable[..., Any]) -> Iterator[None]:
    """Hold a round after every ``every`` steps, and plan with the given policy.

    A round waits for the reports of all ranks. Otherwise short samples would finish before any report arrives.
    """
    with (
        mock.patch.multiple(protocol, PERIOD_STEPS=every, MIN_PERIOD_S=0.0, **policy),
        mock.patch.object(protocol._Rounds, "_is_round_due", lambda rounds: rounds._steps_left <= 0),
    ):
        yield
