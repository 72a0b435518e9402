"""Keep old module paths of public classes importable for one release, with a DeprecationWarning.

YAML files name classes by their path, and scripts import from the module that documentation once named.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

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
    "rewards.pooled": "rewards.workers.pooled",
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
        warnings.warn(f"{spec.name} is now {new}; the old path goes with the next release", DeprecationWarning, 2)
        module = import_module(new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing but undo what the import system changed: the module has run already."""
        module.__spec__ = self._spec


def install() -> None:
    """Make old module paths importable, once per process."""
    if not any(isinstance(finder, _MovedModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModuleFinder())
