"""Price the options of each call for every number of ranks, and drop those that cannot be in a best plan.

Each option is priced once, in seconds and bytes.
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
    """Parallel degrees and options of a call on a number of ranks, with its price."""

    dims: ParallelDims
    plan: CallPlan
    """Plan on the first ranks of the cluster; only its options are used."""
    seconds: float
    """Seconds of the call; 0 for a call that no iteration runs."""
    active_bytes: int
    """Bytes that the call adds."""
    resident_bytes: int
    """Bytes that stay between calls: of the role's home for its home call, otherwise of a replica."""


class PricedCall(NamedTuple):
    """A call whose options are priced."""

    call: ModelFunctionCall
    is_home: bool
    """Whether the call's layout is the home of the role's weights."""
    is_timed: bool
    """Whether iterations run the call; if not, its seconds are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Prices the options of calls.

    Options that exceed the memory budget, in bytes of a device, are dropped.
    """

    models: Mapping[str, ModelSpec]
    estimator: Estimator
    options: CallOptions
    memory_budget: int

    def tables(
        self, subjects: Sequence[PricedCall], is_late: Callable[[], bool]
    ) -> tuple[list[dict[int, list[Option]]], bool]:
        """Return a table for each call, number of ranks -> options, and whether all numbers of ranks were priced.

        Pricing stops when ``is_late`` returns True and every call has an option.
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
                found = [
                    option
                    for one in dims
                    for option in self._priced(subject, layouts.setdefault(one, Layout(one, ranks)))
                ]
                if found:
                    table[size] = found
        return tables, True

    def _priced(self, subject: PricedCall, layout: Layout) -> list[Option]:
        """Return the undominated options of a layout.

        Moves and resident bytes depend on the layout only. An option that is slower and larger than another one of its
        layout is therefore in no best plan.
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
    """Return the Pareto-optimal options, smaller values being better; of equal ones the first."""
    kept: list[tuple[tuple[float, ...], Option]] = []
    for option in sorted(options, key=values):  # an option comes after those that dominate it
        own = values(option)
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in kept):
            kept.append((own, option))
    return [option for _, option in kept]
