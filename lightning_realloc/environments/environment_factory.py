"""Settings ``environment=`` and ``tools=``: checked once, then a factory that makes the environment of each sample."""

from __future__ import annotations

import copy
import inspect
import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from lightning_realloc.environments.message_environment import MessageEnvironment, checked_tools
from lightning_realloc.environments.tool_environment import AddedTools, ToolEnvironment, only_calls_tools
from lightning_realloc.environments.tools.tool import Tool, check_distinct, tools_of
from lightning_realloc.environments.tools.tool_calls import (
    DEFAULT_ANSWER_CHARACTERS,
    DEFAULT_DEADLINE_S,
    CallLimits,
)
from lightning_realloc.environments.trl_environment import TrlEnvironment, has_trl_contract
from lightning_realloc.errors import ConfigError, DataError, describe_error
from lightning_realloc.rewards.signatures import import_function

CONTROL_COLUMN = "environment"
"""Column of the data that selects one of several environments by name."""

OneSource: TypeAlias = str | MessageEnvironment | Callable[[], Any]
"""An object of `MessageEnvironment`, a class or function without arguments that makes one or an object with TRL's
contract, or an import path."""
MessageSource: TypeAlias = OneSource | Mapping[str, OneSource]
"""One source, or several by the names in the data's column ``environment``."""


class EnvironmentFactory(ABC):
    """Makes the environment of each sample."""

    needs_row_column: str | None = None
    """Column that selects the environment; None: there is one alone."""
    has_reward: bool | None
    """Whether every environment gives a reward; None: steps may, which is not known before."""
    tools: tuple[Tool, ...]
    """Descriptions of all tools that are known without a row; the tools to call are those of `make`."""
    metric_names: tuple[str, ...]
    """Names of metrics to log, of all environments."""
    by_name: Mapping[str, EnvironmentFactory]
    """The factories of several environments; empty if there is one alone."""

    @abstractmethod
    def make(self, row: Mapping[str, Any]) -> MessageEnvironment:
        """Return an environment for one sample.

        Raises:
            DataError: if the row does not select one.
        """

    def check_picklable(self) -> None:
        """Raise ConfigError if the factory cannot be sent to other processes."""
        try:
            pickle.dumps(self)
        except Exception as error:
            raise ConfigError(
                f"environment and tools must reach the processes of all ranks, and cannot be pickled "
                f"({describe_error(error)}); define classes and functions at the top of a module, or give import paths "
                f"'package.module:name'; open files and connections in reset"
            ) from error


def is_message_source(source: object) -> bool:
    """Return whether a setting is an environment of messages, and not one that answers a `Turn` with tokens.

    Raises:
        ConfigError: for an import path that cannot be resolved.
    """
    found = _resolved(source)
    if isinstance(found, Mapping | MessageEnvironment) or has_trl_contract(_constructed_by(found)):
        return True
    kind = _constructed_by(found)
    if isinstance(kind, type):
        return issubclass(kind, MessageEnvironment)
    return callable(found) and _missing_arguments(found) is None


def environment_factory_of(
    source: MessageSource | None,
    tools: Sequence[Callable[..., Any] | Tool | str] = (),
    *,
    tool_deadline_s: float = DEFAULT_DEADLINE_S,
    max_answer_characters: int = DEFAULT_ANSWER_CHARACTERS,
) -> EnvironmentFactory:
    """Return the factory for the settings ``environment`` and ``tools``.

    Everything that needs no row is checked: each environment is constructed once.

    Args:
        source: An environment, see `MessageSource`; None: the tools alone.
        tools: Tools of every environment, besides its own.
        tool_deadline_s: Most seconds of one call of ``tools``, or of a method with TRL's contract.
        max_answer_characters: Most characters of one answer of these.

    Raises:
        ConfigError: for settings of which no environment can be made.
    """
    limits = CallLimits(deadline_s=tool_deadline_s, answer_characters=max_answer_characters)
    given = tools_of(tools)
    if source is None and not given:
        raise ConfigError("environment=None and tools=[] make no environment; give one of them")
    if not isinstance(source, Mapping):
        return _OneEnvironment(source, given, limits, name="environment")
    if not source or not all(isinstance(name, str) for name in source):
        raise ConfigError(f"a dict of environments maps names to environments; got environment={source!r:.80}")
    return _EnvironmentByRow(
        {
            name: _OneEnvironment(own, given, limits, name=f"environment[{name!r}]", control_column=CONTROL_COLUMN)
            for name, own in source.items()
        }
    )


class _EnvironmentByRow(EnvironmentFactory):
    needs_row_column = CONTROL_COLUMN

    def __init__(self, by_name: Mapping[str, EnvironmentFactory]) -> None:
        self.by_name = by_name
        parts = by_name.values()
        self.tools = tuple({tool.name: tool for part in parts for tool in part.tools}.values())
        self.metric_names = tuple(dict.fromkeys(name for part in parts for name in part.metric_names))
        known = {part.has_reward for part in parts}
        self.has_reward = False if False in known else None if None in known else True

    def make(self, row: Mapping[str, Any]) -> MessageEnvironment:
        chosen = row.get(CONTROL_COLUMN)
        if not isinstance(chosen, str) or chosen not in self.by_name:
            given = f"is {chosen!r}" if CONTROL_COLUMN in row else f"is missing, of columns {sorted(row)}"
            raise DataError(
                f"with several environments, the column {CONTROL_COLUMN!r} of every row names one of "
                f"{', '.join(map(repr, self.by_name))}; in a row it {given}; correct the row, or add the environment"
            )
        return self.by_name[chosen].make(row)


class _OneEnvironment(EnvironmentFactory):
    def __init__(
        self,
        source: OneSource | None,
        tools: tuple[Tool, ...],
        limits: CallLimits,
        *,
        name: str,
        control_column: str | None = None,
    ) -> None:
        self._source = _resolved(source)
        self._own_tools = tools
        self._limits = limits
        self._name = f"{name}={_described(source)}"
        self._control_column = control_column
        self.by_name = {}
        _check_makes_environments(self._source, self._name)
        self._spare: deque[Any] = deque()
        """Objects with TRL's contract, whose episodes have ended."""
        first = self._made()
        self._ready: deque[MessageEnvironment] = deque([first])
        """The environment of these checks, for the first sample."""
        known = _known_tools(first)
        check_distinct(known)
        self.tools = tuple(replace(tool, function=_only_described) for tool in known)
        self.metric_names = _metric_names(first)
        self.has_reward = _has_reward(first)

    def make(self, row: Mapping[str, Any]) -> MessageEnvironment:
        ready = _popped(self._ready)
        return self._made() if ready is None else ready

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without objects of episodes, which stay in their process."""
        return {**self.__dict__, "_spare": deque(), "_ready": deque()}

    def _made(self) -> MessageEnvironment:
        limits = self._limits
        if self._source is None:
            own, most = self._own_tools, limits.answer_characters
            return ToolEnvironment(own, tool_deadline_s=limits.deadline_s, max_answer_characters=most)
        found = _popped(self._spare)
        if found is None:
            found = self._constructed()
        if isinstance(found, MessageEnvironment):
            return self._with_tools(found)
        if not has_trl_contract(found):
            raise ConfigError(
                f"{self._name} makes a {type(found).__name__}; it must make a MessageEnvironment, or an object with a "
                f"method reset, whose other public methods are the model's tools"
            )
        column, give_back = self._control_column, self._spare.append
        return self._with_tools(TrlEnvironment(found, limits, control_column=column, give_back=give_back))

    def _constructed(self) -> object:
        if callable(self._source) and not isinstance(self._source, MessageEnvironment):
            try:
                return self._source()
            except Exception as error:
                raise ConfigError(
                    f"{self._name} could not be made without arguments ({describe_error(error)}); correct it, or give "
                    f"functools.partial(...) with the arguments that it needs"
                ) from error
        try:
            return copy.deepcopy(self._source)
        except Exception as error:
            raise ConfigError(
                f"every sample gets a copy of an environment that is given as an object, and {self._name} cannot be "
                f"copied ({describe_error(error)}); give its class, or functools.partial(class, arguments)"
            ) from error

    def _with_tools(self, environment: MessageEnvironment) -> MessageEnvironment:
        if self._own_tools and not isinstance(environment, ToolEnvironment):
            return AddedTools(environment, self._own_tools, self._limits)
        if isinstance(environment, ToolEnvironment):
            environment.add_tools(self._own_tools)
        return environment


def _resolved(source: Any) -> Any:
    if isinstance(source, str):
        return import_function(source, what="environment", error=ConfigError)
    return source


def _constructed_by(found: Any) -> Any:
    """Return the class or function of a partial one, or what is given."""
    return found.func if isinstance(found, partial) else found


def _check_makes_environments(found: Any, name: str) -> None:
    """Raise ConfigError for what can be neither called without arguments nor copied."""
    if found is None or isinstance(found, MessageEnvironment) or (has_trl_contract(found) and not callable(found)):
        return
    if not callable(found):
        raise ConfigError(
            f"{name} is a {type(found).__name__}; give a class or object of MessageEnvironment, a class with a method "
            f"reset and tools as methods, a function that makes one, or an import path"
        )
    missing = _missing_arguments(found)
    if missing is not None:
        raise ConfigError(
            f"an environment is made without arguments, and {name} needs some ({missing}); give "
            f"functools.partial({_described(found)}, ...), or an object of it"
        )


def _missing_arguments(function: Callable[..., Any]) -> str | None:
    """Return why a function cannot be called without arguments; None: it can."""
    try:
        inspect.signature(function).bind()
    except ValueError:  # a builtin, whose signature is not known
        return None
    except TypeError as problem:
        return str(problem)
    return None


def _known_tools(environment: MessageEnvironment) -> tuple[Tool, ...]:
    try:
        return checked_tools(environment)
    except AttributeError:  # they are made in reset, from the row
        return ()


def _metric_names(environment: MessageEnvironment) -> tuple[str, ...]:
    """Return the names of metrics to log.

    Raises:
        ConfigError: for anything but a list of names.
    """
    own = environment.inner if isinstance(environment, AddedTools) else environment
    if isinstance(own.metric_names, str) or not all(isinstance(name, str) for name in own.metric_names):
        raise ConfigError(
            f"{type(own).__name__}.metric_names must be a list of names; it is {repr(own.metric_names)[:60]}"
        )
    return tuple(own.metric_names)


def _has_reward(environment: MessageEnvironment) -> bool | None:
    if isinstance(environment, AddedTools):
        return _has_reward(environment.inner)
    if isinstance(environment, TrlEnvironment):
        return environment.has_reward
    if type(environment).get_reward is not MessageEnvironment.get_reward:
        return True
    return False if only_calls_tools(environment) else None


def _popped(ready: deque[Any]) -> Any:
    """Return an object that waits to be used, None if there is none; another thread may have been faster."""
    try:
        return ready.pop()
    except IndexError:
        return None


def _described(source: object) -> str:
    return str(getattr(source, "__name__", None) or f"{source!r:.60}")


def _only_described(**arguments: Any) -> None:
    raise AssertionError("tools of a factory describe; those of an environment that it makes can be called")
