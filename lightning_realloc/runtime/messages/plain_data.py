"""Serialize Python values as JSON with raw bytes, so that a message from another process cannot run code.

Unlike ``pickle``, `decode_value` makes plain values only: numbers, texts, bytes, containers, tensors, arrays, dates,
paths, objects that checkpoints hold as plain data, and this package's own dataclasses, named tuples, enums and errors,
whose constructors check their fields.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import Tensor

from lightning_realloc.batch.stored_objects import StoredObject
from lightning_realloc.errors import DataError, ReallocError
from lightning_realloc.runtime.dtypes import dtype_name, dtype_named

_PACKAGE = "lightning_realloc."
"""Beginning of the modules whose classes a message may name."""
_SIZE_BYTES = 8
_ARRAY_KINDS = "biufcUSmM"
"""numpy's letters of numbers, texts, bytes, durations and dates, which hold no references."""
_CONTAINERS: Mapping[str, Callable[..., object]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_SCALARS = frozenset((int, float, str, bool, type(None)))
"""Classes of values that JSON has as well; lists of them, such as tokens, are taken as they are."""


def encode_value(value: object) -> bytearray:
    """Return a value as bytes for `decode_value`. Fields of dataclasses with ``sent=False`` in their metadata stay.

    Raises:
        DataError: naming the class of an object that is no plain data.
    """
    blobs: list[Any] = []
    text = json.dumps(_to_json(value, blobs), separators=(",", ":")).encode()
    return bytearray().join((len(text).to_bytes(_SIZE_BYTES, "big"), text, *blobs))


def decode_value(content: bytes | bytearray | memoryview) -> Any:
    """Return the value that `encode_value` was given.

    Raises:
        ReallocError: for content that it did not make.
    """
    end = _SIZE_BYTES + int.from_bytes(content[:_SIZE_BYTES], "big")
    try:
        return _Decoder(memoryview(content), end).value(json.loads(bytes(content[_SIZE_BYTES:end])))
    except ReallocError:  # a value's own check
        raise
    except Exception as error:  # of any class: the content chooses which constructor is given what
        raise DataError(f"a message between ranks holds no plain data: {type(error).__name__}: {error}") from error


def _to_json(value: Any, blobs: list[Any]) -> Any:
    """Return a JSON value; every JSON object in it has one key, the tag of a kind that JSON lacks."""
    if type(value) in _SCALARS:
        return value
    if type(value) is list:
        return value if _SCALARS.issuperset(map(type, value)) else [_to_json(one, blobs) for one in value]
    if type(value) in (tuple, set, frozenset):
        return {type(value).__name__: _to_json(list(value), blobs)}
    if isinstance(value, StoredObject):
        return {"stored": [type(value).__name__, _to_json(value.state(), blobs)]}
    if isinstance(value, Mapping):
        return {"dict": [[_to_json(key, blobs), _to_json(one, blobs)] for key, one in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": _append(bytes(value), blobs)}
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        blob = plain.view(-1).view(torch.uint8).numpy() if plain.numel() else b""
        return {"tensor": [dtype_name(plain.dtype), list(plain.shape), _append(blob, blobs)]}
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        return {"array": [value.dtype.str, list(value.shape), _append(value.tobytes(), blobs)]}
    if isinstance(value, np.generic):
        return _to_json(value.item(), blobs)
    for tag, (kind, to_text, _) in _TEXTS.items():
        if isinstance(value, kind):
            return {tag: to_text(value)}
    return _own_object(value, blobs)


def _own_object(value: Any, blobs: list[Any]) -> Any:
    kind: Any = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _is_own(kind):
        if isinstance(value, Enum):
            return {"enum": [name, value.name]}
        if isinstance(value, ReallocError):
            return {"error": [name, str(value)]}
        given = list(value) if isinstance(value, tuple) else [getattr(value, one) for one in _sent_fields(kind)]
        return {"object": [name, _to_json(given, blobs)]}
    plain: type | None = next((one for one in (int, float, str, list, tuple) if isinstance(value, one)), None)
    if plain is not None:  # of a class derived from it, its value alone
        return _to_json(plain(value), blobs)
    raise DataError(
        f"ranks exchange plain data, and a {kind.__module__}.{kind.__qualname__} is none; send its numbers, texts, "
        f"lists or tensors instead"
    )


def _is_own(kind: type) -> bool:
    """Return whether a class is one of this package's kinds of values."""
    is_value = is_dataclass(kind) or issubclass(kind, ReallocError | Enum) or hasattr(kind, "_fields")
    return is_value and kind.__module__.startswith(_PACKAGE)


@lru_cache(maxsize=256)
def _sent_fields(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass that a message holds."""
    return tuple(one.name for one in fields(kind) if one.init and one.metadata.get("sent", True))


def _append(blob: Any, blobs: list[Any]) -> int:
    blobs.append(blob)
    return len(blob)


def _dtype(name: str) -> torch.dtype:
    found = dtype_named(name)
    if found is None:
        raise ValueError(f"torch.{name} is no dtype")
    return found


_TEXTS: Mapping[str, tuple[type, Callable[[Any], str], Callable[[str], object]]] = {
    "path": (PurePath, str, Path),
    "dtype": (torch.dtype, dtype_name, _dtype),
    "decimal": (Decimal, str, Decimal),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda span: f"{span.days} {span.seconds} {span.microseconds}",
        lambda text: datetime.timedelta(*map(int, text.split())),
    ),
    "uuid": (UUID, str, UUID),
}
"""Tag -> class of values that are sent as text, their text, and its inverse. A datetime is a date, too."""


class _Decoder:
    """Reads the JSON values of a message, and its blobs in the order in which they were written."""

    def __init__(self, content: memoryview, position: int) -> None:
        self._content = content
        self._position = position

    def value(self, given: Any) -> Any:
        if isinstance(given, list):
            return given if _SCALARS.issuperset(map(type, given)) else [self.value(one) for one in given]
        if not isinstance(given, dict):
            return given
        ((tag, inner),) = given.items()
        if tag == "dict":
            return {self.value(key): self.value(one) for key, one in inner}
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](self.value(inner))
        return _TEXTS[tag][2](inner) if tag in _TEXTS else self._rare(tag, inner)

    def _rare(self, tag: str, inner: Any) -> Any:
        if tag == "bytes":
            return bytes(self._blob(inner))
        if tag in ("tensor", "array"):
            dtype, shape, size = inner
            blob = bytearray(self._blob(size))
            if tag == "array":
                return np.frombuffer(blob, np.dtype(dtype)).reshape(shape)
            read = torch.frombuffer(blob, dtype=_dtype(dtype)) if size else torch.empty(0, dtype=_dtype(dtype))
            return read.reshape(shape)
        if tag == "stored":
            return StoredObject.classes[inner[0]].from_state(self.value(inner[1]))
        kind: Any = _own_class(inner[0])
        given = inner[1]
        if tag == "enum":
            return kind[given]
        if tag == "error":
            return kind(given)
        values = self.value(given)
        if issubclass(kind, tuple):
            return kind(*values)
        return kind(**dict(zip(_sent_fields(kind), values, strict=True)))

    def _blob(self, size: int) -> memoryview:
        begin, self._position = self._position, self._position + size
        return self._content[begin : self._position]


@lru_cache(maxsize=256)
def _own_class(name: str) -> type:
    """Return one of this package's classes of values by its name. Imports nothing: a rank that reads it has used it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules[module] if module.startswith(_PACKAGE) else None
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or not _is_own(found):
        raise ValueError(f"{name} is none of this package's values")
    return found
