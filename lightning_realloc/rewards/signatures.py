"""Which function is meant, what does it want to be told, and is it a coroutine function?"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_realloc.errors import ReallocError, RewardError

RewardFunction = Callable[..., Any]
"""``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, plain or ``async``."""

TOLD = frozenset({"prompts", "completions", "completion_ids"})
"""What every function may ask for."""
SERVICES = frozenset({"trainer_state", "log_extra", "log_metric"})
"""What TRL hands to functions besides data: how far the run is, and two functions that take down values."""


def import_function(
    path: str, *, what: str = "reward function", error: type[ReallocError] = RewardError
) -> Callable[..., Any]:
    """Return what ``package.module:name`` or ``package.module.name`` names.

    Raises:
        RewardError: (or another ``error``, about a ``what``) when the module cannot be imported or has no such name.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name or not name:
        raise error(f"a {what}'s import path is 'package.module:name'; got {path!r}")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as problem:
        raise error(
            f"{what} {path!r} cannot be imported ({problem}); "
            f"check the spelling and that its folder is installed or on PYTHONPATH"
        ) from problem
    return function  # type: ignore[no-any-return]


def resolved(function: RewardFunction | str) -> RewardFunction:
    """Return a function that was given by itself or by its import path.

    Raises:
        RewardError: for what leads to no function.
    """
    found = import_function(function) if isinstance(function, str) else function
    if inspect.isclass(found):
        raise RewardError(
            f"a reward function must be a function or an object that can be called; {found.__name__} is a class, "
            f"make one of it: {found.__name__}(...), or in YAML class_path and init_args"
        )
    if not callable(found):
        raise RewardError(f"a reward function must be callable; {found!r} is a {type(found).__name__}")
    return found


def function_name(function: RewardFunction) -> str:
    """Return a function's own name, its class's where it is an object."""
    return str(getattr(function, "__name__", type(function).__name__))


def unique_names(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    """Return a name for every function; one that comes again is numbered."""
    names: list[str] = []
    for function in functions:
        name = function_name(function)
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return tuple(names)


def accepted(function: RewardFunction, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function takes: all, unless it names them one by one.

    A method cannot take a column that is named as its first parameter, which is usually ``self``.
    """
    parameters = _parameters(function)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        bound = _bound_parameter(function)
        return {name: value for name, value in given.items() if name != bound}
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in given.items() if name in names}


def required_columns(function: RewardFunction) -> set[str]:
    """Return the columns of the data without which a function cannot be called.

    A function may say so itself, by a method of this name: one that hands columns on to another.
    """
    if hasattr(function, "required_columns"):
        return set(function.required_columns())
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {p.name for p in _parameters(function) if p.kind in kinds and p.default is inspect.Parameter.empty}
    return named - TOLD - SERVICES


def is_async(function: RewardFunction) -> bool:
    """Return whether calling the function gives a coroutine; one that calls another says so by an attribute."""
    if hasattr(function, "is_async"):
        return bool(function.is_async)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def columns_alone(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what can travel to another process: no services."""
    return {name: value for name, value in given.items() if name not in SERVICES}


def _bound_parameter(function: RewardFunction) -> str | None:
    """Return the parameter that a method's object takes up, None where keywords may still have its name."""
    while isinstance(function, functools.partial):
        function = function.func
    method: Any = function if inspect.ismethod(function) else getattr(function, "__call__", None)  # noqa: B004
    if not inspect.ismethod(method):
        return None
    first = next(iter(inspect.signature(method.__func__).parameters.values()), None)
    takes_name = first is not None and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return first.name if first is not None and takes_name else None


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())
