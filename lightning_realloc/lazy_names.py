"""Public names of a package that are imported from their modules on first use, as PEP 562 allows.

The package lists them once: as imports for type checkers, in its block ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.abc import InspectLoader
from types import FrameType

FORMER_NAMES: Mapping[str, str] = {
    "EngineCorrection": "lightning_realloc.Correction",
    "KLOptions": "lightning_realloc.KL",
    "OverlongPenalty": "lightning_realloc.rewards.OverlongPenalty",
    "PolicyLossOptions": "lightning_realloc.Clip",
    "SampleTable": "lightning_realloc.RolloutTable",
}
"""Names that a package once had -> where they are now."""


@cache
def public_names(package: str) -> Mapping[str, str]:
    """Return the names that an imported package lists for type checkers -> their modules."""
    import ast  # not while the command line answers --help

    spec = sys.modules[package].__spec__
    assert spec is not None and isinstance(spec.loader, InspectLoader), "it was imported from a file"
    source = spec.loader.get_source(package)
    assert source is not None, "it is installed with its source"
    blocks = (node.body for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package; the first one also knows its ``__all__``."""

    def import_name(name: str) -> object:
        if name == "__all__":
            return list(public_names(package))
        if name.startswith("__") or name not in public_names(package):
            raise _missing(package, name, sys._getframe(1))
        value = getattr(import_module(public_names(package)[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return import_name, lambda: sorted({*vars(sys.modules[package]), *public_names(package)})


def _missing(package: str, name: str, caller: FrameType) -> AttributeError | ImportError:
    """Return the error for a name that a package does not have, asked for by the code of a frame."""
    text = f"module {package!r} has no attribute {name!r}"
    if name in FORMER_NAMES:
        from dis import opname  # only for an error message

        text += f" any more: it is {FORMER_NAMES[name]}"
        # An import replaces the text of an AttributeError by its own; hasattr() accepts no other error.
        if opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM":
            return ImportError(text, name=package)
    return AttributeError(text)
