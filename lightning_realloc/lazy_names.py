"""Public names of a package that are imported from their modules on first use, as PEP 562 allows.

The package lists them once: as imports for type checkers, in its block ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.abc import InspectLoader


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
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(public_names(package)[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return import_name, lambda: sorted({*vars(sys.modules[package]), *public_names(package)})
