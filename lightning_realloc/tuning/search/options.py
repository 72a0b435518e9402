"""Price the options of each call for every number of ranks, and drop those that cannot be in a best plan.

Each option is priced once, in seconds and bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_realloc.dataflow.dataflow import CallKind
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import CallSeconds, Estimator
from lightning_realloc.tuning.search.space import CallOptions, RankSet, best_linked_ranks, call_dims, interleaved, sizes

MIN_INTERLEAVING_GAIN = 0.05
"""Least fraction of a training call's seconds that another run of blocks per stage has to save. Raising it makes
searches shorter, and leaves more idle time in pipelines."""
MIN_LAYOUTS = 64
"""Layouts of a call on a number of ranks that are priced in any case; a thousand ranks have thousands. Raising it makes
short searches of large clusters longer."""


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
    """Plan on the ranks with the fastest links; only its options are used."""
    seconds: float
    """Seconds of the call there; 0 for a call that no iteration runs. `Problem.call_seconds` has those elsewhere."""
    active_bytes: int
    """Bytes that the call adds."""
    resident_bytes: int
    """Bytes that stay between calls: of the role's home for its home call, otherwise of a replica."""
    is_copied: bool
    """Whether the call reads a replica of its own even in the layout of its home."""
    further_bytes: int = 0
    """Bytes that further models of the call keep between calls."""
    pipeline_seconds: float = 0.0
    """Seconds in which pipeline stages wait for each other, and of their messages."""

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

    def tables(
        self, calls: Sequence[SearchedCall], is_late: Callable[[], bool], is_over: Callable[[], bool] = lambda: False
    ) -> tuple[list[OptionTable], bool]:
        """Return a table for each call, and whether all numbers of ranks were priced.

        Pricing stops when ``is_late`` returns True and every call has an option, and when ``is_over`` does. The whole
        cluster comes first, on which calls that fit anywhere mostly fit. Once it is late, a call gets options of its
        most promising `MIN_LAYOUTS` alone.
        """
        tables: list[OptionTable] = [{} for _ in calls]
        is_complete = True
        cluster, dataflow, only = self.estimator.cluster, self.estimator.dataflow, self.options.num_ranks
        legal = [size for size in sizes(cluster) if only in (None, size)]
        for size in sorted(legal, key=lambda size: (cluster.num_devices % size != 0, -size)):
            if (is_late() and all(tables)) or is_over():
                return tables, False
            ranks = best_linked_ranks(cluster, size)
            layouts: dict[ParallelDims, Layout] = {}
            for call in sorted(calls, key=lambda one: not one.is_home):
                dims = call_dims(dataflow.call(call.name), self.models, size, cluster, self.options)
                dims += self._interleaved_home(call, tables[call.home].get(size, ()))
                layouts |= {one: Layout(one, ranks) for one in dims if one not in layouts}
                priced: dict[ParallelDims, list[Option]] = {}
                for layout in self._most_promising_first(call, [layouts[one] for one in dims]):
                    if len(priced) >= MIN_LAYOUTS and is_late():
                        is_complete = False
                        break
                    options = self._trained(call, layout) if call.kind == "train" else self._priced(call, layout)
                    priced[layout.dims] = options
                found = [option for one in dims for option in priced.get(one, ())]
                if found:
                    tables[call.number][size] = found
        return tables, is_complete

    def _most_promising_first(self, call: SearchedCall, layouts: Sequence[Layout]) -> list[Layout]:
        """Return the fastest layout, that of the fewest bytes, the next fastest, that of the next fewest, and so on.

        A fast layout of one call may leave room for the smallest ones of others alone. One plan of each layout is
        compared, of the smallest micro-batches or slots, recomputing; layouts without room for it come last. The
        estimator keeps these prices, which all layouts need in the end.
        """
        if len(layouts) <= MIN_LAYOUTS:
            return list(layouts)
        cheapest: dict[Layout, Option] = {}
        for layout in layouts:
            plans = self.options.plans(call.kind, layout)[:1]
            if call.kind == "train" and True in self.options.gradient_checkpointing:
                plans = (replace(plans[0], gradient_checkpointing=True),)
            if options := self._fitting(call, layout, plans):
                cheapest[layout] = min(options, key=lambda option: option.seconds)
        fastest = sorted(cheapest, key=lambda layout: cheapest[layout].seconds)
        smallest = sorted(cheapest, key=lambda layout: cheapest[layout].kept_bytes + cheapest[layout].active_bytes)
        in_turns = itertools.chain.from_iterable(zip(fastest, smallest, strict=True))
        return list(dict.fromkeys((*in_turns, *layouts)))

    def _interleaved_home(self, call: SearchedCall, home: Iterable[Option]) -> tuple[ParallelDims, ...]:
        """Return the interleaved degrees of a call's home, in which it needs no replica; none if it generates."""
        if call.is_home or call.kind == "generate":
            return ()
        return tuple(dict.fromkeys(option.dims for option in home if option.dims.vpp > 1))

    def _trained(self, call: SearchedCall, layout: Layout) -> list[Option]:
        """Return the undominated options of a training call in a layout, and those of interleaved stages that gain."""
        every = self._fitting(call, layout)
        found, fastest = _pareto(every), min((option.seconds for option in every), default=0.0)
        if layout.dims.vpp > 1 or not call.is_timed:
            return found
        for dims in interleaved(self.models[call.role], layout.dims):
            limit, saved = (1 - MIN_INTERLEAVING_GAIN) * fastest, 1 - 1 / dims.vpp
            # Interleaving divides the idle seconds by vpp at most, and needs no fewer bytes.
            plans = [option.plan for option in every if option.seconds - saved * option.pipeline_seconds < limit]
            there = Layout(dims, layout.ranks)
            priced = self._fitting(call, there, [replace(plan, layout=there) for plan in plans]) if plans else []
            faster = [option for option in priced if option.seconds < limit]
            if not faster:
                break
            found, fastest = found + _pareto(faster), min(option.seconds for option in faster)
        return found

    def _priced(self, call: SearchedCall, layout: Layout) -> list[Option]:
        """Return the undominated options of a layout.

        Moves and resident bytes depend on the layout only. An option that is slower and larger than another one of its
        layout is therefore in no best plan.
        """
        return _pareto(self._fitting(call, layout))

    def _fitting(self, call: SearchedCall, layout: Layout, plans: Iterable[CallPlan] | None = None) -> list[Option]:
        """Return the options of a layout that fit; ``plans`` are those to price, None for all.

        A call reads its replica next to the home, or the home itself, whichever is smaller.
        """
        resident = self.estimator.resident_bytes(call.role, layout, is_home=call.is_home)
        further = further_bytes(self.estimator, call, layout)
        home = resident if call.is_home else self.estimator.resident_bytes(call.role, layout, is_home=True)
        kept = min(resident, home) + further
        if kept > self.memory_budget:
            return []
        is_copied = call.kind == "generate" and self.estimator.generates_in_copy(call.owner, layout)
        found, too_large = [], set[tuple[object, ...]]()
        for plan in self.options.plans(call.kind, layout) if plans is None else plans:
            *others, _ = plan.options
            if tuple(others) in too_large:
                continue  # the same passes under 1F1B, which needs no more bytes than other schedules
            active = self.estimator.active_bytes(call.name, plan)
            if kept + active > self.memory_budget:
                too_large.add(tuple(others))
                continue
            parts = self.estimator.call_seconds(call.name, plan) if call.is_timed else CallSeconds()
            if math.isfinite(parts.total):
                bytes_ = active, resident, is_copied, further
                found.append(Option(layout.dims, plan, parts.total, *bytes_, parts.pipeline))
        return found


def _pareto(options: Iterable[Option]) -> list[Option]:
    return undominated(options, lambda option: (option.seconds, option.active_bytes))


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
