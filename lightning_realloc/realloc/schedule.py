"""In which rounds do the transfers of a plan run, so that no rank stages more than a bound in either direction?

Sender and receiver must put a message into the same round although each may know only its own share. Rounds
are therefore cut by everybody's load, which the families of a plan hold, and never by a rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lightning_realloc.errors import PlanError
from lightning_realloc.realloc.plan import ReallocationPlan, Route, Transfer, interleave


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan's transfers in the order in which they run."""

    kept: tuple[Transfer, ...]
    """What stays on its rank; any time will do."""
    rounds: tuple[tuple[Transfer, ...], ...]
    """As many on every rank, so a rank's round may be empty. Every hop 0 comes in a round before every hop 1."""


def schedule_transfers(plan: ReallocationPlan, *, max_staging_bytes: int) -> Schedule:
    """Put the plan's transfers into rounds in which no rank sends or receives more than ``max_staging_bytes``.

    A transfer above the bound is split. The schedule of a share is the whole plan's, filtered. Raises PlanError when
    not even one element fits.
    """
    limit = max_staging_bytes // plan.element_bytes
    if limit < 1:
        raise PlanError(
            f"max_staging_bytes={max_staging_bytes} must hold an element of {plan.element_bytes} bytes; raise the bound"
        )
    rounds = [*_rounds_of_hop(plan, 0, limit), *_rounds_of_hop(plan, 1, limit)]
    return Schedule(tuple(t for t in plan.transfers if t.sender == t.receiver), tuple(rounds))


@dataclass(slots=True)
class _Batch:
    """Routes that share a round, with the elements that they make each rank send and receive."""

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    routes: list[Route] = field(default_factory=list)

    def fits(self, other: _Batch, limit: int) -> bool:
        """Whether ``other`` can join without any rank passing ``limit``."""
        return all(
            mine.get(rank, 0) + amount <= limit
            for mine, theirs in ((self.sent, other.sent), (self.received, other.received))
            for rank, amount in theirs.items()
        )

    def has_room(self, route: Route, numel: int, limit: int) -> bool:
        """Whether one route of ``numel`` elements can join."""
        return self.sent.get(route.sender, 0) + numel <= limit and self.received.get(route.receiver, 0) + numel <= limit

    def count(self, route: Route, numel: int) -> None:
        """Add one route's load."""
        self.sent[route.sender] = self.sent.get(route.sender, 0) + numel
        self.received[route.receiver] = self.received.get(route.receiver, 0) + numel

    def add_load(self, other: _Batch) -> None:
        """Add another batch's load."""
        for mine, theirs in ((self.sent, other.sent), (self.received, other.received)):
            for rank, amount in theirs.items():
                mine[rank] = mine.get(rank, 0) + amount


def _rounds_of_hop(plan: ReallocationPlan, hop: int, limit: int) -> Iterator[tuple[Transfer, ...]]:
    batched = []
    for family in plan.families:
        variants = [_batches(routes, hop, limit, plan.rank) for routes in family.variants]
        named = ((name, variants[index % len(variants)]) for index, name in enumerate(family.names))
        batched.append([(name, batch) for name, batches in named for batch in batches])
    load, current = _Batch(), list[Transfer]()
    for name, batch in interleave(batched):
        if load.sent and not load.fits(batch, limit):
            yield tuple(current)
            load, current = _Batch(), []
        load.add_load(batch)
        current.extend([Transfer(name, *route) for route in batch.routes])
    if load.sent:
        yield tuple(current)


def _batches(routes: Iterable[Route], hop: int, limit: int, rank: int | None) -> list[_Batch]:
    """One parameter's routes of a hop in batches within ``limit``, each route in the first batch that has room.

    All routes count towards the loads; only those that concern ``rank`` are kept.
    """
    batches: list[_Batch] = []
    for route in (part for whole in routes if whole.hop == hop for part in _split(whole, limit)):
        numel = route.numel
        batch = next((batch for batch in batches if batch.has_room(route, numel, limit)), None)
        if batch is None:
            batch = _Batch()
            batches.append(batch)
        batch.count(route, numel)
        if rank is None or rank in (route.sender, route.receiver):
            batch.routes.append(route)
    return batches


def _split(route: Route, limit: int) -> Iterator[Route]:
    """Cut a route along its outermost dims into parts of at most ``limit`` elements."""
    if route.numel <= limit:
        yield route
        return
    dim = next(index for index, size in enumerate(route.shape) if size > 1)
    step = max(1, limit // math.prod(route.shape[dim + 1 :]))
    for start in range(0, route.shape[dim], step):
        yield from _split(_narrow(route, dim, start, min(step, route.shape[dim] - start)), limit)


def _narrow(route: Route, dim: int, start: int, length: int) -> Route:
    def moved(offset: tuple[int, ...]) -> tuple[int, ...]:
        return (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])

    shape = (*route.shape[:dim], length, *route.shape[dim + 1 :])
    return route._replace(
        shape=shape, sender_offset=moved(route.sender_offset), receiver_offset=moved(route.receiver_offset)
    )
