"""Estimator with random prices, for tests of searches that must not depend on how machines behave."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.estimate.estimator import CallSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomEstimator:
    """Prices drawn from a seed, equal for plans that differ only in the names of machines."""

    dataflow: Dataflow
    cluster: ClusterSpec
    seed: int
    unit_bytes: int = 1000
    cores_per_node: int | None = None
    """Cores that the ranks of a node share; None: each rank has its own."""
    sharers: Mapping[str, str] = field(default_factory=dict)
    """Role without weights of its own -> the role whose base it uses."""

    def owner(self, role: str) -> str:
        """Return the role whose replicas a role's calls use."""
        return self.sharers.get(role, role)

    def call_seconds(self, call: str, plan: CallPlan) -> CallSeconds:
        """Return 1 to 10 s, divided by a power of the number of ranks; one call in ten cannot run."""
        draw = self._draw("seconds", call, *self._options(plan))
        if draw.random() < 0.1:
            return CallSeconds(compute=math.inf)
        return CallSeconds(compute=draw.uniform(1, 10) / len(plan.layout.ranks) ** draw.uniform(0, 1.2))

    def move_seconds(self, role: str, source: Layout, target: Layout) -> float:
        """Return up to 2 s."""
        shared = len(set(source.ranks) & set(target.ranks))
        nodes = len({self.cluster.node_of(rank) for rank in (*source.ranks, *target.ranks)})
        key = (role, source.dims, target.dims, shared, nodes)
        return 0.0 if source == target else self._draw("move", *key).uniform(0, 2)

    def slowdown(self, busy: int) -> float:
        """Return the number of busy ranks for each core, at least 1."""
        return 1.0 if self.cores_per_node is None else max(1.0, busy / self.cores_per_node)

    def offload_seconds(self, num_bytes: float) -> float:
        """Return the seconds at the host rate of the data sheet."""
        return num_bytes / self.cluster.host_bytes_per_s

    def resident_bytes(self, role: str, layout: Layout, *, is_home: bool) -> int:
        """Return one to three times ``unit_bytes``, divided by the number of shards."""
        shards = layout.dims.tp * layout.dims.fsdp * layout.dims.pp
        draw = self._draw("resident", self.owner(role), layout.dims, is_home)
        return int(draw.uniform(1, 3) * self.unit_bytes / shards)

    def generates_in_copy(self, role: str, layout: Layout) -> bool:
        """Return True for one layout in two."""
        return bool(self._draw("copied", self.owner(role), layout.dims).random() < 0.5)

    def active_bytes(self, call: str, plan: CallPlan) -> int:
        """Return up to three times ``unit_bytes``."""
        return int(self._draw("active", call, *self._options(plan)).uniform(0, 3) * self.unit_bytes)

    def _options(self, plan: CallPlan) -> tuple[object, ...]:
        return plan.layout.dims, plan.micro_batch_tokens, plan.gradient_checkpointing, plan.max_slots

    def _draw(self, *key: object) -> random.Random:
        return random.Random(f"{self.seed} {key}")
