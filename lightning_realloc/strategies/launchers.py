"""Starting one process per device from a notebook or a test, and getting the weights back from them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn


class FullStateLauncher(_MultiProcessingLauncher):
    """Lightning's spawn and fork launcher, for sharded models.

    The stock one sends rank 0's ``state_dict()`` to the main process, which has no process group and cannot rebuild a
    DTensor. This one sends full tensors; every rank takes part in gathering them.
    """

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        module = trainer.lightning_module
        fitted = trainer.state.fn == TrainerFn.FITTING
        full = trainer.strategy.full_state_dict() if fitted else {}  # type: ignore[attr-defined]
        module.state_dict = lambda *args, **kwargs: full  # type: ignore[assignment, method-assign]
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.state_dict

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        # Models are built in the processes that were started; here they are still missing, and weights that find no
        # parameter would be dropped silently.
        if worker_output.weights_path is not None:
            trainer.lightning_module.configure_model()
        super()._recover_results_in_main_process(worker_output, trainer)


__all__ = ["FullStateLauncher"]
