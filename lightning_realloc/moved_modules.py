"""Keep old paths of public classes and functions importable for one release, with a DeprecationWarning.

YAML files name classes by their path, and scripts import from the module that documentation once named.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "algorithms.accuracy": "algorithms.base.accuracy",
    "algorithms.calls": "algorithms.base.calls",
    "algorithms.correction": "algorithms.losses.correction",
    "algorithms.dynamic_sampling": "algorithms.rollout.dynamic_sampling",
    "algorithms.functional": "algorithms.losses.functional",
    "algorithms.module": "algorithms.base.module",
    "algorithms.optimizers": "algorithms.base.optimizers",
    "algorithms.policy": "algorithms.rollout.policy",
    "algorithms.policy_gradient": "algorithms.rollout.policy_gradient",
    "algorithms.policy_losses": "algorithms.losses.policy_losses",
    "algorithms.preference_losses": "algorithms.losses.preference_losses",
    "algorithms.role": "algorithms.base.role",
    "algorithms.unjudged": "algorithms.base.missing_rewards",
    "data.sft": "data.demonstrations",
    "generation.budget": "generation.schedule.budget",
    "generation.conversation": "generation.loop.environment",
    "generation.drafting": "generation.speculative.lookup",
    "generation.run": "generation.loop.run",
    "generation.samples": "generation.core.sample",
    "generation.sampling": "generation.core.sampling",
    "generation.speculation": "generation.speculative.config",
    "generation.verification": "generation.speculative.verify",
    "generation.speculative.drafting": "generation.speculative.lookup",
    "rewards.failures": "rewards.failure_rule",
    "rewards.pooled": "rewards.workers.pooled",
    "runtime.executor": "runtime.transfer.executor",
    "runtime.packed_forward": "runtime.parallel.packed_forward",
    "runtime.samples": "batch.samples",
    "runtime.training": "batch.training",
    "tuning.dataflow": "dataflow.dataflow",
    "tuning.execution_plan": "dataflow.execution_plan",
    "tuning.known_models": "tuning.shapes.known_models",
    "tuning.memory_parts": "tuning.memory.parts",
    "tuning.roofline": "tuning.estimate.roofline",
    "tuning.simulator": "tuning.timeline.simulator",
}
"""Module path before -> now, both below ``lightning_realloc``."""

MOVED_NAMES = {
    "algorithms.base.missing_rewards.judged_only": "algorithms.base.missing_rewards.drop_unscored",
    "algorithms.base.missing_rewards.of_judged": "algorithms.base.missing_rewards.estimate_scored",
    "algorithms.rollout.sample_responses": "algorithms.base.rollout_columns.sample_responses",
    "tuning.search.SearchResult": "tuning.search.plan_search.SearchResult",
    "tuning.search.search_plan": "tuning.search.plan_search.search_plan",
}
"""Path of a class or function before -> now, where the module it was in still exists."""

_PACKAGE = __name__.rpartition(".")[0]


class _MovedModuleFinder(MetaPathFinder, Loader):
    """Resolves an old module path to the module that took its place: the same object, not a copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for old paths, None for all others."""
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == _PACKAGE and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module at its new path and warn about the old one."""
        new = f"{_PACKAGE}.{MOVED[spec.name.partition('.')[2]]}"
        _warn_moved(spec.name, new)
        module = import_module(new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing but undo what the import system changed: the module has run already."""
        module.__spec__ = self._spec


def moved_names(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module whose old names are in `MOVED_NAMES`."""

    def find(name: str) -> Any:
        new = MOVED_NAMES.get(f"{module.partition('.')[2]}.{name}")
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn_moved(f"{module}.{name}", f"{_PACKAGE}.{new}")
        home, _, new_name = new.rpartition(".")
        return getattr(import_module(f"{_PACKAGE}.{home}"), new_name)

    return find


def _warn_moved(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old path goes with the next release", DeprecationWarning, 3)


def install() -> None:
    """Make old module paths importable, once per process."""
    if not any(isinstance(finder, _MovedModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModuleFinder())
