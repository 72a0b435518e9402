"""Objects of a data set in checkpoints, which hold plain data alone: numbers, texts, bytes, lists and dictionaries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

_MARK = "__stored__"
"""Key that tells a stored object from a dictionary of the data."""


class StoredObject(ABC):
    """An object that checkpoints hold as plain data. A concrete class registers itself by its name."""

    classes: ClassVar[dict[str, type[StoredObject]]] = {}

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        StoredObject.classes[cls.__name__] = cls

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return plain data."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: Mapping[str, Any]) -> StoredObject:
        """Restore the result of :meth:`state`."""


def plain_value(value: Any) -> Any:
    """Return a value with its stored objects as plain data, also those inside lists and dictionaries."""
    if isinstance(value, StoredObject):
        return {_MARK: type(value).__name__, **plain_value(value.state())}
    if isinstance(value, Mapping):
        return {name: plain_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain_value, value)) if type(value) in (list, tuple) else value
    return value


def restored_value(value: Any) -> Any:
    """Restore the result of :func:`plain_value`."""
    if isinstance(value, dict):
        inner = {name: restored_value(own) for name, own in value.items()}
        kind = inner.pop(_MARK, None)
        return inner if kind is None else StoredObject.classes[kind].from_state(inner)
    if type(value) in (list, tuple):
        return type(value)(map(restored_value, value))
    return value
