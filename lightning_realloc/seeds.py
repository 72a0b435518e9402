"""Seed of a run: the one given to Lightning's ``seed_everything``, or 0 without one."""

from __future__ import annotations

import os
from typing import Any

_VARIABLE = "PL_GLOBAL_SEED"
"""Environment variable in which ``seed_everything`` stores the seed, also for processes that Lightning starts."""


def global_seed() -> int:
    """Return the seed of this process's last ``seed_everything``; 0 if it was not called."""
    return int(os.environ.get(_VARIABLE, "0"))


def seed_of_run(trainer: Any) -> int:
    """Return the seed that all ranks of a run share, even if they gave ``seed_everything`` different seeds.

    Args:
        trainer: Trainer of the run; None if there is none yet.
    """
    shared = getattr(getattr(trainer, "strategy", None), "run_seed", None)
    return global_seed() if shared is None else int(shared)
