"""Declare the model function calls of an algorithm: four decorators for its methods, and a base class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from lightning_realloc.batch.samples import EXPERTS
from lightning_realloc.dataflow.dataflow import CallKind, Dataflow, ModelFunctionCall
from lightning_realloc.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from lightning_realloc.algorithms.base.role import Role

Method = TypeVar("Method", bound=Callable[..., Any])
_DECLARATION = "_model_function_call"

Names = str | tuple[str, ...]


def generate(role: str, *, produces: Names, needs: Names = "batch") -> Callable[[Method], Method]:
    """Declare ``method(self, engine, prompts) -> Samples``: generate responses to this rank's prompts.

    A method that leaves responses for the next iteration returns :class:`Divided`; see ``on_samples_carried``.
    """
    return _declare("generate", role, needs, produces)


def infer(role: str, *, needs: Names, produces: Names) -> Callable[[Method], Method]:
    """Declare ``method(self, model, batch) -> (N,) or (B,) tensor``: one packed micro-batch, without gradients.

    Of values per token, those of response tokens are kept. A method that produces k columns returns (..., k).
    """
    return _declare("infer", role, needs, produces)


def compute(*, needs: Names, produces: Names, whole_batch: bool = False) -> Callable[[Method], Method]:
    """Declare ``method(self, samples) -> mapping of columns``: whole groups of samples, on the host, without a model.

    Args:
        whole_batch: Pass all samples of the iteration at once, for statistics over the batch.
    """
    return _declare("compute", None, needs, produces, whole_batch=whole_batch)


def train(role: str, *, needs: Names) -> Callable[[Method], Method]:
    """Declare ``method(self, model, batch, totals) -> Loss``: the loss of one packed micro-batch."""
    return _declare("train", role, needs, ())


_CALLS_OF: WeakKeyDictionary[type, tuple[ModelFunctionCall, ...]] = WeakKeyDictionary()
"""Cache. Keys are weak, so that a class that is defined again, as in a notebook, frees its models."""


def declared_calls(module_class: type) -> tuple[ModelFunctionCall, ...]:
    """Return the calls that a class declares, base classes first, in the order of their definition.

    A method that overrides a call stays that call, decorated again or not; ``method = None`` removes the call.
    """
    if module_class not in _CALLS_OF:
        _CALLS_OF[module_class] = _collect(module_class)
    return _CALLS_OF[module_class]


def _collect(module_class: type) -> tuple[ModelFunctionCall, ...]:
    calls: dict[str, ModelFunctionCall] = {}
    for base in reversed(module_class.__mro__):
        for name, member in vars(base).items():
            call = getattr(member, _DECLARATION, None)
            if isinstance(call, ModelFunctionCall):
                calls[name] = call
            elif member is None:
                calls.pop(name, None)
    return tuple(calls.values())


def _declare(
    kind: CallKind, role: str | None, needs: Names, produces: Names, *, whole_batch: bool = False
) -> Callable[[Method], Method]:
    def attach(method: Method) -> Method:
        name = method.__name__ if role is None else f"{role}.{kind}"
        call = ModelFunctionCall(name, kind, role, method.__name__, _names(needs), _names(produces), whole_batch)
        setattr(method, _DECLARATION, call)
        return method

    return attach


def _names(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


@cache  # used many times per iteration; keyed by roles, because a changed coefficient may add or remove one
def dataflow_of_calls(
    calls: tuple[ModelFunctionCall, ...], roles: tuple[str, ...], optional_roles: tuple[str, ...]
) -> Dataflow:
    """Return the dataflow of the calls whose roles are present, without needs that only absent roles produce.

    Raises:
        PlanError: for a call of a role that is neither present nor optional.
    """
    for call in calls:
        if call.role is not None and call.role not in (*roles, *optional_roles):
            raise PlanError(
                f"call {call.name!r} is of role {call.role!r}, which roles() does not return; it returns "
                f"{', '.join(roles) or 'none'}. Add a Role({call.role!r}), or name it in optional_roles to leave its "
                f"calls out"
            )
    kept = [call for call in calls if call.role is None or call.role in roles]
    made = {name for call in kept for name in call.produces}
    absent = {name for call in calls for name in call.produces} - made
    needs = [tuple(name for name in call.needs if name not in absent) for call in kept]
    return Dataflow(tuple(replace(call, needs=names) for call, names in zip(kept, needs, strict=True)))


def with_experts(calls: tuple[ModelFunctionCall, ...]) -> tuple[ModelFunctionCall, ...]:
    """Let generating calls of trained roles produce the experts of their tokens, and later calls of the role need them.

    Raises:
        ConfigError: if no training call reads the responses of its role.
    """
    trained = {call.role for call in calls if call.kind == "train"}
    makers = {call.role: call for call in calls if call.kind == "generate" and call.role in trained}

    def reads(call: ModelFunctionCall) -> bool:
        maker = makers.get(call.role) if call.kind in ("infer", "train") else None
        return maker is not None and not set(call.needs).isdisjoint(maker.produces)

    if not any(reads(call) for call in calls if call.kind == "train"):
        raise ConfigError(
            "router_replay=True gives tokens the experts that they had in generation, and no training call here reads "
            "what its model generated; leave router_replay out"
        )
    changed = [replace(call, needs=(*call.needs, EXPERTS)) if reads(call) else call for call in calls]
    return tuple(
        replace(call, produces=(*call.produces, EXPERTS)) if call in makers.values() else call for call in changed
    )


class DeclaredCalls:
    """Part of an algorithm's module that names its models and calls, and derives the dataflow of an iteration."""

    optional_roles: tuple[str, ...] = ()
    """Roles that :meth:`roles` may leave out; their calls are then left out, too."""
    answered_ahead: tuple[str, ...] = ()
    """Calls that no longer run, because the batch brings their results."""

    @property
    def replays_experts(self) -> bool:
        """Whether tokens have the experts of generation in later calls of the trained role that generated them."""
        return False

    def roles(self) -> tuple[Role, ...]:
        """Return the algorithm's models."""
        raise NotImplementedError(f"{type(self).__name__} must return its models from roles()")

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls for the current settings; by default all that the class declares."""
        return declared_calls(type(self))

    def _added_calls(self, calls: Sequence[ModelFunctionCall]) -> tuple[ModelFunctionCall, ...]:
        """Return further calls, for evaluation alone, that callbacks ask for."""
        return ()

    def runs(self, call: str, iteration: int) -> bool:
        """Return whether a call runs in an iteration, counted from 0; the same on every rank.

        Calls that need the results of a call that does not run must not run either.
        """
        return True

    @property
    def dataflow(self) -> Dataflow:
        """The calls of one iteration.

        Calls of absent optional roles are left out, and with them the results that only they produce.

        Raises:
            PlanError: for a call of any other role that :meth:`roles` does not return, and for calls that contradict
                each other.
        """
        present = tuple(role.name for role in self.roles())
        calls = with_experts(self.calls()) if self.replays_experts else self.calls()
        return dataflow_of_calls((*calls, *self._added_calls(calls)), present, self.optional_roles)

    @classmethod
    def calls_for(cls, roles: Sequence[str]) -> tuple[ModelFunctionCall, ...]:
        """Return the calls of the class for these roles; by default all that it declares."""
        return declared_calls(cls)

    @classmethod
    def dataflow_of(cls, roles: Iterable[str]) -> Dataflow:
        """Return the calls of one iteration for these roles.

        A computation is left out if a model produces the same result, as a reward model does for reward functions.
        """
        present = tuple(roles)
        calls = cls.calls_for(present)
        made = {name for call in calls if call.role in present for name in call.produces}
        fitting = tuple(call for call in calls if call.role is not None or made.isdisjoint(call.produces))
        return dataflow_of_calls(fitting, present, tuple(call.role for call in calls if call.role is not None))
