"""Dependency graph of the model function calls in one iteration, sorted topologically.

A :class:`Dataflow` has no ranks: it follows from the names that calls need and produce. The
:class:`~lightning_realloc.dataflow.execution_plan.ExecutionPlan` assigns a layout to each call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_realloc.errors import PlanError

CallKind = Literal["generate", "infer", "train", "compute"]
"""Kind of a call: sampling, a forward pass, optimizer steps, or a computation on the host without a model."""


@dataclass(frozen=True, slots=True)
class ModelFunctionCall:
    """One role that generates, infers or trains, or a computation on the host that needs no model.

    Example:
        >>> ModelFunctionCall(
        ...     "actor.generate", "generate", role="actor", method="rollout", needs=("batch",), produces=("rollout",)
        ... )  # doctest: +ELLIPSIS
        ModelFunctionCall(name='actor.generate', kind='generate', ...)
    """

    name: str
    """Unique name: ``"actor.generate"`` for a model's call, the method's name for a computation."""
    kind: CallKind
    """Use of the model; ``compute`` has none."""
    role: str | None
    """Role whose model runs the call; None for ``compute``."""
    method: str
    """Name of the algorithm's method that implements the call."""
    needs: tuple[str, ...] = ()
    """Names that must exist before the call starts, such as ``"batch"``."""
    produces: tuple[str, ...] = ()
    """Names that exist after the call has finished."""
    whole_batch: bool = False
    """Whether a ``compute`` call receives all samples of the iteration at once, instead of a share of whole groups."""
    partners: tuple[str, ...] = ()
    """Roles whose models answer environments in a ``generate`` call, on its ranks and in its layout; its own for
    self-play."""

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
        if self.partners and self.kind != "generate":
            raise PlanError(
                f"call {self.name!r} of kind {self.kind!r} has partners={self.partners}; only 'generate' calls ask any"
            )

    @property
    def further_roles(self) -> tuple[str, ...]:
        """Roles other than its own whose models the call uses."""
        return tuple(role for role in self.partners if role != self.role)


CallOrName = ModelFunctionCall | str
"""A call, or its name in a dataflow."""


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The calls of one iteration in topological order.

    Example:
        >>> generate = ModelFunctionCall("actor.generate", "generate", "actor", "rollout", ("batch",), ("rollout",))
        >>> train = ModelFunctionCall("actor.train", "train", "actor", "loss", needs=("rollout",))
        >>> print(*(call.name for call in Dataflow((train, generate)).calls))
        actor.generate actor.train

    Raises:
        PlanError: for two calls with one name, two producers of one name, two training calls of one role, a needed
            name that nothing produces, or a cycle.
    """

    calls: tuple[ModelFunctionCall, ...]
    """Calls in topological order: every call comes after the calls whose products it needs."""
    inputs: tuple[str, ...] = ("batch",)
    """Names that the data loader supplies."""

    def __post_init__(self) -> None:
        _refuse_repeats("call", (call.name for call in self.calls))
        _refuse_repeats("producer of", (name for call in self.calls for name in call.produces))
        _refuse_repeats("training of", (str(call.role) for call in self.calls if call.kind == "train"))
        object.__setattr__(self, "calls", _topological_order(self.calls, self.inputs))

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that take part, in the order of their first calls."""
        used = (role for call in self.calls for role in (call.role, *call.further_roles))
        return tuple(dict.fromkeys(role for role in used if role is not None))

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """Roles whose weights an iteration changes."""
        return tuple(call.role for call in self.calls if call.kind == "train" and call.role is not None)

    @property
    def iteration_calls(self) -> tuple[ModelFunctionCall, ...]:
        """Training calls and all calls that they depend on. An iteration runs these; the others serve evaluation."""
        wanted = {name for call in self.calls if call.kind == "train" for name in call.needs}
        kept: list[ModelFunctionCall] = []
        for call in reversed(self.calls):
            if call.kind == "train" or wanted.intersection(call.produces):
                kept.append(call)
                wanted.update(call.needs)
        return tuple(reversed(kept))

    @property
    def model_calls(self) -> tuple[ModelFunctionCall, ...]:
        """Calls that run on a model and therefore have a layout."""
        return tuple(call for call in self.calls if call.role is not None)

    def without(self, names: Collection[str]) -> Dataflow:
        """Return the dataflow without these calls; the loader supplies their products instead."""
        supplied = [product for call in self.calls if call.name in names for product in call.produces]
        return Dataflow(tuple(call for call in self.calls if call.name not in names), (*self.inputs, *supplied))

    def select(self, calls: Sequence[CallOrName]) -> tuple[ModelFunctionCall, ...]:
        """Return the calls of these names in topological order; calls that are given themselves, as they are.

        Raises:
            PlanError: for the name of no call.
        """
        given = tuple(call for call in calls if not isinstance(call, str))
        chosen = given or tuple(call for call in self.calls if call.name in calls)
        if len(chosen) < len(calls):
            raise PlanError(f"{', '.join({*map(str, calls)} - {c.name for c in chosen})} is no call of this algorithm")
        return chosen

    def call(self, name: str) -> ModelFunctionCall:
        """Return the call with this name; a PlanError lists the known names."""
        for call in self.calls:
            if call.name == name:
                return call
        raise PlanError(f"no call is named {name!r}; this algorithm has {', '.join(c.name for c in self.calls)}")

    def calls_of(self, role: str) -> tuple[ModelFunctionCall, ...]:
        """Return the calls that use the model of ``role``, those in which it is a partner last."""
        own = (call for call in self.calls if call.role == role)
        return (*own, *(call for call in self.calls if role in call.further_roles))

    def home_call(self, role: str) -> ModelFunctionCall:
        """Return the call whose layout holds a role's master weights: its training call, else its first call."""
        calls = self.calls_of(role)
        if not calls:
            raise PlanError(f"role {role!r} takes part in no call; known roles: {', '.join(self.roles)}")
        return next((call for call in calls if call.kind == "train"), calls[0])


def _refuse_repeats(subject: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            plural = "" if subject.endswith(" of") else "s"
            raise PlanError(f"one iteration has two {subject}{plural} {name!r}; keep one")
        seen.add(name)


def _topological_order(calls: tuple[ModelFunctionCall, ...], inputs: tuple[str, ...]) -> tuple[ModelFunctionCall, ...]:
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
            cycle = ", ".join(call.name for call in waiting)
            raise PlanError(f"calls need each other's products in a cycle: {cycle}; remove one dependency")
        ordered.append(ready)
        waiting.remove(ready)
        known.update(ready.produces)
    return tuple(ordered)
