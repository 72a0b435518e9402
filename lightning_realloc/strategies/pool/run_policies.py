"""Decisions of a Trainer's callbacks about weights: whether they move between calls, and which ones are averaged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.strategies.pool.phase_hooks import ReallocationPolicy
from lightning_realloc.strategies.pool.weight_averages import AveragingPolicy
from lightning_realloc.tuning.memory.parts import MemorySettings


@dataclass(frozen=True, slots=True)
class RunPolicies:
    """The policies of a run."""

    reallocation: ReallocationPolicy
    """That of the Trainer's last callback of this kind, or the default."""
    averaging: tuple[AveragingPolicy, ...] = ()
    """Those of all callbacks of this kind."""

    @classmethod
    def from_callbacks(cls, callbacks: Iterable[object]) -> RunPolicies:
        """Return the policies that a Trainer's callbacks are."""
        given = tuple(callbacks)
        moving = [callback for callback in given if isinstance(callback, ReallocationPolicy)]
        averaging = tuple(callback for callback in given if isinstance(callback, AveragingPolicy))
        return cls(moving[-1] if moving else ReallocationPolicy(), averaging)

    def evaluated_averages(self, trained_roles: Iterable[str]) -> frozenset[str]:
        """Return the roles whose averages are evaluated from a checkpoint."""
        return frozenset(role for policy in self.averaging if policy.validate for role in policy.roles or trained_roles)

    def applied_to(
        self, plan: ExecutionPlan, dataflow: Dataflow, settings: MemorySettings
    ) -> tuple[ExecutionPlan, MemorySettings]:
        """Return the plan and settings with which memory is forecast under these policies."""
        settings = replace(
            settings,
            optimizer_bytes=settings.optimizer_bytes + 4 * len(self.averaging),
            frees_copies=self.reallocation.free_after,
        )
        if not self.reallocation.enabled:
            homes = {c.name: plan.layout(dataflow.home_call(str(c.role)).name) for c in dataflow.model_calls}
            plan = replace(plan, calls=tuple((name, replace(call, layout=homes[name])) for name, call in plan.calls))
        return plan, settings
