"""Which calls make up one iteration, and in which order they can run.

A :class:`Dataflow` is the graph without ranks: it follows from the names that calls need and produce. Where each
call runs is the :class:`~lightning_realloc.dataflow.execution_plan.ExecutionPlan`'s answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_realloc.errors import PlanError

CallKind = Literal["generate", "infer", "train", "compute"]


@dataclass(frozen=True, slots=True)
class ModelFunctionCall:
    """One role doing one thing, or a computation on the host that needs no model."""

    name: str
    """``"actor.generate"`` for a model's call, the method's name for a computation."""
    kind: CallKind
    """What the call does with its model; ``compute`` has none."""
    role: str | None
    """The model that works, None for ``compute``."""
    method: str
    """The method of the algorithm that does it."""
    needs: tuple[str, ...] = ()
    """Names that must exist before the call starts."""
    produces: tuple[str, ...] = ()
    """Names that exist once it has ended."""
    whole_batch: bool = False
    """Whether a ``compute`` sees all samples of the iteration in one place, instead of a share of whole groups."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(CallKind):
            raise PlanError(f"call {self.name!r} has kind {self.kind!r}; use one of {get_args(CallKind)}")
        if (self.role is None) != (self.kind == "compute"):
            raise PlanError(
                f"call {self.name!r} of kind {self.kind!r} has role {self.role!r}; only 'compute' calls have no role"
            )
        if self.whole_batch and self.kind != "compute":
            raise PlanError(
                f"call {self.name!r} of kind {self.kind!r} has whole_batch=True; only 'compute' calls can ask for it, "
                f"a model's call gets its data-parallel share"
            )


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The calls of one iteration, in an order in which they can run.

    Raises:
        PlanError: for two calls of one name, two producers of one name, two trainings of one role, a name that
            nobody produces, or calls that wait for each other.
    """

    calls: tuple[ModelFunctionCall, ...]
    """In topological order: every call after the calls whose products it needs."""
    inputs: tuple[str, ...] = ("batch",)
    """What the data loader supplies."""

    def __post_init__(self) -> None:
        _refuse_repeats("call", (call.name for call in self.calls))
        _refuse_repeats("producer of", (name for call in self.calls for name in (*call.produces,)))
        _refuse_repeats("training of", (str(call.role) for call in self.calls if call.kind == "train"))
        object.__setattr__(self, "calls", _in_order(self.calls, self.inputs))

    @property
    def roles(self) -> tuple[str, ...]:
        """Every model that takes part, in the order of its first call."""
        return tuple(dict.fromkeys(call.role for call in self.calls if call.role is not None))

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """Roles whose weights an iteration changes."""
        return tuple(call.role for call in self.calls if call.kind == "train" and call.role is not None)

    @property
    def iteration_calls(self) -> tuple[ModelFunctionCall, ...]:
        """Calls that a training call depends on, and those: what an iteration runs. The rest serve evaluation."""
        wanted = {name for call in self.calls if call.kind == "train" for name in call.needs}
        kept: list[ModelFunctionCall] = []
        for call in reversed(self.calls):
            if call.kind == "train" or wanted.intersection(call.produces):
                kept.append(call)
                wanted.update(call.needs)
        return tuple(reversed(kept))

    @property
    def model_calls(self) -> tuple[ModelFunctionCall, ...]:
        """Calls that run on a model, and so have a layout."""
        return tuple(call for call in self.calls if call.role is not None)

    def without(self, names: Collection[str]) -> Dataflow:
        """Return what is left where the loader supplies what some calls would have produced."""
        supplied = [product for call in self.calls if call.name in names for product in call.produces]
        return Dataflow(tuple(call for call in self.calls if call.name not in names), (*self.inputs, *supplied))

    def call(self, name: str) -> ModelFunctionCall:
        """Return the call of that name; PlanError names the ones there are."""
        for call in self.calls:
            if call.name == name:
                return call
        raise PlanError(f"no call is named {name!r}; this algorithm has {', '.join(c.name for c in self.calls)}")

    def calls_of(self, role: str) -> tuple[ModelFunctionCall, ...]:
        """Return the calls that ``role`` takes part in."""
        return tuple(call for call in self.calls if call.role == role)

    def home_call(self, role: str) -> ModelFunctionCall:
        """Return the call in whose layout a role's master weights live: its training, else its first call."""
        calls = self.calls_of(role)
        if not calls:
            raise PlanError(f"role {role!r} takes part in no call; known roles: {', '.join(self.roles)}")
        return next((call for call in calls if call.kind == "train"), calls[0])


def _refuse_repeats(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlanError(f"one iteration has two {what}{'' if what.endswith(' of') else 's'} {name!r}; keep one")
        seen.add(name)


def _in_order(calls: tuple[ModelFunctionCall, ...], inputs: tuple[str, ...]) -> tuple[ModelFunctionCall, ...]:
    """Sort topologically, keeping the given order where the graph leaves a choice."""
    known = set(inputs)
    everything = known.union(*(call.produces for call in calls)) if calls else known
    for call in calls:
        missing = [name for name in call.needs if name not in everything]
        if missing:
            raise PlanError(
                f"call {call.name!r} needs {missing[0]!r}, which nothing produces; "
                f"the loader supplies {', '.join(inputs) or 'nothing'}, calls produce "
                f"{', '.join(sorted(everything.difference(inputs))) or 'nothing'}"
            )
    ordered: list[ModelFunctionCall] = []
    waiting = list(calls)
    while waiting:
        ready = next((call for call in waiting if known.issuperset(call.needs)), None)
        if ready is None:
            circle = ", ".join(call.name for call in waiting)
            raise PlanError(f"calls wait for each other's products in a circle: {circle}; break one dependency")
        ordered.append(ready)
        waiting.remove(ready)
        known.update(ready.produces)
    return tuple(ordered)
