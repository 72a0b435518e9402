"""Schedule a plan's transfers in rounds within a bound on every rank's staging memory.

Sender and receiver must put a message into the same round, although each may list only its own transfers. Rounds
therefore depend on the load of all ranks, which a plan's families describe.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lightning_realloc.errors import PlanError
from lightning_realloc.realloc.plan import ReallocationPlan, Route, Transfer, interleave


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan's transfers in the order in which they run."""

    kept: tuple[Transfer, ...]
    """Local copies, which may run at any time."""
    rounds: tuple[tuple[Transfer, ...], ...]
    """Transfers by round. Every rank has the same number; some may be empty. All of hop 0 runs before hop 1."""


def schedule_transfers(plan: ReallocationPlan, *, max_staging_bytes: int) -> Schedule:
    """Put the plan's transfers into rounds in which no rank sends or receives more than ``max_staging_bytes``.

    Transfers above the bound are split. The schedule of one rank's plan equals the filtered schedule of the whole
    plan. Raises PlanError when not even one element fits.
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
    """Routes that share a round, and the elements that each rank sends and receives for them."""

    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    routes: list[Route] = field(default_factory=list)

    def fits(self, other: _Batch, limit: int) -> bool:
        """Return whether ``other`` can join without any rank exceeding ``limit``."""
        return all(
            mine[rank] + amount <= limit
            for mine, theirs in ((self.sent, other.sent), (self.received, other.received))
            for rank, amount in theirs.items()
        )

    def has_room(self, route: Route, numel: int, limit: int) -> bool:
        """Return whether a route of ``numel`` elements can join."""
        return self.sent[route.sender] + numel <= limit and self.received[route.receiver] + numel <= limit

    def count(self, route: Route, numel: int) -> None:
        """Add one route's load."""
        self.sent[route.sender] += numel
        self.received[route.receiver] += numel


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
        load.sent.update(batch.sent)
        load.received.update(batch.received)
        current.extend([Transfer(name, *route) for route in batch.routes])
    if load.sent:
        yield tuple(current)


def _batches(routes: Iterable[Route], hop: int, limit: int, rank: int | None) -> list[_Batch]:
    """Return one parameter's routes of a hop in batches within ``limit``, by first fit.

    All routes count towards the loads; only those of ``rank`` are kept.
    """
    batches: list[_Batch] = []
    for route in (split for whole in routes if whole.hop == hop for split in _split(whole, limit)):
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
    """Cut a route along its outermost dims into routes of at most ``limit`` elements."""
    if route.numel <= limit:
        yield route
        return
    dim = next(index for index, size in enumerate(route.shape) if size > 1)
    step = max(1, limit // math.prod(route.shape[dim + 1 :]))
    for start in range(0, route.shape[dim], step):
        yield from _split(_narrow(route, dim, start, min(step, route.shape[dim] - start)), limit)


def _narrow(route: Route, dim: int, start: int, length: int) -> Route:
    def shift(offset: tuple[int, ...]) -> tuple[int, ...]:
        return (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])

    return route._replace(
        shape=(*route.shape[:dim], length, *route.shape[dim + 1 :]),
        sender_offset=shift(route.sender_offset),
        receiver_offset=shift(route.receiver_offset),
    )
