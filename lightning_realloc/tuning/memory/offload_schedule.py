"""When does what a plan offloads leave a rank's device, and when is it back? Pure, for the forecast and for the run.

A part of a role (its weights, or its optimizer's state) is on the device during the calls that need it, and during the
call before each of them, in which it comes back. Otherwise it is away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import OPTIMIZER_SUFFIX, ExecutionPlan


@dataclass(frozen=True, slots=True)
class OffloadSchedule:
    """What of one rank's weights and optimizer states is on the device in which call."""

    dataflow: Dataflow
    plan: ExecutionPlan
    rank: int
    leaders: Mapping[str, str] = field(default_factory=dict)
    """Role -> the trained role that its weights follow."""
    sharers: Mapping[str, str] = field(default_factory=dict)
    """Role -> the role whose weights its calls work with."""

    @property
    def parts(self) -> tuple[str, ...]:
        """What of the plan's ``offload`` is on this rank at all: roles, and optimizers as in ``actor.optimizer``."""
        owned = (part for part in self.plan.offload if part not in self.sharers)
        return tuple(part for part in owned if self.rank in self._home(part))

    def needed(self, call: str) -> frozenset[str]:
        """Return the parts that a call works with: also where its weights only set out from this rank."""
        chosen = self.dataflow.call(call)
        wanted = {self.sharers.get(str(chosen.role), str(chosen.role))}
        if chosen.kind == "train":
            wanted.add(f"{chosen.role}{OPTIMIZER_SUFFIX}")
            wanted.update(role for role, leader in self.leaders.items() if leader == chosen.role)
        return frozenset(wanted.intersection(self.parts))

    def ahead(self, call: str) -> frozenset[str]:
        """Return the parts that come back during a call, for the next one that this rank has something to do in."""
        calls = [c.name for c in self.dataflow.iteration_calls if c.role is not None and self._takes_part(c.name)]
        if call not in calls:  # an evaluation, after which anything may come; or a call that passes this rank by
            return frozenset()
        following = calls[(calls.index(call) + 1) % len(calls)]
        return self.needed(following) - self.needed(call)

    def present(self, call: str) -> frozenset[str]:
        """Return the parts that take memory during a call."""
        return self.needed(call) | self.ahead(call)

    def _takes_part(self, call: str) -> bool:
        return self.rank in self.plan.layout(call) or bool(self.needed(call))

    def _home(self, part: str) -> tuple[int, ...]:
        return self.plan.layout(self.dataflow.home_call(part.removesuffix(OPTIMIZER_SUFFIX)).name).ranks
