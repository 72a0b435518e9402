"""Bytes of one role's home and of one call on a rank, which forecasts of plans and estimates of single calls share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.memory.call_memory import CallMemory
from lightning_realloc.tuning.memory.parts import MemoryParts, MemorySettings, VLLMMemory, Workload
from lightning_realloc.tuning.shapes.role_elements import RankElements, RoleElements, elements_of
from lightning_realloc.tuning.shapes.role_memory import RoleMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMCallMemory(CallMemory):
    """Memory model of a generating call by a vLLM on the same devices."""

    vllm: VLLMMemory

    @property
    def kept(self) -> MemoryParts:
        """Bytes that stay between generations."""
        return self._of_vllm + self._merged

    @property
    def _of_vllm(self) -> MemoryParts:
        if self.vllm.is_elsewhere:
            return MemoryParts()
        return MemoryParts(vllm=max(self._given_bytes + self.vllm.cache_bytes, self.vllm.least_bytes))

    @property
    def _given_bytes(self) -> int:
        return self.sizes.num_sharded * self._stored_bytes

    @property
    def _merged(self) -> MemoryParts:
        # Without zero arguments, as the decorator replaces the class.
        return MemoryParts() if self.vllm.takes_adapters else super(VLLMCallMemory, self)._merged

    def _generate(self) -> list[MemoryParts]:
        return [self._of_vllm + MemoryParts(staging=min(self._given_bytes, self.vllm.chunk_bytes))]


@dataclass(frozen=True)
class MemoryModel:
    """Memory of the roles of a dataflow under some settings, for any layout."""

    dataflow: Dataflow
    roles: Mapping[str, RoleMemory]
    settings: MemorySettings
    workload: Workload | None

    @cached_property
    def elements(self) -> dict[str, RoleElements]:
        """Role -> its counts of elements."""
        return {name: elements_of(role) for name, role in self.roles.items()}

    def owner(self, role: str) -> str:
        """Return the role whose replicas a role's calls use."""
        return self.roles[role].shares or role

    def is_trained(self, role: str) -> bool:
        """Return whether the dataflow trains a role."""
        return role in self.dataflow.trained_roles

    def home_bytes(self, role: str) -> int:
        """Return the bytes of a weight that the home computes with."""
        return self.settings.home_bytes(self.roles[role], is_trained=self.is_trained(role))

    def generates_in_copy(self, role: str, layout: Layout) -> bool:
        """Return whether generation reads a replica of its own in the layout of the role's home, in another dtype."""
        return layout.dims.fsdp == 1 and self.home_bytes(role) != self.settings.copy_bytes

    def home_shard(self, role: str, sizes: RankElements) -> tuple[int, int]:
        """Return the bytes of the home's weights and of its optimizer state on a rank.

        Only weights that change have ``master_bytes``: trained ones, and all of a role that averages another one's.
        """
        settings, is_trained = self.settings, self.is_trained(role)
        num, num_trained = sizes.num_sharded, sizes.num_trained_sharded if is_trained else 0
        exact = num if self.roles[role].average_of is not None else num_trained
        weights = exact * settings.master_bytes + (num - exact) * settings.copy_bytes
        return weights, num_trained * settings.optimizer_bytes

    def shard_on(self, role: str, layout: Layout, rank: int) -> tuple[int, int]:
        """Return the `home_shard` of a rank if the home has some layout; zeros outside of it."""
        return self.home_shard(role, self.elements[role].on_rank(layout, rank)) if rank in layout else (0, 0)

    def call_memory(self, call: ModelFunctionCall, plan: CallPlan, sizes: RankElements, *, is_home: bool) -> CallMemory:
        """Return the memory of a call on a rank.

        Args:
            sizes: Element counts of the owner of the call's role, on the rank.
            is_home: Whether the call runs on the owner's home, and not on a replica next to it.
        """
        owner = self.owner(str(call.role))
        vllm = self.settings.engine.vllm if call.kind == "generate" else None
        kind = CallMemory if vllm is None else partial(VLLMCallMemory, vllm=vllm)
        made = kind(
            role=self.roles[owner],
            kind=call.kind,
            plan=plan,
            settings=self.settings,
            workload=self.workload,
            sizes=sizes,
            is_home=is_home,
            is_trained=self.is_trained(owner),
            reads_base=owner != call.role,
        )
        if not call.partners:
            return made
        return replace(made, partners_cache=sum(self._cache_of_partner(made, role) for role in call.partners))

    def on_fullest_stages(self, call: ModelFunctionCall, plan: CallPlan, *, is_home: bool) -> Iterator[CallMemory]:
        """Yield the memory of a call on the first ranks of pipeline stages, without stages that need no more than them.

        Raises:
            LayoutError: for a layout that does not fit the model.
        """
        elements, dims = self.elements[self.owner(str(call.role))], plan.layout.dims
        if plan.pipeline_schedule == "1f1b":
            yield from (self.call_memory(call, plan, sizes, is_home=is_home) for sizes in elements.on_stages(dims))
            return
        for stages in elements.equal_stages(dims):
            first = self.call_memory(call, plan, stages[0], is_home=is_home)
            held = [first.held_on(sizes.stage) for sizes in stages] if len(stages) > 1 else [(0, 0)]
            fullest = {max(range(len(stages)), key=lambda at: held[at][kind]) for kind in range(2)}
            yield from (replace(first, sizes=stages[at]) if at else first for at in fullest)

    def _cache_of_partner(self, call: CallMemory, role: str) -> int:
        """Return the bytes of keys and values of a model that answers a call's environments; none of it waits."""
        engine = replace(self.settings.engine, has_environment=False, draft=None)
        cache = replace(call, role=self.roles[role], settings=replace(self.settings, engine=engine)).cache
        return 0 if cache is None else cache.final_bytes
