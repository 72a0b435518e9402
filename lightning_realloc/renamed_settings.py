"""Accept old names of settings for one release, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from lightning_realloc.errors import ConfigError

_Class = TypeVar("_Class", bound=type)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def rename_settings(**renamed: str) -> Callable[[_Class], _Class]:
    """Decorate a class to accept old names of its settings for one release, with a DeprecationWarning.

    Args:
        renamed: Old name -> new name. Instances can be read by the old name, too.

    An instance is created from either name. Both are an error unless the new one has its default, as ``replace`` of a
    dataclass passes it.
    """

    def decorate(cls: _Class) -> _Class:
        def read_as(old: str, new: str) -> property:
            def read(self: object) -> Any:
                _warn_renamed(cls.__name__, old, new)
                return getattr(self, new)

            return property(read)

        initialize = _accepting_old_names(vars(cls)["__init__"], cls.__name__, renamed)
        replaced = {"__init__": initialize} | {old: read_as(old, new) for old, new in renamed.items()}
        for name, value in replaced.items():
            setattr(cls, name, value)
        return cls

    return decorate


def rename_arguments(
    **renamed: str,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Decorate a function to accept old names (old -> new) of its keyword arguments, as `rename_settings` does."""
    return lambda function: _accepting_old_names(function, function.__name__, renamed)


def _accepting_old_names(
    function: Callable[_Parameters, _Result], subject: str, renamed: Mapping[str, str]
) -> Callable[_Parameters, _Result]:
    defaults = {name: parameter.default for name, parameter in signature(function).parameters.items()}

    @wraps(function)
    def accepting(*args: _Parameters.args, **settings: _Parameters.kwargs) -> _Result:
        for old, new in renamed.items():
            if old in settings:
                if settings.get(new, defaults[new]) not in (defaults[new], settings[old]):
                    raise ConfigError(
                        f"{subject}({old}={settings[old]!r}, {new}={settings[new]!r}) sets one thing twice: {old} is "
                        f"the old name of {new}; leave {old} out"
                    )
                _warn_renamed(subject, old, new)
                settings[new] = settings.pop(old)
        return function(*args, **settings)

    return accepting


def _warn_renamed(subject: str, old: str, new: str) -> None:
    message = f"{subject}({old}=) is now {subject}({new}=); the old name goes with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
