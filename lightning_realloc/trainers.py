"""Read a Trainer's callbacks, and the iterations that it plans."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer


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
