"""Settings ``environment=`` and ``tools=``: checked once, then a factory that makes the environment of each sample."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from lightning_realloc.environments.message_environment import MessageEnvironment, checked_tools
from lightning_realloc.environments.tool_environment import (
    AddedTools,
    ToolEnvironment,
    only_calls_tools,
    plain_environment,
)
from lightning_realloc.environments.tools.tool import Tool, check_distinct, tools_of
from lightning_realloc.environments.tools.tool_calls import DEFAULT_DEADLINE_S
from lightning_realloc.environments.trl_environment import TrlEnvironment, has_trl_contract
from lightning_realloc.errors import ConfigError, describe_error
from lightning_realloc.rewards.signatures import check_returns, import_function

CONTROL_COLUMN = "environment"
"""Column of the data that selects one of several environments by name."""

_ARGUMENTS: Mapping[str, tuple[str, ...]] = {"reset": ("row",), "step": ("message",), "get_reward": (), "close": ()}
"""Method -> names of its arguments, which are given by position."""

OneSource: TypeAlias = str | MessageEnvironment | Callable[[], Any] | Mapping[str, Any]
"""An object of `MessageEnvironment`, a class or function without arguments that makes one or an object with TRL's
contract, an import path, or ``class_path`` with ``init_args``."""
MessageSource: TypeAlias = OneSource | Mapping[str, OneSource]
"""One source, or several by the names in the data's column ``environment``."""


class EnvironmentFactory:
    """Makes the environment of each sample.

    Everything that needs no row is checked: an environment of each source is constructed.

    Args:
        source: An environment, see `MessageSource`; None: the tools alone.
        tools: Tools of every environment, besides its own.
        tool_deadline_s: Most seconds of one call of a tool, unless a `ToolEnvironment` has a bound of its own. Keep it
            below the deadline of the turn, which fails the response.

    Raises:
        ConfigError: for settings of which no environment can be made.
    """

    def __init__(
        self,
        source: MessageSource | None,
        tools: Sequence[Callable[..., Any] | Tool | str] = (),
        *,
        tool_deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        given = tools_of(tools)
        maker = partial(_Maker, tools=given, tool_deadline_s=tool_deadline_s)
        if source is None and not given:
            raise ConfigError("environment=None and tools=[] make no environment; give one of them")
        self._is_chosen = isinstance(source, Mapping) and "class_path" not in source
        """Whether a column of the data selects the environment."""
        self._makers: dict[str, _Maker]
        if isinstance(source, Mapping) and self._is_chosen:
            if not source or not all(isinstance(name, str) for name in source):
                raise ConfigError(
                    f"a dict of environments maps names to environments; got environment={source!r:.80}; write "
                    f"{{'game': Game}}, or leave it out"
                )
            self._makers = {
                name: maker(own, name=f"environment[{name!r}]", control_column=CONTROL_COLUMN)
                for name, own in source.items()
            }
        else:
            self._makers = {"": maker(source, name="environment")}
        first = [maker.first() for maker in self._makers.values()]
        known = {tool.name: tool for environment in first for tool in _known_tools(environment)}
        self.tools = tuple(replace(tool, function=_only_described) for tool in known.values())
        """Descriptions of all tools that are known without a row; the tools to call are those of `make`."""
        self.metric_names = tuple(dict.fromkeys(name for environment in first for name in _metric_names(environment)))
        """Names of metrics to log, of all environments."""
        self.gives_rewards = any(map(_may_reward, first))
        """Whether any environment may give rewards."""
        self.writes_prompts = any(
            type(plain_environment(environment)).reset is not MessageEnvironment.reset for environment in first
        )
        """Whether the ``reset`` of any environment may write the prompt."""

    def make(self, row: Mapping[str, Any]) -> MessageEnvironment:
        """Return an environment for one sample.

        Raises:
            ConfigError: if the row does not select one.
        """
        return self._maker(row.get(CONTROL_COLUMN), row).make()

    def check_rows(self, columns: Mapping[str, Sequence[object]]) -> None:
        """Raise ConfigError for columns of the data that do not select an environment in every row."""
        for name in columns.get(CONTROL_COLUMN, [None]):
            self._maker(name, columns)

    def _maker(self, name: object, columns: Collection[str]) -> _Maker:
        if not self._is_chosen:
            return self._makers[""]
        if not isinstance(name, str) or name not in self._makers:
            given = f"is {name!r}" if CONTROL_COLUMN in columns else f"is missing, of columns {sorted(columns)}"
            raise ConfigError(
                f"with several environments, the column {CONTROL_COLUMN!r} of every row names one of "
                f"{', '.join(map(repr, self._makers))}; in a row it {given}; correct the row, or add the environment"
            )
        return self._makers[name]


def is_message_source(source: object) -> bool:
    """Return whether a setting is an environment of messages, and not one that answers a `Turn` with tokens.

    Raises:
        ConfigError: for an import path that cannot be resolved.
    """
    found = resolved_source(source)
    kind = found.func if isinstance(found, partial) else found
    if isinstance(found, Mapping | MessageEnvironment) or has_trl_contract(kind):
        return True
    if isinstance(kind, type):
        return issubclass(kind, MessageEnvironment)
    return callable(found) and _can_be_called(found)


def resolved_source(source: Any) -> Any:
    """Return an imported class or function, a partial one for ``class_path`` and ``init_args``, or what is given."""
    if isinstance(source, str):
        return import_function(source, what="environment", error=ConfigError)
    if not isinstance(source, Mapping) or "class_path" not in source:
        return source
    found = import_function(str(source["class_path"]), what="environment", error=ConfigError)
    if not isinstance(found, type):  # a function would be called with any arguments that a file has
        raise ConfigError(f"class_path={source['class_path']!r} names no class; give a function's import path alone")
    return partial(found, **(source.get("init_args") or {}))


class _Maker:
    """Makes environments of one source.

    Args:
        source: See `OneSource`; None: the tools alone.
        tools: Tools of every environment, besides its own.
        tool_deadline_s: Most seconds of one call of a tool.
        name: The setting, for messages.
        control_column: Column that ``reset`` of an object with TRL's contract does not get.
    """

    def __init__(
        self,
        source: OneSource | None,
        *,
        tools: tuple[Tool, ...],
        tool_deadline_s: float,
        name: str,
        control_column: str | None = None,
    ) -> None:
        self._source = resolved_source(source)
        self._tools, self._tool_deadline_s = tools, tool_deadline_s
        self._name = f"{name}={_described(source)}"
        self._control_column = control_column
        self._spare: deque[Any] = deque()
        """Objects with TRL's contract, whose episodes have ended."""

    def first(self) -> MessageEnvironment:
        """Return an environment to check. TRL's object in it is used again."""
        environment = self.make()
        check_distinct(_known_tools(environment))
        own = plain_environment(environment)
        _check_methods(own)
        if isinstance(own, TrlEnvironment):
            self._spare.append(own.wrapped)
        return environment

    def make(self) -> MessageEnvironment:
        """Return an environment for one sample."""
        if self._source is None:
            return ToolEnvironment(self._tools, tool_deadline_s=self._tool_deadline_s)
        try:
            found = self._spare.pop()
        except IndexError:
            found = self._constructed()
        if not isinstance(found, MessageEnvironment):
            if not has_trl_contract(found):
                raise ConfigError(
                    f"{self._name} makes a {type(found).__name__}; it must make a MessageEnvironment, or an object "
                    f"with a method reset, whose other public methods are the model's tools"
                )
            found = TrlEnvironment(found, control_column=self._control_column, give_back=self._spare.append)
        if isinstance(found, ToolEnvironment):  # whose step may watch all calls
            found.add_tools(self._tools)
            found.bound_calls(self._tool_deadline_s)
            return found
        return AddedTools(found, self._tools, tool_deadline_s=self._tool_deadline_s) if self._tools else found

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without objects of episodes, which stay in their process."""
        return {**self.__dict__, "_spare": deque()}

    def _constructed(self) -> object:
        source = self._source
        is_object = isinstance(source, MessageEnvironment) or (has_trl_contract(source) and not callable(source))
        if not is_object and not callable(source):
            raise ConfigError(
                f"{self._name} is a {type(source).__name__}; give a class or object of MessageEnvironment, a class "
                f"with a method reset and tools as methods, a function that makes one, or an import path"
            )
        try:
            return copy.deepcopy(source) if is_object else source()
        except Exception as error:
            way_out = (
                "every sample gets a copy of it: give its class, or functools.partial(class, arguments)"
                if is_object
                else "correct it, or give the arguments that it needs by functools.partial(...), in YAML by init_args"
            )
            verb = "copied" if is_object else "made"
            raise ConfigError(f"{self._name} cannot be {verb} ({describe_error(error)}); {way_out}") from error


def _check_methods(environment: MessageEnvironment) -> None:
    """Raise ConfigError for an environment whose every episode would fail.

    Its class has no ``step``, or a method that takes other arguments or is a generator.
    """
    if isinstance(environment, TrlEnvironment):
        _check_generators(environment.wrapped)
        return
    name = type(environment).__name__
    if getattr(environment.step, "__func__", None) is MessageEnvironment.step:
        raise ConfigError(
            f"an environment answers turns, and {name} has no method for it; define step(self, message), which returns "
            f"StepResult(messages, ...)"
        )
    _check_generators(environment)
    for method, arguments in _ARGUMENTS.items():
        try:
            inspect.signature(getattr(environment, method)).bind(*arguments)
        except ValueError:  # a builtin, whose signature is not known
            continue
        except TypeError as problem:
            raise ConfigError(
                f"{name}.{method} cannot be called as {method}({', '.join(arguments)}) ({problem}); define it as "
                f"{method}({', '.join(('self', *arguments))})"
            ) from None


def _check_generators(environment: object) -> None:
    for method in _ARGUMENTS:
        if hasattr(environment, method):
            check_returns(getattr(environment, method), f"{type(environment).__name__}.{method}", error=ConfigError)


def _can_be_called(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except ValueError:  # a builtin, whose signature is not known
        return True
    except TypeError:
        return False
    return True


def _known_tools(environment: MessageEnvironment) -> tuple[Tool, ...]:
    try:
        return checked_tools(environment)
    except AttributeError:  # they are made in reset, from the row
        return ()


def _metric_names(environment: MessageEnvironment) -> Sequence[str]:
    """Return the names of metrics to log.

    Raises:
        ConfigError: for anything but a list of names.
    """
    own = plain_environment(environment)
    if isinstance(own.metric_names, str) or not all(isinstance(name, str) for name in own.metric_names):
        raise ConfigError(
            f"{type(own).__name__}.metric_names must be a list of names; it is {repr(own.metric_names)[:60]}"
        )
    return own.metric_names


def _may_reward(environment: MessageEnvironment) -> bool:
    own = plain_environment(environment)
    if isinstance(own, TrlEnvironment):
        return own.has_reward
    return type(own).get_reward is not MessageEnvironment.get_reward or not only_calls_tools(own)


def _described(source: object) -> str:
    return str(getattr(source, "__name__", None) or f"{source!r:.60}")


def _only_described(**arguments: Any) -> None:
    raise AssertionError("tools of a factory describe; those of an environment that it makes can be called")
