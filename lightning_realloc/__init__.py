"""Parameter reallocation for training several models at once in PyTorch Lightning.

Importing this package registers ``strategy="realloc"``. It imports neither torch nor Lightning: the public names below
are imported from their modules on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_realloc_autoload import install as _register_strategies

if TYPE_CHECKING:
    from lightning_realloc.errors import ReallocError as ReallocError
    from lightning_realloc.layout import ClusterSpec as ClusterSpec
    from lightning_realloc.layout import Layout as Layout
    from lightning_realloc.layout import ParallelDims as ParallelDims

__version__ = "0.1.0"

# Public name -> the module it lives in; the imports above say the same to type checkers.
_HOMES = {
    "ReallocError": "lightning_realloc.errors",
    "ClusterSpec": "lightning_realloc.layout",
    "Layout": "lightning_realloc.layout",
    "ParallelDims": "lightning_realloc.layout",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


_register_strategies()
