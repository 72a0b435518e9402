"""Starting one process per device."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher


class FullStateLauncher(_MultiProcessingLauncher):
    """Lightning's spawn and fork launcher, for sharded models.

    The stock one sends rank 0's ``state_dict()`` to the main process, which has no process group and cannot rebuild a
    DTensor. This one sends full tensors; every rank takes part in gathering them.
    """

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        module = trainer.lightning_module
        full = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        module.state_dict = lambda *args, **kwargs: full  # type: ignore[method-assign]
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.state_dict


__all__ = ["FullStateLauncher"]
