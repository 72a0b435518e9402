"""Declaring the model function calls of an algorithm: four decorators on the methods that do the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lightning_realloc.dataflow.dataflow import CallKind, ModelFunctionCall

Method = TypeVar("Method", bound=Callable[..., Any])
_DECLARATION = "_model_function_call"

Names = str | tuple[str, ...]


def generate(role: str, *, produces: Names, needs: Names = "batch") -> Callable[[Method], Method]:
    """Declare ``method(self, engine, prompts) -> Samples``: this rank's prompts in, their responses out.

    A method that leaves some of them for the next iteration returns :class:`Divided`; see ``on_samples_carried``.
    """
    return _declare("generate", role, needs, produces)


def infer(role: str, *, needs: Names, produces: Names) -> Callable[[Method], Method]:
    """Declare ``method(self, model, batch) -> (N,) or (B,) tensor``: one packed micro-batch, without gradients.

    A value per token is kept for the response tokens, a value per sequence as it is.
    """
    return _declare("infer", role, needs, produces)


def compute(*, needs: Names, produces: Names, whole_batch: bool = False) -> Callable[[Method], Method]:
    """Declare ``method(self, samples) -> mapping of columns``: whole groups of samples, on the host, no model.

    Args:
        whole_batch: All samples of the iteration at once, in one place: for statistics over the batch.
    """
    return _declare("compute", None, needs, produces, whole_batch=whole_batch)


def train(role: str, *, needs: Names) -> Callable[[Method], Method]:
    """Declare ``method(self, model, batch, totals) -> Loss``: one packed micro-batch; the rest is the runtime's."""
    return _declare("train", role, needs, ())


_CALLS_OF: WeakKeyDictionary[type, tuple[ModelFunctionCall, ...]] = WeakKeyDictionary()
"""Asked for several times an iteration. A class that is defined again, as in a notebook, leaves with its models."""


def declared_calls(module_class: type) -> tuple[ModelFunctionCall, ...]:
    """Return the calls that a class declares, base classes first, in the order they are written.

    A method that overrides a call stays that call, decorated again or not; ``method = None`` leaves the call out.
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
