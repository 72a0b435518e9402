"""Price the options of each call for every number of ranks, and drop those that cannot be in a best plan.

Each option is priced once, in seconds and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_realloc.dataflow.dataflow import CallKind
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.search.space import CallOptions, RankSet, call_dims, sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedCall:
    """A call that a search plans."""

    number: int
    """Position in the list of all searched calls."""
    name: str
    kind: CallKind
    role: str
    owner: str
    """Role whose replicas the call uses."""
    home: int
    """Number of the call whose layout is the home of the owner's weights."""
    is_timed: bool
    """Whether iterations run the call; if not, its seconds are 0."""
    is_trained: bool
    """Whether an iteration changes the role's weights."""
    siblings: tuple[int, ...]
    """Numbers of the calls with the same owner, this one included."""
    partners: tuple[str, ...] = ()
    """Roles whose models the call asks, in its layout, in which no blocks are gathered; its own among them."""

    @property
    def further_roles(self) -> tuple[str, ...]:
        """Roles other than its own whose models the call uses."""
        return tuple(role for role in self.partners if role != self.role)

    @property
    def is_home(self) -> bool:
        """Whether the call's layout is the home of its weights."""
        return self.home == self.number

    @property
    def is_alone(self) -> bool:
        """Whether the call is the only one that uses its owner's weights."""
        return len(self.siblings) == 1

    @property
    def is_only_copy(self) -> bool:
        """Whether the call is the only one of its owner's apart from the home call."""
        return not self.is_home and len(self.siblings) == 2


def searched_calls(estimator: Estimator) -> tuple[SearchedCall, ...]:
    """Return the calls of an iteration, and the home calls of all roles."""
    dataflow = estimator.dataflow
    homes = {role: dataflow.home_call(estimator.owner(role)) for role in dataflow.roles}
    calls = [call for call in dataflow.model_calls if call in dataflow.iteration_calls or call in homes.values()]
    owners = [estimator.owner(str(call.role)) for call in calls]
    return tuple(
        SearchedCall(
            number=number,
            name=call.name,
            kind=call.kind,
            role=str(call.role),
            owner=owner,
            home=calls.index(homes[owner]),
            is_timed=call in dataflow.iteration_calls,
            is_trained=call.role in dataflow.trained_roles,
            siblings=tuple(other for other, its_owner in enumerate(owners) if its_owner == owner),
            partners=call.partners,
        )
        for number, (call, owner) in enumerate(zip(calls, owners, strict=True))
    )


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
    is_copied: bool
    """Whether the call reads a replica of its own even in the layout of its home."""
    further_bytes: int = 0
    """Bytes that further models of the call keep between calls."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay between calls, of all models."""
        return self.resident_bytes + self.further_bytes


@dataclass(slots=True, eq=False)
class PlacedOption:
    """An option on some ranks."""

    option: Option
    ranks: RankSet
    layout: int
    """Number of the layout; equal layouts have the same number."""


State = Sequence[PlacedOption | None]
"""A choice for every searched call; None for a call without a choice yet."""
OptionTable = dict[int, list[Option]]
"""Number of ranks -> the options of a call on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Prices the options of calls.

    Options that exceed the memory budget, in bytes of a device, are dropped.
    """

    models: Mapping[str, ModelSpec]
    estimator: Estimator
    options: CallOptions
    memory_budget: int

    def tables(self, calls: Sequence[SearchedCall], is_late: Callable[[], bool]) -> tuple[list[OptionTable], bool]:
        """Return a table for each call, and whether all numbers of ranks were priced.

        Pricing stops when ``is_late`` returns True and every call has an option.
        """
        tables: list[OptionTable] = [{} for _ in calls]
        cluster, dataflow, only = self.estimator.cluster, self.estimator.dataflow, self.options.num_ranks
        legal = [size for size in sizes(cluster) if only in (None, size)]
        for size in sorted(legal, key=lambda size: (cluster.num_devices % size != 0, -size)):
            if is_late() and all(tables):
                return tables, False
            ranks = tuple(range(size))
            layouts: dict[ParallelDims, Layout] = {}
            for table, call in zip(tables, calls, strict=True):
                dims = call_dims(dataflow.call(call.name), self.models, size, cluster, self.options)
                found = [
                    option for one in dims for option in self._priced(call, layouts.setdefault(one, Layout(one, ranks)))
                ]
                if found:
                    table[size] = found
        return tables, True

    def _priced(self, call: SearchedCall, layout: Layout) -> list[Option]:
        """Return the undominated options of a layout.

        Moves and resident bytes depend on the layout only. An option that is slower and larger than another one of its
        layout is therefore in no best plan.
        """
        resident = self.estimator.resident_bytes(call.role, layout, is_home=call.is_home)
        further = further_bytes(self.estimator, call, layout)
        kept = (resident if call.is_home else 0) + further
        if kept > self.memory_budget:
            return []
        is_copied = call.kind == "generate" and self.estimator.generates_in_copy(call.owner, layout)
        found, too_large = [], set[tuple[object, ...]]()
        for plan in self.options.plans(call.kind, layout):
            *others, _ = plan.options
            if tuple(others) in too_large:
                continue  # the same passes under 1F1B, which needs no more bytes than other schedules
            active = self.estimator.active_bytes(call.name, plan)
            if kept + active > self.memory_budget:
                too_large.add(tuple(others))
                continue
            seconds = self.estimator.call_seconds(call.name, plan).total if call.is_timed else 0.0
            if math.isfinite(seconds):
                found.append(Option(layout.dims, plan, seconds, active, resident, is_copied, further))
        return undominated(found, lambda option: (option.seconds, option.active_bytes))


def further_bytes(estimator: Estimator, call: SearchedCall, layout: Layout) -> int:
    """Return the bytes that a call's further models keep: homes where no other call uses them, and replicas.

    A replica counts also where the home has the same layout, which is not known here.
    """
    size = 0
    for role in call.further_roles:
        is_home = estimator.dataflow.home_call(role).name == call.name
        size += estimator.resident_bytes(role, layout, is_home=is_home)
        if is_home and estimator.generates_in_copy(role, layout):
            size += estimator.resident_bytes(role, layout, is_home=False)
    return size


def undominated(options: Iterable[Option], values: Callable[[Option], tuple[float, ...]]) -> list[Option]:
    """Return the Pareto-optimal options, smaller values being better; of equal ones the first."""
    kept: list[tuple[tuple[float, ...], Option]] = []
    for option in sorted(options, key=values):  # an option comes after those that dominate it
        own = values(option)
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in kept):
            kept.append((own, option))
    return [option for _, option in kept]
