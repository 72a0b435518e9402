"""Signatures of reward functions: import paths, names, accepted arguments, required columns, coroutines."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from lightning_realloc.errors import ReallocError, RewardError

RewardFunction = Callable[..., Any]
"""``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, plain or ``async``."""

STANDARD_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids"})
"""Arguments that every function may request."""
SERVICES = frozenset({"trainer_state", "log_extra", "log_metric"})
"""Further arguments that TRL passes to functions: the state of the trainer and two logging functions."""
ENVIRONMENTS = "environments"
"""Argument of functions that read the objects of environments: these are called where the environments run."""


def import_function(
    path: str, *, what: str = "reward function", error: type[ReallocError] = RewardError
) -> Callable[..., Any]:
    """Import the callable ``package.module:name`` or ``package.module.name``.

    Args:
        what: Kind of the callable, for messages.
        error: Exception type.

    Raises:
        RewardError: or another ``error``, if the module cannot be imported or has no such name.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name or not name:
        raise error(f"an import path is 'package.module:name'; got {path!r} for {what}")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as problem:
        way_out = "check the spelling and that its folder is installed or on PYTHONPATH"
        if module_name.endswith(".py"):
            way_out = f"name the module instead of its file: {module_name.removesuffix('.py')}:{name}"
        raise error(f"{what} {path!r} cannot be imported ({problem}); {way_out}") from problem
    return function


def resolved(
    function: Callable[..., Any] | str, *, what: str = "reward function", error: type[ReallocError] = RewardError
) -> Callable[..., Any]:
    """Return a function, imported if it is given as an import path.

    Args:
        what: Kind of the function, for messages.
        error: Exception type.

    Raises:
        RewardError: or another ``error``, if it is not a callable, or is a class.
    """
    found = import_function(function, what=what, error=error) if isinstance(function, str) else function
    if inspect.isclass(found):
        raise error(
            f"{what} {found.__name__} must be a function or a callable object; it is a class, "
            f"make an instance: {found.__name__}(...), or in YAML class_path and init_args"
        )
    if not callable(found):
        raise error(f"{what} {found!r} must be callable; it is a {type(found).__name__}")
    return found


def check_takes(
    function: Callable[..., Any], argument: str, *, what: str, way_out: str, error: type[ReallocError]
) -> None:
    """Raise ``error`` for a function or class that cannot be called with one argument alone.

    Args:
        argument: Words for the argument, as ``what`` and ``way_out`` for the message.
    """
    try:
        inspect.signature(function).bind(None)
    except ValueError:  # a builtin, whose signature is not known
        return
    except TypeError as problem:
        raise error(
            f"{what} {function_name(function)} cannot be called with {argument} alone ({problem}); {way_out}"
        ) from None


def check_returns(function: Callable[..., Any], name: str, *, error: type[ReallocError]) -> None:
    """Raise ``error`` for a generator, which a call would return instead of the result."""
    called = (function, getattr(function, "__call__", None))  # noqa: B004
    if any(map(inspect.isgeneratorfunction, called)) or any(map(inspect.isasyncgenfunction, called)):
        raise error(f"{name} must return its result, and contains yield, which makes it a generator; write return")


def function_name(function: RewardFunction) -> str:
    """Return a function's name, or the class name of a callable object."""
    return str(getattr(function, "__name__", type(function).__name__))


def unique_names(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    """Return a unique name for every function; repeated names are numbered."""
    names: list[str] = []
    for function in functions:
        name = function_name(function)
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return tuple(names)


def accepted(function: RewardFunction, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function accepts: all if it has ``**kwargs``, else those it names.

    A method cannot receive a column that is named like its first parameter, usually ``self``.
    """
    parameters = _parameters(function)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        bound = _bound_parameter(function)
        return {name: value for name, value in given.items() if name != bound}
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in given.items() if name in names}


def required_columns(function: RewardFunction) -> set[str]:
    """Return the columns of the data that a function requires.

    A function that passes columns on to another one can define a method of this name.
    """
    if hasattr(function, "required_columns"):
        return set(function.required_columns())
    return _required(function) - STANDARD_ARGUMENTS - SERVICES - {ENVIRONMENTS}


def require_values(functions: Sequence[RewardFunction], columns: Mapping[str, Sequence[object]], source: str) -> None:
    """Raise for rows to which no function applies, as all have ``skips_missing`` and lack a value in a row.

    Verifiers have this attribute: they return None where a column that they require holds None.

    Raises:
        RewardError: with the number of rows, and the first one's prompt.
    """
    if not all(getattr(function, "skips_missing", False) for function in functions):
        return
    lacking: set[int] | None = None
    read: set[str] = set()
    for function in functions:
        names = required_columns(function)
        read |= names
        mine = {row for name in names for row, value in enumerate(columns[name]) if value is None}
        lacking = mine if lacking is None else lacking & mine
    if not lacking:
        return
    first = min(lacking)
    shown = {name: columns[name][first] for name in ("prompt", "data_set") if name in columns}
    raise RewardError(
        f"{len(lacking)} rows of the {source} have no value in {sorted(read)}, which all reward functions need; the "
        f"first has {shown}; fill the column, leave these rows out, or add a reward that does without it"
    )


def requires_environments(function: RewardFunction) -> bool:
    """Return whether a function cannot be called without ``environments``."""
    return reads_environments(function) and ENVIRONMENTS in _required(function)


def reads_environments(function: RewardFunction) -> bool:
    """Return whether a function has an argument ``environments``, or ``**kwargs`` in which its code looks for it."""
    if hasattr(function, "required_columns"):
        return False
    parameters = _parameters(function)
    if any(parameter.name == ENVIRONMENTS for parameter in parameters):
        return True
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return takes_any and ENVIRONMENTS in _constants(getattr(_plain(function), "__code__", None))


def mentioned(function: RewardFunction, texts: Collection[str]) -> list[str]:
    """Return those of ``texts`` that a function looks for in completions, as its method of this name says."""
    return list(function.mentioned(texts)) if hasattr(function, "mentioned") else []


def is_async(function: RewardFunction) -> bool:
    """Return whether the function is a coroutine function; wrappers can state it by an attribute ``is_async``."""
    if hasattr(function, "is_async"):
        return bool(function.is_async)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def without_services(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without services, which cannot be sent to another process."""
    return {name: value for name, value in given.items() if name not in SERVICES}


def _bound_parameter(function: RewardFunction) -> str | None:
    """Return the name of a method's bound first parameter; None if keyword arguments may still use it."""
    method: Any = _plain(function)
    if not inspect.ismethod(method):
        return None
    first = next(iter(inspect.signature(method.__func__).parameters.values()), None)
    takes_name = first is not None and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return first.name if first is not None and takes_name else None


def _plain(function: RewardFunction) -> Any:
    """Return the function of partial ones, and the method that calls an object."""
    while isinstance(function, functools.partial):
        function = function.func
    is_plain = inspect.isfunction(function) or inspect.ismethod(function)
    return function if is_plain else getattr(function, "__call__", None)  # noqa: B004


def _required(function: RewardFunction) -> set[str]:
    """Return the names of the arguments without a default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in _parameters(function) if p.kind in kinds and p.default is inspect.Parameter.empty}


def _constants(code: CodeType | None) -> Iterator[object]:
    """Yield the constants of a function's code, with those of comprehensions and functions in it."""
    for constant in () if code is None else code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        else:
            yield constant


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())
