"""Remember the results of dry runs in a process of the pool, which lays out models of a few structures again and again.

Every fit checks each model by forwards without weights, in a tenth of the CPU time of a tiny fit. The result depends on
the classes of the modules, their code, attributes and shapes alone. So a structure is checked once in each process; a
refusal or a failure is raised again by the check itself. The tests of the checks run in pytest's own process, where
nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

from torch import nn

_PLAIN = (str, int, float, tuple, list, type(None))


def remember_dry_runs() -> None:
    """Replace both checks in this process by ones that remember which structures passed."""
    from lightning_realloc.runtime.forward.attention import packed_attention
    from lightning_realloc.runtime.parallel import model_spec

    packed_attention._check_segments = _remembered(packed_attention._check_segments)
    model_spec.find_mixed_features = _remembered(model_spec.find_mixed_features)


def remember_entry_points() -> None:
    """Let Lightning look for callbacks of installed packages once, instead of for every Trainer."""
    from lightning.fabric.utilities import registry

    registry.entry_points = cache(registry.entry_points)  # type: ignore[attr-defined]


def _remembered(check: Callable[..., Any]) -> Callable[..., Any]:
    passed: set[Hashable] = set()

    def remembered(model: nn.Module, *others: Any) -> Any:
        key = (structure(model), repr(others))
        if key in passed:
            return None
        found = check(model, *others)
        if found is None:
            passed.add(key)
        return found

    return remembered


def structure(model: nn.Module) -> Hashable:
    """Return all that a forward without weights depends on: code, plain attributes, shapes and configuration."""
    config = getattr(model, "config", None)
    return repr(config if config is None else sorted(vars(config).items())), *(
        (
            name,
            type(module),
            getattr(module.forward, "__func__", module.forward),
            repr([(key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN)]),
            tuple((key, weight.shape) for key, weight in module.named_parameters(recurse=False)),
        )
        for name, module in model.named_modules()
    )
