"""Schedule of offloading: which weights and optimizer states are on a rank's device in each call. Pure.

A part is a role's weights or its optimizer state. An offloaded part is on the device during the calls that need it. It
is copied back during the call before each of them. The forecast and the run use the same schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import OPTIMIZER_SUFFIX, ExecutionPlan


@dataclass(frozen=True, slots=True)
class OffloadSchedule:
    """Offloaded weights and optimizer states of one rank, and the calls in which they are on the device."""

    dataflow: Dataflow
    plan: ExecutionPlan
    rank: int
    average_of: Mapping[str, str] = field(default_factory=dict)
    """Role -> the trained role whose weights it averages."""
    sharers: Mapping[str, str] = field(default_factory=dict)
    """Role -> the role whose weights its calls use."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Entries of the plan's ``offload`` that this rank holds: roles, and optimizers such as ``actor.optimizer``."""
        owned = (part for part in self.plan.offload if part not in self.sharers)
        return tuple(part for part in owned if self.rank in self._home(part))

    def needed(self, call: str) -> frozenset[str]:
        """Return the parts that a call needs, also where this rank only sends its weights."""
        chosen = self.dataflow.call(call)
        wanted = {self.sharers.get(str(chosen.role), str(chosen.role)), *chosen.further_roles}
        if chosen.kind == "train":
            wanted.add(f"{chosen.role}{OPTIMIZER_SUFFIX}")
            wanted.update(role for role, trained in self.average_of.items() if trained == chosen.role)
        return frozenset(wanted.intersection(self.parts))

    def prefetched(self, call: str) -> frozenset[str]:
        """Return the parts that are copied back during a call, for the next call of this rank."""
        calls = [c.name for c in self.dataflow.iteration_calls if c.role is not None and self._takes_part(c.name)]
        if call not in calls:  # an evaluation, after which any call may follow; or a call without this rank
            return frozenset()
        upcoming = calls[(calls.index(call) + 1) % len(calls)]
        return self.needed(upcoming) - self.needed(call)

    def present(self, call: str) -> frozenset[str]:
        """Return the parts that are on the device during a call."""
        return self.needed(call) | self.prefetched(call)

    def _takes_part(self, call: str) -> bool:
        return self.rank in self.plan.layout(call) or bool(self.needed(call))

    def _home(self, part: str) -> tuple[int, ...]:
        return self.plan.layout(self.dataflow.home_call(part.removesuffix(OPTIMIZER_SUFFIX)).name).ranks
