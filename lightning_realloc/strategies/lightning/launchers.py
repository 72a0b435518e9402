"""Start one process per device from a notebook or a test, and return the trained weights from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.lightning.signals import INTERRUPT_EXIT_CODE, signals_forwarded

StartMethod = Literal["popen", "spawn", "fork"]
"""How the process of a device starts: by the script, by the function in a new process, or in a forked one."""


def checked_start_method(name: str) -> StartMethod:
    """Return the name; raise ConfigError for an unknown one."""
    if name not in (known := get_args(StartMethod)):
        raise ConfigError(f"start_method={name!r} must be one of {', '.join(known)}")
    return cast(StartMethod, name)


class FullStateLauncher(_MultiProcessingLauncher):
    """Lightning's spawn and fork launcher, for sharded models.

    Lightning's own launcher sends rank 0's ``state_dict()`` to the main process, which has no process group and cannot
    rebuild a DTensor. This one sends full tensors, which all ranks gather.
    """

    def launch(
        self, function: Callable[..., Any], *args: object, trainer: Trainer | None = None, **kwargs: object
    ) -> Any:
        """Start the processes and wait for them. Forward SIGTERM and Ctrl-C to them; they decide when to end.

        Raises:
            SIGTERMException: if the processes ended because of a signal, with their exit code.
        """
        with signals_forwarded(self):
            try:
                return super().launch(function, *args, trainer=trainer, **kwargs)
            except ProcessExitedException as error:
                if error.exit_code <= 128:
                    raise
                if trainer is not None:  # callbacks have already run in the processes that hold the models
                    trainer.callbacks = []  # type: ignore[attr-defined]
                raise SIGTERMException(error.exit_code) from None

    def _wrapping_function(self, process_idx: int, trainer: Trainer | None, *args: Any, **kwargs: Any) -> None:
        """Run in a started process. Lightning calls callbacks' ``on_exception`` only in the main process."""
        try:
            super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except SIGTERMException as error:
            if trainer is not None:
                _interrupt(trainer, error)
            raise
        except KeyboardInterrupt:  # torch would end the process without an error, and its parent would wait for results
            raise SIGTERMException(INTERRUPT_EXIT_CODE) from None

    def _collect_rank_zero_results(self, trainer: Trainer, results: object) -> Any:
        module = trainer.lightning_module
        fitted = trainer.state.fn == TrainerFn.FITTING
        full = trainer.strategy.full_state_dict() if fitted else {}  # type: ignore[attr-defined]
        module.state_dict = lambda *args, **kwargs: full  # type: ignore[assignment, method-assign]
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.state_dict

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        # Models were built only in the started processes. Without models here, loading would silently drop the weights.
        if worker_output.weights_path is not None:
            trainer.lightning_module.configure_model()
        super()._recover_results_in_main_process(worker_output, trainer)


__all__ = ["FullStateLauncher"]
