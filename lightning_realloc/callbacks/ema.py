"""Callback that keeps exponential moving averages of trained weights, sharded like the weights.

`strategies.pool.weight_averages` updates them. Lightning's own averaging copies the whole module before it is divided,
and is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_realloc.callbacks.run_view import run_view
from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.pool.weight_averages import AveragingPolicy


class EMA(AveragingPolicy, Callback):
    """Average the weights of trained roles over iterations, and evaluate with the averages.

    ``average = decay * average + (1 - decay) * weight`` after each iteration, starting from the weights. Training, and
    generation for it, continue from the weights themselves. Averages are float32. Export them with
    ``SaveHuggingFace(averaged=True)`` or ``lightning-realloc export --averaged``.

    Args:
        decay: Fraction of the average that remains in each update.
        roles: Roles to average; by default all trained roles.
        every_n_steps: Iterations between updates.
        start_step: Iteration after which the average starts, counted from 1.
        validate: Whether to evaluate with averages, as Lightning's own averaging does: in validation during training,
            and in ``validate``, ``test`` and ``predict`` after it or from a checkpoint with averages. Meanwhile the
            weights are kept in host memory.

    Example:
        >>> from lightning_realloc import EMA
        >>> ema = EMA(decay=0.99, roles=["actor"], start_step=10)  # Trainer(strategy="realloc", callbacks=[ema])
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        roles: Sequence[str] | None = None,
        every_n_steps: int = 1,
        start_step: int = 1,
        validate: bool = True,
    ) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"decay={decay} must be at least 0, which keeps the weights themselves, and below 1")
        for name, count in (("every_n_steps", every_n_steps), ("start_step", start_step)):
            if count < 1:
                raise ConfigError(f"{name}={count} must be at least 1")
        self.decay = decay
        self.roles = None if roles is None else tuple(roles)
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.validate = validate
        self._stepped: set[str] = set()
        """Roles whose optimizers have stepped. Before the first step, an entry of ours would stop an optimizer from
        creating its own state."""
        self._replaced = ExitStack()
        """Contexts in which models hold the averages."""
        self._fitted: LightningModule | None = None
        """Module whose optimizers hold the averages; None if there is none."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ConfigError for a strategy without roles."""
        if not hasattr(trainer.strategy, "run_iteration") or not hasattr(pl_module, "dataflow"):
            raise ConfigError(
                f"EMA averages the roles of an algorithm under Trainer(strategy='realloc'); for "
                f"{type(pl_module).__name__} under {type(trainer.strategy).__name__} use Lightning's EMAWeightAveraging"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the roles are trained, and register hooks for optimizer steps."""
        trained = run_view(trainer).pool.dataflow.trained_roles
        unknown = sorted(set(self.roles or ()) - set(trained))
        if unknown:
            raise ConfigError(f"EMA(roles=...) names {', '.join(unknown)}; name trained roles: {', '.join(trained)}")
        self._stepped.clear()
        self._fitted = pl_module
        for role in self._roles(trainer):
            optimizer = run_view(trainer).averages.optimizer_of(role)
            optimizer.register_step_post_hook(lambda *_, role=role: self._stepped.add(role))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Update the averages."""
        steps = trainer.global_step - self.start_step
        if steps < 0 or steps % self.every_n_steps:
            return
        for role in self._roles(trainer):
            run_view(trainer).averages.update(role, self.decay, may_begin=role in self._stepped)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace weights by averages, except for a checkpoint, whose averages were loaded instead of its weights."""
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if not is_fitting and trainer.ckpt_path is not None:
            self._fitted = None  # the module now holds the checkpoint, to which the averages do not belong
        if self.validate and (is_fitting or pl_module is self._fitted):
            for role in self._roles(trainer):
                self._replaced.enter_context(run_view(trainer).averages.in_place_of_weights(role))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the weights."""
        self._replaced.close()

    on_test_epoch_start = on_predict_epoch_start = on_evaluation_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def on_evaluation_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        """Restore the weights."""
        self.on_validation_epoch_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the weights before a checkpoint of the failure is written."""
        self.on_validation_epoch_end(trainer, pl_module)

    def _roles(self, trainer: Trainer) -> tuple[str, ...]:
        return self.roles or run_view(trainer).pool.dataflow.trained_roles
