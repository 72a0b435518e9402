"""Models, workload, cluster and memory that plans are made for, with the timeline and the forecast of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.memory.forecast import MemoryForecast, forecast_memory
from lightning_realloc.tuning.memory.parts import HEADROOM, MemorySettings, Workload, usable_bytes
from lightning_realloc.tuning.search.space import CallOptions
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.timeline.call_timeline import CallTimeline
from lightning_realloc.tuning.timeline.iteration_schedule import Overlap
from lightning_realloc.tuning.timeline.simulator import simulate


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
    overlap: Overlap = "iterations"
    """Work that may run at the same time on disjoint ranks."""
    generation_chunks: int = 1
    """Number of chunks in which samples go to inference on other ranks."""

    generates_in_stages: bool = True
    """Whether generating calls may run in pipeline stages."""
    generates_in_lockstep: bool = True
    """Whether ranks of a generating call may run each block together, as they do with ``fsdp`` and ``ep``."""
    generates_in_tensor_parallel: bool = True
    """Whether ranks of generating calls may divide tensors."""
    delays_weight_gradients: bool = True
    """Whether training in pipeline stages may follow the schedule ``zero_bubble``, which compiled blocks refuse."""

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that a plan may fill."""
        return usable_bytes(self.memory_budget, self.headroom)

    @property
    def models(self) -> dict[str, ModelSpec]:
        """Role -> its model."""
        return {name: role.model for name, role in self.roles.items()}

    def forecast(self, plan: ExecutionPlan) -> MemoryForecast:
        """Return the bytes of all ranks under a plan.

        Raises:
            LayoutError: for a layout that does not fit its model.
        """
        ranks = range(self.cluster.num_devices)
        return forecast_memory(self.dataflow, plan, self.roles, self.settings, self.workload, ranks=ranks)

    def timeline(self, plan: ExecutionPlan, estimator: Estimator, *, iterations: int = 8) -> CallTimeline:
        """Return the simulated timeline of a plan; see `simulate`."""
        return simulate(
            plan, estimator, iterations=iterations, overlap=self.overlap, generation_chunks=self.generation_chunks
        )

    def call_options(self, options: CallOptions) -> CallOptions:
        """Return the options of calls that rows of the workload fit, and that generation can follow."""
        load = self.workload
        row_tokens = 0 if load is None else load.group_size * load.longest
        return replace(
            options,
            row_tokens=row_tokens,
            generates_in_stages=self.generates_in_stages,
            generates_in_lockstep=self.generates_in_lockstep,
            generates_in_tensor_parallel=self.generates_in_tensor_parallel,
            delays_weight_gradients=self.delays_weight_gradients,
        )

    def on_nodes(self, num_nodes: int) -> PlanningTask:
        """Return the same task on another number of nodes."""
        return replace(self, cluster=replace(self.cluster, num_nodes=num_nodes))
