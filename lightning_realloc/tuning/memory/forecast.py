"""Forecast the bytes that every rank needs in each call of a plan, and while a run changes its plan. Pure arithmetic.

Layouts determine exactly the bytes that stay between calls: weights, optimizer states and replicas. ``call_memory`` has
the bytes that a call adds. ``callbacks.memory_monitor`` measures the same; ``docs/benchmarks/memory.md`` compares both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import OPTIMIZER_SUFFIX, ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import AXES, Layout, format_ranks
from lightning_realloc.layout.model import ModelLayout
from lightning_realloc.tables import aligned
from lightning_realloc.tuning.memory.call_memory import CallMemory
from lightning_realloc.tuning.memory.memory_model import MemoryModel
from lightning_realloc.tuning.memory.offload_schedule import OffloadSchedule
from lightning_realloc.tuning.memory.parts import MemoryParts, MemorySettings, Workload
from lightning_realloc.tuning.shapes.role_elements import IntArray, axis_positions
from lightning_realloc.tuning.shapes.role_memory import RoleMemory, sharers_of
from lightning_realloc.tuning.shapes.traffic import staging_bytes

SET_UP = "set-up"
"""Name of the phase in which models are built and sharded."""


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Bytes of one rank in one phase."""

    phase: str
    """A call, ``set-up``, or ``-> call`` for the move of the call's weights."""
    rank: int
    parts: MemoryParts
    """Peak bytes by purpose."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes of ranks in every phase of a plan."""

    phases: tuple[PhaseMemory, ...] = field(repr=False)
    """Phases of each rank, in the order in which they run."""

    def at(self, phase: str, rank: int) -> MemoryParts:
        """Return the bytes of a rank in a phase.

        Raises:
            PlanError: for a phase or a rank that is not in the forecast.
        """
        for entry in self.phases:
            if entry.phase == phase and entry.rank == rank:
                return entry.parts
        known = ", ".join(dict.fromkeys(entry.phase for entry in self.phases))
        raise PlanError(f"the forecast has no phase {phase!r} on rank {rank}; it has {known}")

    @property
    def iteration_phases(self) -> tuple[PhaseMemory, ...]:
        """Phases without `SET_UP`, which comes before the first iteration."""
        return tuple(entry for entry in self.phases if entry.phase != SET_UP)

    @property
    def iteration_peak(self) -> PhaseMemory:
        """The first of the `iteration_phases` with the largest total, on any rank."""
        return max(self.iteration_phases, key=lambda entry: entry.parts.total)

    def peak(self, rank: int | None = None) -> PhaseMemory:
        """Return the first phase with the largest total, on one rank or, with None, on any rank."""
        return max((e for e in self.phases if rank in (None, e.rank)), key=lambda entry: entry.parts.total)

    def summary(self) -> str:
        """Return a table in MiB with the fullest rank of every phase, followed by each rank's peak."""
        names = MemoryParts._fields
        head = ["phase", "rank", "total", *(name.replace("_", " ") for name in names)]
        rows = [head]
        for phase in dict.fromkeys(entry.phase for entry in self.phases):
            most = max((e for e in self.phases if e.phase == phase), key=lambda entry: entry.parts.total)
            sizes = [most.parts.total, *(getattr(most.parts, name) for name in names)]
            rows.append([phase, str(most.rank), *(_mebibytes(size) for size in sizes)])
        return "\n".join([aligned(rows, indent=""), "", "MiB of the rank that needs most", *self._peaks()])

    def _peaks(self) -> Iterator[str]:
        groups: dict[tuple[int, str], list[int]] = {}
        for rank in sorted({entry.rank for entry in self.phases}):
            most = self.peak(rank)
            groups.setdefault((most.parts.total, most.phase), []).append(rank)
        for (total, phase), ranks in groups.items():
            yield f"peak of rank {format_ranks(ranks)}: {_mebibytes(total)} MiB in {phase}"


def forecast_memory(
    dataflow: Dataflow,
    plan: ExecutionPlan,
    roles: Mapping[str, RoleMemory],
    settings: MemorySettings,
    workload: Workload | None,
    *,
    ranks: Sequence[int],
) -> MemoryForecast:
    """Return the bytes of some ranks in every phase, from the second iteration on, when all replicas exist.

    Args:
        workload: Number and lengths of sequences; None: leave out activations, logits and caches.
        ranks: The ranks to forecast.

    Raises:
        PlanError: for a role without a model.
        LayoutError: for a layout that does not fit its model.
    """
    if missing := [role for role in dataflow.roles if role not in roles]:
        raise PlanError(f"role {missing[0]!r} has no model to forecast; there are {', '.join(roles) or 'none'}")
    forecaster = _Forecaster(dataflow, roles, settings, workload, plan)
    _, firsts, alike = np.unique(forecaster.places(ranks), axis=0, return_index=True, return_inverse=True)
    by_position: dict[tuple[object, ...], list[PhaseMemory]] = {}
    phases = []  # of the first of ranks with equal places
    for rank in (ranks[first] for first in firsts):
        copies = forecaster.copies(rank)
        position = (forecaster.position(rank), *copies.values())
        if position not in by_position:
            by_position[position] = list(forecaster.rank_phases(rank, copies))
        phases.append(by_position[position])
    found = zip(ranks, (phases[number] for number in alike.reshape(-1)), strict=True)
    return MemoryForecast(tuple(PhaseMemory(one.phase, rank, one.parts) for rank, own in found for one in own))


_Place = tuple[str, Layout]
"""Role and layout."""


@dataclass(frozen=True)
class _Forecaster(MemoryModel):
    plan: ExecutionPlan

    def places(self, ranks: Sequence[int]) -> IntArray:
        """Return the place of each rank in every layout, and the bytes that it stages: (ranks, values).

        Ranks with equal values have the same shards of all homes and replicas, and so need the same bytes.
        """
        columns = []
        for layout in self.plan.layouts:
            place = np.full(max(*ranks, *layout.ranks) + 1, -1)
            place[list(layout.ranks)] = axis_positions(layout, (*layout.stage_axes, *layout.weight_axes))
            columns.append(place[list(ranks)])
        columns += [np.array([staged[rank] for rank in ranks]) for staged in self._staging.values()]
        return np.stack(columns, axis=1)

    def position(self, rank: int) -> tuple[int | None, ...]:
        """Return the rank's place in every layout, as far as its bytes depend on it; None outside of a layout.

        Replicas need the same bytes, and so do FSDP's padded shards, apart from `copies`.
        """
        found = []
        for layout in self.plan.layouts:
            axes = [axis for axis in AXES if axis not in (*layout.replica_axes, *layout.shard_axes)]
            found.append(layout.share(rank, *axes).position if rank in layout else None)
        return tuple(found)

    def copies(self, rank: int) -> dict[_Place, MemoryParts]:
        """Return role and layout of every replica next to a home -> its bytes on a rank."""
        return {(role, layout): self._copy(role, layout, rank) for role, layout in self._copied}

    def rank_phases(self, rank: int, copies: Mapping[_Place, MemoryParts]) -> Iterator[PhaseMemory]:
        kept = sum((copy for (role, _), copy in copies.items() if not self._frees_copies(role)), MemoryParts())
        kept += MemoryParts(drafts=self._drafts(rank))
        caches = self._kept_caches(rank)
        averaged = {name: role.average_of for name, role in self.roles.items() if role.average_of is not None}
        schedule = OffloadSchedule(self.dataflow, self.plan, rank, averaged, sharers_of(self.roles))
        yield PhaseMemory(SET_UP, rank, self._set_up(rank))
        for call in self.dataflow.iteration_calls:
            if call.role is None:
                continue
            base = kept + self._homes(rank, away=set(schedule.parts) - schedule.present(call.name))
            base = sum((parts for place, parts in caches.items() if place != self._place(call)), base)
            read = [place for place in self._models_of(call) if place in copies and self._reads_copy(call, place[0])]
            base = sum((copies[place] for place in read if self._frees_copies(place[0])), base)
            if read:
                yield PhaseMemory(f"-> {call.name}", rank, base + caches.get(self._place(call), MemoryParts()))
            yield PhaseMemory(call.name, rank, base + self._during(call, rank))

    @property
    def _owners(self) -> tuple[str, ...]:
        """Roles of the dataflow that have replicas of their own."""
        return tuple(role for role in self.dataflow.roles if self.owner(role) == role)

    def _frees_copies(self, role: str) -> bool:
        return self.settings.frees_copies or role in self.plan.offload

    def _drafts(self, rank: int) -> int:
        """Return the bytes of draft models; every replica that generates has one."""
        return sum({place: memory.draft_bytes for place, memory in self._generating(rank)}.values())

    def _homes(self, rank: int, *, away: Set[str]) -> MemoryParts:
        """Return the bytes of weights and optimizer states, without the parts in ``away``, which are offloaded."""
        parts = MemoryParts(weights=self._quantized_bytes)
        for name in self._owners:
            weights, optimizer = self.shard_on(name, self._home(name), rank)
            parts += MemoryParts(
                weights=0 if name in away else weights, optimizer=0 if name + OPTIMIZER_SUFFIX in away else optimizer
            )
        return parts

    @property
    def _quantized_bytes(self) -> int:
        """Bytes of 4-bit weights, which are on every rank and are not offloaded."""
        return sum(self.roles[name].quantized_bytes for name in self._owners)

    def _home(self, role: str) -> Layout:
        return self.plan.layout(self.dataflow.home_call(role).name)

    @cached_property
    def _copied(self) -> list[_Place]:
        """Roles and layouts of the replicas next to homes."""
        places = {place for call in self.dataflow.model_calls for place in self._models_of(call)}
        return [place for place in places if self._is_copied(*place)]

    def _models_of(self, call: ModelFunctionCall) -> list[_Place]:
        """Return the roles whose weights a call uses, with its layout."""
        return [(role, self.plan.layout(call.name)) for role in (self.owner(str(call.role)), *call.further_roles)]

    @cached_property
    def _staging(self) -> dict[_Place, Counter[int]]:
        """Role and layout of a replica -> rank -> bytes that its moves stage."""
        copy, master = self.settings.copy_bytes, self.settings.master_bytes
        return {
            (name, layout): staging_bytes(
                self.elements[name],
                self._home(name),
                layout,
                element_bytes=copy,
                casts_trained=copy != master and (self.is_trained(name) or self.roles[name].average_of is not None),
            )
            for name, layout in self._copied
        }

    def _is_copied(self, role: str, layout: Layout) -> bool:
        """Return whether a role has a replica in a layout, next to its home.

        It has one in every other layout, and in that of the home if generation there takes another dtype.
        """
        if layout != self._home(role):
            return True
        calls = (call for call in self.dataflow.model_calls if call.kind == "generate")
        generates = any((role, layout) in self._models_of(call) for call in calls)
        return generates and self.generates_in_copy(role, layout)

    def _reads_copy(self, call: ModelFunctionCall, role: str) -> bool:
        """Return whether a call reads a replica of a role other than the home."""
        layout = self.plan.layout(call.name)
        return layout != self._home(role) or (call.kind == "generate" and self._is_copied(role, layout))

    def _copy(self, name: str, layout: Layout, rank: int) -> MemoryParts:
        """Return the bytes of a replica on a rank after its first fill."""
        role, home = self.roles[name], self._home(name)
        if rank not in layout and rank not in home:
            return MemoryParts()
        element = self.settings.copy_bytes
        if layout.dims.num_shards > 1:
            sharded = self.elements[name].on_rank(layout, rank).num_sharded * element if rank in layout else 0
            return MemoryParts(copies=sharded, staging=self._staging[name, layout][rank])
        # A tensor that the home holds in the same form is shared with the replica.
        may_alias = self.home_bytes(name) == element
        if self.settings.pushes_weights and self.is_trained(name) and not set(home.ranks) & set(layout.ranks):
            own = self.elements[name].tensors(layout, rank) if rank in layout else 0
            held = self.elements[name].tensors(home, rank) if rank in home else 0
            return MemoryParts(copies=own * element, staging=(own + held) * element)
        trained_too = self.settings.master_bytes == element or not self.is_trained(name)
        if self.settings.shares_memory:
            fresh = set() if trained_too else {p.name for p in role.model.params} - role.frozen_params
            return MemoryParts(copies=self._shared_copy(role, layout, home if may_alias else None, fresh, rank))
        unlike = home if may_alias else None
        own = self.elements[name].tensors(layout, rank, unlike=unlike, trained_too=trained_too) if rank in layout else 0
        return MemoryParts(copies=own * element, staging=self._staging[name, layout][rank])

    def _shared_copy(self, role: RoleMemory, layout: Layout, home: Layout | None, fresh: Set[str], rank: int) -> int:
        """Return a rank's share of a replica in shared memory, where equal shards are stored once.

        Shards that ``home`` holds are not stored, except those of ``fresh`` parameters, which have another dtype there.
        """
        target = ModelLayout(role.model, layout)
        source = None if home is None else ModelLayout(role.model, home)
        size = 0.0
        for param in target.names(rank):
            shard, readers = next(held for held in target.holders(param) if rank in held[1])
            if source is not None and param not in fresh:
                readers = tuple(reader for reader in readers if source.shard(param, reader) != shard)
            if rank in readers:
                size += math.prod(shard.shape) * self.settings.copy_bytes / len(readers)
        return int(size)

    def _set_up(self, rank: int) -> MemoryParts:
        """Return the bytes of building models: shards, one whole tensor, and on CPU the models that are built whole.

        Those are all in memory before the first one is divided, and are freed as their shards fill.
        """
        counted = self.settings.builds_on_device
        whole = {n: 4 * role.model.num_elements for n, role in self.roles.items() if counted and not role.deferred}
        undivided, shards = sum(whole.get(name, 0) for name in self._owners), 0
        most = undivided
        for name in self._owners:
            if rank in self._home(name):
                filled = 0 if name in whole else self.shard_on(name, self._home(name), rank)[0]
                largest = self.elements[name].largest * self.home_bytes(name)
                most = max(most, undivided + shards + filled + largest)
            undivided -= whole.get(name, 0)
            shards += self.shard_on(name, self._home(name), rank)[0]
        return MemoryParts(weights=most + self._quantized_bytes)

    def _during(self, call: ModelFunctionCall, rank: int) -> MemoryParts:
        memory = self._on_rank(call, rank)
        return MemoryParts() if memory is None else memory.peak

    def _on_rank(self, call: ModelFunctionCall, rank: int) -> CallMemory | None:
        """Return the memory of a call on a rank; None if it does not run there."""
        chosen = self.plan.call(call.name)
        if rank not in chosen.layout:
            return None
        sizes = self.elements[self.owner(str(call.role))].on_rank(chosen.layout, rank)
        return self.call_memory(call, chosen, sizes, is_home=not self._reads_copy(call, self.owner(str(call.role))))

    def _place(self, call: ModelFunctionCall) -> _Place | None:
        """Return role and layout of a generating call, which its engine belongs to; None for other calls."""
        return (str(call.role), self.plan.layout(call.name)) if call.kind == "generate" else None

    def _kept_caches(self, rank: int) -> dict[_Place | None, MemoryParts]:
        """Return the bytes that stay between generations: caches, and weights with merged adapters."""
        found: dict[_Place | None, MemoryParts] = {}
        for place, memory in () if self.settings.engine.frees_cache else self._generating(rank):
            found[place] = max(memory.kept, found.get(place, MemoryParts()), key=lambda parts: parts.total)
        return found

    def _generating(self, rank: int) -> Iterator[tuple[_Place | None, CallMemory]]:
        """Yield the place and the memory of every generating call on a rank."""
        for call in self.dataflow.iteration_calls:
            memory = None if self._place(call) is None else self._on_rank(call, rank)
            if memory is not None:
                yield self._place(call), memory


def transition_bytes(
    dataflow: Dataflow,
    before: ExecutionPlan,
    after: ExecutionPlan,
    roles: Mapping[str, RoleMemory],
    settings: MemorySettings,
    *,
    rank: int,
) -> int:
    """Return the most bytes that a rank needs during a change of plans, beyond those before it.

    Roles move one after the other. Each gets memory for its shard on the ranks of its new home, then receives weights
    and optimizer state; then the old home is freed. Other replicas do not move, and are filled again later.

    Raises:
        LayoutError: for a layout that does not fit its model.
    """
    most = held = 0
    model = MemoryModel(dataflow, roles, settings, workload=None)
    for name in dataflow.roles:
        if roles[name].shares is not None:
            continue
        call = dataflow.home_call(name).name
        old, new = before.call(call), after.call(call)
        if (old.layout, old.gradient_checkpointing) == (new.layout, new.gradient_checkpointing):
            continue
        most = max(most, held + sum(model.shard_on(name, new.layout, rank)))
        held += sum(model.shard_on(name, new.layout, rank)) - sum(model.shard_on(name, old.layout, rank))
    return most


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f}" if size else "-"
