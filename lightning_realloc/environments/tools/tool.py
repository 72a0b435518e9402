"""Tools: functions that a model may call, with the schemas that chat templates show."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from lightning_realloc.errors import ConfigError
from lightning_realloc.rewards.signatures import check_returns, import_function

RESERVED_NAMES = frozenset({"reset", "step", "close", "get_reward"})
"""Methods of environments, which no tool is named like."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
"""Names that the templates of all models can write."""
_WAY_OUT = (
    "give every argument an annotation such as int, str or list[str], and the function a docstring whose section "
    "'Args:' has a line 'argument: its meaning' for each, or write Tool(name, function, schema)"
)


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that a model may call.

    A function with annotations and a docstring needs no `Tool`: `tools=[search]` makes one by `Tool.from_function`.

    Example:
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: First number.
        ...         b: Second number.
        ...     '''
        ...     return a + b
        >>> tool = Tool.from_function(add)
        >>> tool.name, tool.schema["function"]["parameters"]["required"]
        ('add', ['a', 'b'])
    """

    name: str
    """Name by which the model calls it."""
    function: Callable[..., Any]
    """Takes the arguments by keyword; plain functions run in threads, ``async`` ones in the event loop."""
    schema: Mapping[str, Any] = field(hash=False)
    """Description in the form of ``transformers.utils.get_json_schema``: ``{"type": "function", "function": ...}``."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"a tool is a function; {self.name!r} is a {type(self.function).__name__}")
        check_returns(self.function, f"tool {self.name!r}", error=ConfigError)
        if not isinstance(self.name, str) or _NAME.fullmatch(self.name) is None:
            raise ConfigError(
                f"a tool's name has up to 64 letters, digits and underscores; {self.name!r} of {self.function!r} has "
                f"not; define it with def, or write Tool(name, function, schema)"
            )
        if self.name in RESERVED_NAMES:
            raise ConfigError(
                f"tool {self.name!r} is named like a method that the environment itself has "
                f"({', '.join(sorted(RESERVED_NAMES))}); rename it, or derive from MessageEnvironment if it is that "
                f"method"
            )
        described = self.schema.get("function") if isinstance(self.schema, Mapping) else None
        if not isinstance(described, Mapping) or described.get("name") != self.name:
            raise ConfigError(
                f"the schema of tool {self.name!r} must be {{'type': 'function', 'function': {{'name': "
                f"{self.name!r}, 'description': ..., 'parameters': ...}}}}; got {repr(self.schema)[:80]}"
            )

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """Return the tool of a function or method, described by its annotations and its docstring.

        Raises:
            ConfigError: without them, and for functions that cannot be called by keywords.
        """
        name = _name_of(function)
        _check_takes_keywords(name, function)
        try:
            schema = get_json_schema(function)
        except Exception as problem:  # transformers' own classes, and any error of an annotation
            reason = " ".join(str(part) for part in problem.args).partition("\n")[0]
            raise ConfigError(f"tool {name!r} cannot be described to the model ({reason}); {_WAY_OUT}") from problem
        return cls(name, function, schema)


def tools_of(functions: Sequence[Callable[..., Any] | Tool | str]) -> tuple[Tool, ...]:
    """Return the tools that a setting lists: functions, import paths of functions, or tools.

    Raises:
        ConfigError: for what no model could call, and for two tools of one name.
    """
    if isinstance(functions, str | Tool | Mapping) or not isinstance(functions, Iterable):
        raise ConfigError(f"tools={functions!r} must be a list of functions or import paths; write tools=[...]")
    tools = tuple(map(_tool_of, functions))
    check_distinct(tools)
    return tools


def check_distinct(tools: Iterable[Tool]) -> None:
    """Raise ConfigError for two tools of one name."""
    seen: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in seen:
            pair = _place_of(seen[tool.name].function), _place_of(tool.function)
            way_out = "leave one of them out" if pair[0] == pair[1] else "rename one of them"
            raise ConfigError(f"tools need different names; {tool.name!r} is that of {' and '.join(pair)}; {way_out}")
        seen[tool.name] = tool


def _tool_of(given: Callable[..., Any] | Tool | str) -> Tool:
    found: Any = import_function(given, what="tool", error=ConfigError) if isinstance(given, str) else given
    if isinstance(found, Tool):
        return found
    if inspect.isclass(found):
        raise ConfigError(
            f"a tool is a function; {found.__name__} is a class; list methods of an object of it, or give it as "
            f"environment={found.__name__}"
        )
    if not callable(found):
        raise ConfigError(f"a tool is a function, an import path or a Tool; {given!r} is a {type(found).__name__}")
    return Tool.from_function(found)


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"a tool needs a name; {function!r} has none; write a function with def that calls it, or "
            f"Tool(name, function, schema)"
        )
    return name


def _check_takes_keywords(name: str, function: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins; the schema, which they cannot have either, reports it
        return
    unnamed = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]
    listed = [f"*{parameter.name}" for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL]
    if unnamed or listed:
        raise ConfigError(
            f"a model calls tools by keywords, which {', '.join(unnamed + listed)} of tool {name!r} cannot be given "
            f"by; remove the / from its arguments, and take a list instead of *arguments"
        )


def _place_of(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}.{name}" if module and name else repr(function)
