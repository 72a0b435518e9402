"""Refuse arguments of `GenerationEngine` that another engine does not support."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.engine import GenerationEngine


def refuse_native(engine: object, method: str, given: Mapping[str, object]) -> None:
    """Raise for arguments that only the native engine supports, unless they have a neutral value.

    Raises:
        GenerationError: for such an argument.
        TypeError: for an argument that neither engine has.
    """
    kind = type(engine).__name__
    known = inspect.signature(getattr(GenerationEngine, method)).parameters
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{kind}.{method}() got an unexpected keyword argument {name!r}")
        if value not in (known[name].default, []):
            raise GenerationError(
                f"{kind} has no {name}, which only the native engine supports; use GenerationEngine (engine='native' "
                f"in an algorithm), or leave {name} out"
            )
