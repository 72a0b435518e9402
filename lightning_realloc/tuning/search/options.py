"""Which ways are there to run each call of a search on so many ranks, and what does each of them take?

Every way is priced once, with what it takes of memory. Those that cannot be in a best plan are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.search.space import CallOptions, legal_dims, sizes


class Option(NamedTuple):
    """One way to run a call on a number of ranks."""

    dims: ParallelDims
    plan: CallPlan
    """On the first ranks of the cluster; only its options count."""
    seconds: float
    active_bytes: int
    resident_bytes: int
    """Of the role's home where the call is the home call, else of a copy."""


class Subject(NamedTuple):
    """A call whose options are priced."""

    call: ModelFunctionCall
    is_home: bool
    """Whether the role's weights stay in its layout."""
    is_timed: bool
    """Whether it is part of an iteration; else it takes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """By what options are priced, and which of them there are."""

    models: Mapping[str, ModelSpec]
    estimator: Estimator
    options: CallOptions
    memory_budget: int

    def tables(
        self, subjects: Sequence[Subject], is_late: Callable[[], bool]
    ) -> tuple[list[dict[int, list[Option]]], bool]:
        """Return number of ranks -> options, for each call; and whether there was time for all numbers of ranks.

        There is none once ``is_late`` says so, and every call has an option.
        """
        tables: list[dict[int, list[Option]]] = [{} for _ in subjects]
        cluster, only = self.estimator.cluster, self.options.num_ranks
        legal = [size for size in sizes(cluster) if only in (None, size)]
        for size in sorted(legal, key=lambda size: (cluster.num_devices % size != 0, -size)):
            if is_late() and all(tables):
                return tables, False
            ranks = tuple(range(size))
            layouts: dict[ParallelDims, Layout] = {}
            for table, subject in zip(tables, subjects, strict=True):
                call = subject.call
                dims = legal_dims(self.models[str(call.role)], call.kind, size, cluster)
                found = [option for one in dims
                         for option in self._priced(subject, layouts.setdefault(one, Layout(one, ranks)))]  # fmt: skip
                if found:
                    table[size] = found
        return tables, True

    def _priced(self, subject: Subject, layout: Layout) -> list[Option]:
        """Return a layout's options but those that another one of the same layout makes needless.

        The layout decides moves and resident bytes; of the rest, an iteration's seconds grow with the call's and its
        peak with the call's bytes. So what is slower and larger than another option of its layout is in no best plan.
        """
        call, is_home, is_timed = subject
        resident = self.estimator.resident_bytes(str(call.role), layout, is_home=is_home)
        kept = resident if is_home else 0
        if kept > self.memory_budget:
            return []
        found = []
        for plan in self.options.plans(call.kind, layout):
            active = self.estimator.active_bytes(call.name, plan)
            if kept + active > self.memory_budget:
                continue
            seconds = self.estimator.call_seconds(call.name, plan).total if is_timed else 0.0
            if math.isfinite(seconds):
                found.append(Option(layout.dims, plan, seconds, active, resident))
        return undominated(found, lambda option: (option.seconds, option.active_bytes))


def undominated(options: Iterable[Option], values: Callable[[Option], tuple[float, ...]]) -> list[Option]:
    """Return the options that none other is at least as good as in all values; of equal ones the first."""
    kept: list[tuple[tuple[float, ...], Option]] = []
    for option in sorted(options, key=values):  # what dominates an option comes before it
        own = values(option)
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in kept):
            kept.append((own, option))
    return [option for _, option in kept]
