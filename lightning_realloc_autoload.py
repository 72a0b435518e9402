"""Register ``Trainer(strategy="realloc")`` on ``import torch``, before anything imports ``lightning_realloc``.

Lightning has no entry point for strategies, but ``import torch`` calls the entry points of the group
``torch.backends``. This one installs an import hook, which registers our factories once Lightning's strategies are
imported. It imports neither torch, Lightning nor ``lightning_realloc``. No exception reaches ``import torch``, where it
would break every program of the environment. ``LIGHTNING_REALLOC_AUTOLOAD=0`` disables it;
``import lightning_realloc`` installs the same hook.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STRATEGIES: Mapping[str, Mapping[str, str]] = {
    "realloc": {},
    "realloc_spawn": {"launcher": "spawn"},
    "realloc_fork": {"launcher": "fork"},
    "realloc_ray": {"launcher": "ray"},
    "realloc-static": {"plan": "static"},
}
"""Registered name -> arguments of ``ReallocStrategy``."""

_SWITCH = "LIGHTNING_REALLOC_AUTOLOAD"


def install() -> None:
    """Register the strategies with Lightning, now if it is imported already, else on its import."""
    if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())
    for name in _REGISTRIES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "StrategyRegistry"):  # absent while Lightning is half imported
            _register(module)


def _autoload() -> None:
    """Entry point of the group ``torch.backends``."""
    if os.environ.get(_SWITCH, "1").strip().lower() in {"0", "false", "off", "no"}:
        return
    with contextlib.suppress(Exception):  # torch must import whatever goes wrong here
        install()


def _build_strategy(**options: Any) -> Any:
    return importlib.import_module("lightning_realloc.strategies").ReallocStrategy(**options)


def _refuse_strategy(**_: Any) -> Any:
    raise importlib.import_module("lightning_realloc.errors").ConfigError(
        'strategy="realloc" belongs to lightning.pytorch, but this Trainer comes from pytorch_lightning, whose '
        "strategies are other classes; write `import lightning as L` and use L.Trainer and L.LightningModule throughout"
    )


_REGISTRIES: Mapping[str, Callable[..., Any]] = {
    "lightning.pytorch.strategies": _build_strategy,
    "pytorch_lightning.strategies": _refuse_strategy,
}


def _register(module: ModuleType) -> None:
    """Register our names with a newly imported ``...strategies`` module; never break that import."""
    try:
        for name, options in STRATEGIES.items():
            description = "gives every model function call its own parallel layout"
            module.StrategyRegistry.register(
                name, _REGISTRIES[module.__name__], description=description, override=True, **options
            )
    except Exception as error:
        warnings.warn(f"strategy='realloc' could not be registered with {module.__name__}: {error!r}", stacklevel=2)


class _RegistryFinder(MetaPathFinder):
    """Find strategies modules with the other finders, and register our names after the module's code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _register_after(spec.loader)
                return spec
        return None


def _register_after(loader: Loader) -> None:
    """Make the loader of a strategies module register our names after it has executed that module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # removes this instance attribute, which hides the class's own method
        execute(module)
        _register(module)

    with contextlib.suppress(AttributeError):  # a loader with __slots__: leave Lightning's import intact
        loader.exec_module = exec_module  # type: ignore[method-assign]
