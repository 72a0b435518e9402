"""Accept old names of settings for one release, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from lightning_realloc.errors import ConfigError

_Class = TypeVar("_Class", bound=type)


def rename_settings(**renamed: str) -> Callable[[_Class], _Class]:
    """Decorate a class to accept old names of its settings for one release, with a DeprecationWarning.

    Args:
        renamed: Old name -> new name. Instances can be read by the old name, too.

    An instance is created from either name. Both are an error unless the new one has its default, as ``replace`` of a
    dataclass passes it.
    """

    def decorate(cls: _Class) -> _Class:
        initialize = vars(cls)["__init__"]
        defaults = {name: parameter.default for name, parameter in signature(initialize).parameters.items()}

        @wraps(initialize)
        def __init__(self: object, *args: Any, **settings: Any) -> None:
            for old, new in renamed.items():
                if old in settings:
                    if settings.get(new, defaults[new]) not in (defaults[new], settings[old]):
                        raise ConfigError(
                            f"{cls.__name__}({old}={settings[old]!r}, {new}={settings[new]!r}) sets one thing twice: "
                            f"{old} is the old name of {new}; leave {old} out"
                        )
                    _warn_renamed(cls, old, new)
                    settings[new] = settings.pop(old)
            initialize(self, *args, **settings)

        def read_as(old: str, new: str) -> property:
            def read(self: object) -> Any:
                _warn_renamed(cls, old, new)
                return getattr(self, new)

            return property(read)

        replaced = {"__init__": __init__} | {old: read_as(old, new) for old, new in renamed.items()}
        for name, value in replaced.items():
            setattr(cls, name, value)
        return cls

    return decorate


def _warn_renamed(cls: type, old: str, new: str) -> None:
    message = f"{cls.__name__}({old}=) is now {cls.__name__}({new}=); the old name goes with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
