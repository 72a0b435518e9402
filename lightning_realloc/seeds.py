"""Which seed does a run go by where its user gave none? That of Lightning's ``seed_everything``, and 0 without one."""

from __future__ import annotations

import os
from typing import Any

_VARIABLE = "PL_GLOBAL_SEED"
"""Where Lightning's ``seed_everything`` keeps it, for the processes that it starts, too."""


def global_seed() -> int:
    """Return the seed of this process's last ``seed_everything``; 0 where it was not called."""
    return int(os.environ.get(_VARIABLE, "0"))


def seed_of_run(trainer: Any) -> int:
    """Return the seed that all ranks of a run share, whatever each of them gave ``seed_everything``.

    Args:
        trainer: That of the run; None before there is one.
    """
    shared = getattr(getattr(trainer, "strategy", None), "run_seed", None)
    return global_seed() if shared is None else int(shared)
