"""Read and call a Trainer's callbacks, and read the iterations that it plans."""

from __future__ import annotations

from collections.abc import Collection

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.profilers import Profiler


def trainer_callbacks(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's own list of callbacks, which Lightning sets without declaring it."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def planned_iterations(trainer: Trainer) -> int | None:
    """Return the number of iterations of a whole run, by its steps and epochs; None if the Trainer sets no end."""
    steps = [trainer.max_steps] if trainer.max_steps >= 0 else []
    epochs, batches = trainer.max_epochs, trainer.num_training_batches
    if epochs is not None and epochs >= 0 and batches != float("inf"):
        steps.append(int(epochs * batches))
    return min(steps, default=None)


def is_last_iteration(trainer: Trainer) -> bool:
    """Return whether the run ends with this iteration, as far as its limits tell; for ``on_train_batch_end``."""
    if trainer.should_stop or trainer.global_step == trainer.max_steps:
        return True
    return trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs


def forget_metrics(trainer: Trainer, latest: Collection[str], groups: Collection[str]) -> None:
    """Forget the values of a step's metrics ``group/...`` that are not among the ``latest`` names.

    Lightning keeps one value of a name, and repeats it in later steps of the epoch that log none.
    """
    logged = trainer._results
    for kept in logged.values() if logged is not None else ():
        name = kept.meta.name
        if name.partition("/")[0] in groups and not kept.meta.on_epoch and name not in latest:
            kept.reset()


def dispatch(trainer: Trainer, hook: str, *args: object) -> None:
    """Call ``hook(trainer, module, *args)`` on every callback that has it, then ``hook(*args)`` on the module.

    Lightning's dispatcher cannot be used. It requires every callback to define a hook, and it renames the running hook,
    which would forbid ``self.log``. This dispatcher calls only objects that define the hook, and keeps the name.
    """
    module = trainer.lightning_module
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    for callback in trainer_callbacks(trainer):
        method = getattr(callback, hook, None)
        if callable(method):
            with profiler.profile(f"[Callback]{callback.state_key}.{hook}"):
                method(trainer, module, *args)
    method = getattr(module, hook, None)
    if callable(method):
        with profiler.profile(f"[LightningModule]{type(module).__name__}.{hook}"):
            method(*args)
