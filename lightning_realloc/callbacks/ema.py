"""Exponential moving average of trained weights, sharded like the weights.

The average lies in the optimizer's state of each parameter. It is divided, moved by plan changes, offloaded, saved and
resumed with that state. Lightning's own averaging copies the whole module before it is divided, and is rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_realloc.callbacks.phase import realloc_strategy
from lightning_realloc.dataflow.execution_plan import OPTIMIZER_SUFFIX
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.parallel.shards import local_tensor, reshard

AVERAGE = "ema"
"""Key of the average in an optimizer's state of a parameter."""


class EMA(Callback):
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
        self._stored_weights: dict[str, _ReplacedWeights] = {}
        """Role -> weights stored while its models hold the averages."""
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
        trained = realloc_strategy(trainer).pool.dataflow.trained_roles
        unknown = sorted(set(self.roles or ()) - set(trained))
        if unknown:
            raise ConfigError(f"EMA(roles=...) names {', '.join(unknown)}; name trained roles: {', '.join(trained)}")
        self._stepped.clear()
        self._fitted = pl_module
        for role in self._roles(trainer):
            optimizer = realloc_strategy(trainer).optimizer_of(role)
            optimizer.register_step_post_hook(lambda *_, role=role: self._stepped.add(role))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Update the averages."""
        steps = trainer.global_step - self.start_step
        if steps < 0 or steps % self.every_n_steps:
            return
        strategy: Any = trainer.strategy
        strategy.bring_back()
        for role in self._roles(trainer):
            home, optimizer = strategy.pool.home(role), strategy.optimizer_of(role)
            if strategy.global_rank in home.layout:
                reshard(home.model)
                update_averages(optimizer, self.decay, may_begin=role in self._stepped)
            if {role, role + OPTIMIZER_SUFFIX} & set(strategy.plan.offload):
                strategy.pool.weights_trained(role)  # the offloaded copy is outdated

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace weights by averages, except for a checkpoint, whose averages were loaded instead of its weights."""
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if not is_fitting and trainer.ckpt_path is not None:
            self._fitted = None  # the module now holds the checkpoint, to which the averages do not belong
        if self.validate and (is_fitting or pl_module is self._fitted):
            for role in self._roles(trainer):
                self._stored_weights[role] = _ReplacedWeights.replace_by_average(trainer.strategy, role)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the weights."""
        for role in tuple(self._stored_weights):
            self._stored_weights.pop(role).restore()

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the weights before a checkpoint of the failure is written."""
        self.on_validation_epoch_end(trainer, pl_module)

    def _roles(self, trainer: Trainer) -> tuple[str, ...]:
        return self.roles or realloc_strategy(trainer).pool.dataflow.trained_roles


@contextmanager
def averaged_weights(strategy: Any, role: str) -> Iterator[None]:
    """Context manager in which a role's model holds the averages. Collective over all ranks.

    Raises:
        ConfigError: on every rank, if there are no averages.
    """
    weights = _ReplacedWeights.replace_by_average(strategy, role)
    try:
        if not strategy.reduce_boolean_decision(bool(weights.kept), all=False):
            raise ConfigError(
                f"there is no average of {role}'s weights to write; add the callback EMA(), and train for an iteration "
                f"before the first folder is written"
            )
        yield
    finally:
        weights.restore()


def update_averages(optimizer: torch.optim.Optimizer, decay: float, *, may_begin: bool) -> None:
    """Update the averages; if there are none and ``may_begin``, start them from the weights.

    Weights that never had a gradient have no optimizer state, and are skipped if the optimizer keeps state for others.
    """
    keeps_state = any(set(state) - {AVERAGE} for state in optimizer.state.values())
    for parameter in _parameters(optimizer):
        known = optimizer.state.get(parameter, {})
        if AVERAGE in known:
            local_tensor(known[AVERAGE]).lerp_(local_tensor(parameter).float(), 1.0 - decay)
        elif may_begin and (known or not keeps_state):
            optimizer.state[parameter][AVERAGE] = parameter.detach().to(torch.float32, copy=True)


def evaluated_averages(callbacks: Iterable[object], trained_roles: Iterable[str]) -> frozenset[str]:
    """Return the roles whose averages are evaluated from a checkpoint."""
    emas = [callback for callback in callbacks if isinstance(callback, EMA) and callback.validate]
    return frozenset(role for ema in emas for role in ema.roles or trained_roles)


def refuse_weight_averaging(callbacks: Iterable[object], algorithm: str) -> None:
    """Raise ConfigError for Lightning callbacks that average copies of whole modules."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ConfigError(
                f"{type(callback).__name__} copies {algorithm} before its models are divided over ranks, and its copy "
                f"cannot follow them; use lightning_realloc.EMA(decay=...)"
            )


class _ReplacedWeights:
    """Weights of a role, stored while its models hold the averages."""

    def __init__(self, strategy: Any, role: str) -> None:
        self._strategy = strategy
        self._role = role
        self.kept: list[tuple[nn.Parameter, Tensor]] = []

    @classmethod
    def replace_by_average(cls, strategy: Any, role: str) -> _ReplacedWeights:
        """Overwrite the weights by the averages that exist."""
        weights = cls(strategy, role)
        strategy.bring_back()
        home = strategy.pool.home(role)
        reshard(home.model)
        if strategy.global_rank in home.layout:
            optimizer = strategy.optimizer_of(role)
            for parameter in _parameters(optimizer):
                average = optimizer.state.get(parameter, {}).get(AVERAGE)
                if average is not None:
                    there = local_tensor(parameter)
                    weights.kept.append((parameter, there.to("cpu", copy=True)))
                    there.copy_(local_tensor(average))
        strategy.pool.weights_replaced(role)
        return weights

    def restore(self) -> None:
        """Write the stored weights back."""
        self._strategy.bring_back()
        reshard(self._strategy.pool.home(self._role).model)
        for parameter, before in self.kept:
            local_tensor(parameter).copy_(before)
        self._strategy.pool.weights_replaced(self._role)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
