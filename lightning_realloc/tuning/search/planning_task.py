"""Models, workload, cluster and memory that plans are made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.memory.parts import HEADROOM, MemorySettings, Workload, usable_bytes
from lightning_realloc.tuning.shapes.role_memory import RoleMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningTask:
    """Models, workload and cluster that plans are made for."""

    dataflow: Dataflow
    roles: Mapping[str, RoleMemory]
    cluster: ClusterSpec
    settings: MemorySettings
    workload: Workload | None
    """Number and lengths of sequences; None leaves activations, logits and caches out of memory."""
    memory_budget: int
    """Bytes of a device."""
    headroom: float = HEADROOM
    """Fraction of a device's bytes that a plan leaves free; 0 for the user's own plans."""
    generation_chunks: int = 1
    """Number of chunks in which samples go to inference on other ranks."""

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that a plan may fill."""
        return usable_bytes(self.memory_budget, self.headroom)

    @property
    def models(self) -> dict[str, ModelSpec]:
        """Role -> its model."""
        return {name: role.model for name, role in self.roles.items()}

    def on_nodes(self, num_nodes: int) -> PlanningTask:
        """Return the same task on another number of nodes."""
        return replace(self, cluster=replace(self.cluster, num_nodes=num_nodes))
