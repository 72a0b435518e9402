"""Roofline estimates of the seconds and bytes of calls and moves, from model shapes and a cluster's nominal rates.

They need no measurement, and so are available before a first run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial

import numpy as np

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.estimate.cost import CallCost, Tokens
from lightning_realloc.tuning.estimate.estimator import CallSeconds
from lightning_realloc.tuning.estimate.group_placement import Placement, slowest_link
from lightning_realloc.tuning.estimate.hardware import Device, Efficiency, Group, LinkRates, Links
from lightning_realloc.tuning.estimate.kernels import Kernels, TowerKernels
from lightning_realloc.tuning.memory.call_shape import CallShape
from lightning_realloc.tuning.memory.memory_model import MemoryModel
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
from lightning_realloc.tuning.shapes.role_elements import RankElements, of_one_copy
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.shapes.traffic import Traffic, traffic

MAX_CACHED_LAYOUTS = 4096
"""Entries of a cache with layouts as keys, which hold all their ranks."""


class RooflineEstimator:
    """An `Estimator` that needs no measurement.

    Layouts that differ in their ranks only, and lie on nodes in the same way, share one estimate.

    Args:
        workload: Sequence counts and lengths; ``response_tokens`` is the longest response, which memory must hold.
        responses: Equally likely response lengths; None: all responses are the longest.
        factors: Call -> factor on the seconds of its own model, for replies of others to its environments, in all
            layouts; None or no entry: 1.
        cores_per_node: CPU cores that the ranks of a node share; None: ranks do not slow each other down.

    Raises:
        PlanError: for a role without a model or without a shape, and for lengths beyond the workload's.
    """

    def __init__(
        self,
        dataflow: Dataflow,
        cluster: ClusterSpec,
        roles: Mapping[str, RoleMemory],
        settings: MemorySettings,
        workload: Workload,
        *,
        responses: tuple[int, ...] | None = None,
        factors: Mapping[str, float] | None = None,
        efficiency: Efficiency | None = None,
        cores_per_node: int | None = None,
    ) -> None:
        _check(dataflow, roles, workload, responses)
        self.dataflow = dataflow
        self.cluster = cluster
        self.roles = dict(roles)
        self.settings = settings
        self._memory = MemoryModel(dataflow, roles, settings, workload)
        self.owner, self.generates_in_copy = self._memory.owner, self._memory.generates_in_copy
        self.factors = factors or {}
        self.tokens = Tokens(workload, responses or (workload.response_tokens,))
        self.efficiency = efficiency or Efficiency()
        self._cores = cores_per_node
        self._elements = self._memory.elements
        self._calls: dict[tuple[object, ...], CallSeconds] = {}
        self._active: dict[tuple[object, ...], int] = {}
        self.place = lru_cache(maxsize=MAX_CACHED_LAYOUTS)(partial(Placement.from_layout, cluster=cluster))
        """Layout -> its placement on the cluster."""
        self._move = lru_cache(maxsize=MAX_CACHED_LAYOUTS)(self._estimate_move)
        self._kernels = cache(self._make_kernels)
        self._tower = cache(self._make_tower)

    def call_seconds(self, call: str, plan: CallPlan) -> CallSeconds:
        """Return the seconds of a call, from the moment its inputs and weights exist."""
        place = self.place(plan.layout)
        busy = 1 if self._cores is None else busiest_node(plan.layout, self.cluster)
        load, mean = self.tokens.workload, self.tokens.sequence
        shape = CallShape.from_plan(self.dataflow.call(call).kind, plan, load, mean)
        key = (call, plan.layout.dims, place, busy, shape, _pass_options(plan))
        if key not in self._calls:
            self._calls[key] = self._estimate(call, plan, place).scaled(self.slowdown(busy))
        return self._calls[key]

    def seconds_within_node(self, call: str, plan: CallPlan) -> CallSeconds:
        """Return the seconds of a call if the groups of its layout did not span nodes."""
        busy = 1 if self._cores is None else busiest_node(plan.layout, self.cluster)
        return self._estimate(call, plan, self.place(plan.layout).within_node()).scaled(self.slowdown(busy))

    def _estimate(self, call: str, plan: CallPlan, place: Placement) -> CallSeconds:
        chosen = self.dataflow.call(call)
        if chosen.role is None:
            return CallSeconds()
        return self.cost(chosen.role, plan, place).seconds(chosen.kind, plan).scaled(self.factors.get(call, 1.0))

    def cost(self, role: str, plan: CallPlan, place: Placement | None = None) -> CallCost:
        """Return the cost model of a role's calls under a plan."""
        dims, elements = plan.layout.dims, self._elements[role]
        ends = elements.on_stages(dims)
        return CallCost(
            num_sharded=max(sizes.num_sharded for sizes in ends),
            num_trained_sharded=max(sizes.num_trained_sharded for sizes in ends),
            num_experts=max(sizes.num_experts for sizes in ends),
            num_trained_experts=max(sizes.num_trained_experts for sizes in ends),
            num_tied=max(sizes.num_tied for sizes in ends),
            num_given=max(map(self._num_given, ends)),
            stage_blocks=elements.blocks_of_stages(dims),
            trained_share=elements.trained_share,
            dims=dims,
            place=place or self.place(plan.layout),
            kernels=self._kernels(role, dims.tp, dims.ep),
            links=Links(self.cluster, self.efficiency),
            settings=self.settings,
            tokens=self.tokens,
            tower=self._tower(role),
        )

    def _num_given(self, sizes: RankElements) -> int:
        """Return the elements of a rank that a vLLM is given before each generation."""
        vllm = self.settings.engine.vllm
        if vllm is None:
            return 0
        return sizes.num_trained if vllm.takes_adapters and sizes.num_adapted else sizes.num_sharded

    def num_moved(self, role: str) -> int:
        """Return the elements of a role that a replica needs anew in every iteration.

        These are the trained ones, since a replica keeps the others; a replica that is freed after each call needs all.
        """
        elements = self._elements[role]
        return elements.num_elements if self.settings.frees_copies else elements.num_trained

    def moved(self, role: str, source: Layout, target: Layout) -> Traffic:
        """Return the traffic of `num_moved` elements."""
        trained_only = not self.settings.frees_copies
        return traffic(self._elements[role], source, target, self.cluster, trained_only=trained_only)

    def _make_kernels(self, role: str, tp: int, ep: int) -> Kernels:
        shape = self.roles[role].shape
        assert shape is not None, "checked when the estimator was made"
        return Kernels(shape, tp, Device(self.cluster, self.efficiency), self._element_bytes, ep)

    def _make_tower(self, role: str) -> TowerKernels | None:
        tower, images = self.roles[role].tower, self.tokens.workload.images
        if tower is None or images is None:
            return None
        blocks = Kernels(tower.blocks, 1, Device(self.cluster, self.efficiency), self._element_bytes)
        part, share = self.roles[role].trained_vision, self.roles[role].trained_vision_share
        return TowerKernels(tower, images, blocks, trained=part, trained_share=share)

    @property
    def _element_bytes(self) -> int:
        """Bytes of a weight, and of an activation, during computation."""
        return min(self.settings.copy_bytes, self.settings.gathered_bytes)

    def move_seconds(self, role: str, source: Layout, target: Layout) -> float:
        """Return the seconds to move a role's weights from their home to another layout; 0 between equal layouts.

        The slowest of these counts: receiving on the rank that lacks most, sending on the busiest ranks, network
        traffic into and out of nodes, which is as fast as the slowest link between them, and writing the target.
        """
        return 0.0 if source == target else self._move(role, source, target)

    def _estimate_move(self, role: str, source: Layout, target: Layout) -> float:
        moved, size = self.moved(role, source, target), self.settings.copy_bytes
        links, device = Links(self.cluster, self.efficiency), Device(self.cluster, self.efficiency)
        written = device.stream(moved.needed * (self.settings.master_bytes + size))
        if moved.total_received == 0:
            return written
        between = Group(2, 1 if moved.total_between == 0 else 2, self._link_between(source, target))
        slowest = max(
            written,
            links.send(size * max(moved.received, moved.sent_inside), Group(2, nodes=1)),
            links.send(size * max(moved.received_between, moved.sent_between), between),
        )
        return slowest + self.efficiency.call_s

    def _link_between(self, source: Layout, target: Layout) -> LinkRates | None:
        """Return the slowest link from a node of one layout to a node of the other; None: the usual one."""
        if not self.cluster.node_links:
            return None
        before, after = ({self.cluster.node_of(rank) for rank in one.ranks} for one in (source, target))
        pairs = np.array([(one, other) for one in before for other in after])
        return slowest_link(pairs, self.cluster)

    def offload_seconds(self, num_bytes: float) -> float:
        """Return the seconds in which a rank copies this many bytes back from its host."""
        return num_bytes / self.cluster.host_bytes_per_s

    def resident_bytes(self, role: str, layout: Layout, *, is_home: bool) -> int:
        """Return the bytes that a replica keeps between calls, on the fullest rank of its layout.

        The home of a trained role keeps its optimizer state as well.
        """
        ends = self._elements[role].on_stages(layout.dims)
        if not is_home:
            return max(sizes.num_sharded for sizes in ends) * self.settings.copy_bytes
        return max(sum(self._memory.home_shard(role, sizes)) for sizes in ends)

    def active_bytes(self, call: str, plan: CallPlan) -> int:
        """Return the bytes that a call adds, on the rank where it adds most."""
        key = self._memory_key(call, plan)
        if key not in self._active:
            self._active[key] = self._peak(call, plan)
        return self._active[key]

    def _memory_key(self, call: str, plan: CallPlan) -> tuple[object, ...]:
        """Return all that the bytes of a call depend on. Plans with other numbers of replicas often have the same."""
        layout, kind, load = plan.layout, self.dataflow.call(call).kind, self.tokens.workload
        shape = CallShape.from_plan(kind, plan, load, load.longest)
        # A stage holds as many micro-batches as come after it, with vpp more, and gradients from the second on.
        if kind != "generate" and layout.dims.vpp == 1:
            most = max(2, layout.dims.pp) * shape.micro_batch
            shape = replace(shape, share=min(shape.share, most), num_steps=1)
        division = (layout.dims.cp, layout.has_replicas, layout.data_parallel_size > 1)
        return call, of_one_copy(layout.dims), division, shape, _pass_options(plan)

    def _peak(self, call: str, plan: CallPlan) -> int:
        """Return the bytes that a call adds; those of a draft model stay, but count for the generating call only."""
        chosen = self.dataflow.call(call)
        if chosen.role is None:
            return 0
        role = self.owner(chosen.role)
        is_home = chosen == self.dataflow.home_call(role)
        stages = self._memory.on_fullest_stages(chosen, plan, is_home=is_home)
        return max(stage.peak.total + stage.draft_bytes for stage in stages)

    def slowdown(self, busy: int) -> float:
        """Return the number of busy ranks for each core, at least 1; 1 without ``cores_per_node``."""
        return 1.0 if self._cores is None else max(1.0, busy / self._cores)


def _pass_options(plan: CallPlan) -> tuple[object, ...]:
    """Return the options that passes depend on next to their sizes, which `CallShape` has."""
    return plan.gradient_checkpointing, plan.activation_offload, plan.pipeline_schedule


def busiest_node(layout: Layout, cluster: ClusterSpec) -> int:
    """Return the number of ranks on the node with most ranks of a layout."""
    return max(Counter(map(cluster.node_of, layout.ranks)).values())


def _check(
    dataflow: Dataflow, roles: Mapping[str, RoleMemory], workload: Workload, responses: tuple[int, ...] | None
) -> None:
    for role in dataflow.roles:
        if role not in roles:
            raise PlanError(f"role {role!r} has no model to estimate; there are {', '.join(roles) or 'none'}")
        if roles[role].shape is None:
            raise PlanError(
                f"role {role!r} has no shape, which times are estimated from; use a model with a decoder's config"
            )
    if responses is not None and (not responses or min(responses) < 1 or max(responses) > workload.response_tokens):
        raise PlanError(
            f"response lengths must lie between 1 and response_tokens={workload.response_tokens}, and there must be "
            f"one; got {len(responses)} from {min(responses, default=0)} to {max(responses, default=0)}"
        )
