"""Optimizer of each trained role: learning rate, schedule, and the weights that decay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import DeclaredCalls
from lightning_realloc.algorithms.settings import check_not_negative, check_positive
from lightning_realloc.errors import ConfigError, ReallocError, require_choice

log = logging.getLogger(__name__)
NoDecay = Literal["norms", "biases", "embeddings"]
"""Weights without decay: gains of norms and other vectors that are not biases; biases; embedding tables and heads tied
to them."""
_NO_DECAY: tuple[NoDecay, ...] = ("norms", "biases")
Parameters = list[nn.Parameter] | list[dict[str, Any]]
"""Argument of an optimizer: parameters, or groups of them with their own settings."""
_ADAPTERS_LEARN_FASTER = 10.0
"""Best learning rate of adapters over that of whole weights. Source: Schulman et al., "LoRA without regret", 2025."""
GROUP_SEPARATOR = "/"
"""Separator of role and number in the names of an optimizer's further groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOptimizer:
    """Optimizer settings of a trained role. Fields that are None follow the algorithm's settings.

    Args:
        learning_rate: Learning rate of all its weights; also overrides the rate of ``optimizer``.
        optimizer: Class or function that makes an optimizer from parameters or groups of them.
        lr_scheduler: Function that makes a learning-rate schedule from an optimizer; it steps once per iteration.
        weight_decay: Weight decay of all weights except ``no_decay``; None leaves it to the optimizer.
        no_decay: Weights without decay, next to a ``weight_decay``; None: norms and biases.
    """

    learning_rate: float | None = None
    optimizer: OptimizerCallable | None = None
    lr_scheduler: LRSchedulerCallable | None = None
    weight_decay: float | None = None
    no_decay: tuple[NoDecay, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay"):
            if (value := getattr(self, name)) is not None:
                check_not_negative(**{name: value})
        for kind in self.no_decay or ():
            require_choice("no_decay", kind, get_args(NoDecay))
        examples = {"optimizer": "partial(AdamW, lr=1e-5)", "lr_scheduler": "partial(StepLR, step_size=9)"}
        for name, example in examples.items():
            if (value := getattr(self, name)) is not None and not callable(value):
                raise ConfigError(
                    f"{name} is a {type(value).__name__}, and every role makes one of its own; give a function or "
                    f"class, such as {example}"
                )

    def over(self, others: RoleOptimizer) -> RoleOptimizer:
        """Return these settings, with the values of ``others`` for fields that are None.

        An optimizer brings its own learning rate, so it does not take the rate of ``others``.
        """
        brings_rate = self.learning_rate is not None or self.optimizer is not None
        return RoleOptimizer(
            learning_rate=self.learning_rate if brings_rate else others.learning_rate,
            optimizer=self.optimizer or others.optimizer,
            lr_scheduler=self.lr_scheduler or others.lr_scheduler,
            weight_decay=others.weight_decay if self.weight_decay is None else self.weight_decay,
            no_decay=others.no_decay if self.no_decay is None else self.no_decay,
        )

    def make(self, parameters: Parameters) -> torch.optim.Optimizer:
        """Return the optimizer; without a given one, fused AdamW without weight decay."""
        if self.optimizer is None:
            assert self.learning_rate is not None, "an algorithm has one for its default optimizer"
            return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=0.0, fused=True)
        optimizer = self.optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer= made a {type(optimizer).__name__}; give a function that returns an optimizer alone, and "
                f"its schedule as lr_scheduler="
            )
        if self.learning_rate is not None:
            optimizer.defaults["lr"] = self.learning_rate
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
        return optimizer

    def parameters(self, model: nn.Module) -> Parameters:
        """Return the trained parameters of a model, in two groups if some decay; the same on every rank."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.weight_decay is None:
            return trained
        kinds = _NO_DECAY if self.no_decay is None else self.no_decay
        spared = {id(parameter) for parameter in parameters_of(model, kinds)}
        return [
            {"params": [p for p in trained if id(p) not in spared], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if id(p) in spared], "weight_decay": 0.0},
        ]

    def configure(self, optimizer: torch.optim.Optimizer, role: str) -> dict[str, Any]:
        """Return the entry of a role in ``configure_optimizers``: optimizer, names of groups, schedule.

        Raises:
            ConfigError: for weight decay with an optimizer that does not support it.
        """
        if self.weight_decay is not None:
            if "weight_decay" not in optimizer.defaults:
                raise ConfigError(
                    f"weight_decay={self.weight_decay} of {role} is for an optimizer that knows it; "
                    f"{type(optimizer).__name__} does not: leave it out, or choose another optimizer"
                )
            optimizer.defaults["weight_decay"] = self.weight_decay
        for number, group in enumerate(optimizer.param_groups):
            group["name"] = role if number == 0 else f"{role}{GROUP_SEPARATOR}{number}"
        entry: dict[str, Any] = {"optimizer": optimizer}
        if self.lr_scheduler is not None:
            schedule = self.lr_scheduler(optimizer)
            if isinstance(schedule, Mapping):
                raise ConfigError(
                    f"lr_scheduler= made a dictionary of {', '.join(map(str, schedule))}; give a function that returns "
                    f"the schedule alone, which steps once per iteration, or override configure_optimizers()"
                )
            # LearningRateMonitor appends the group's name: lr/actor, and lr/actor/1 without decay.
            entry["lr_scheduler"] = {"scheduler": schedule, "interval": "step", "name": "lr"}
        return entry


class OptimizedRoles(DeclaredCalls):
    """Part of an algorithm's module that makes the optimizers of its trained roles."""

    learning_rate: float | None
    optimizer_settings: RoleOptimizer
    """Settings of all roles."""
    role_optimizers: dict[str, RoleOptimizer]
    """Trained role -> settings that differ for it."""
    default_learning_rate: float = 1e-6
    """Learning rate for whole weights, if none is given."""

    def optimizer_of(self, role: str) -> RoleOptimizer:
        """Return the optimizer settings of a trained role."""
        default = RoleOptimizer(learning_rate=self._learning_rate_of(role))
        return chosen_for(role, self.role_optimizers, self.optimizer_settings.over(default))

    def _learning_rate_of(self, role: str) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        adapted = any(known.name == role and known.has_adapters for known in self.roles())
        return self.default_learning_rate * (_ADAPTERS_LEARN_FASTER if adapted else 1.0)

    def new_optimizer(self, role: str, parameters: Parameters) -> torch.optim.Optimizer:
        """Return a new optimizer for the parameters, or parameter groups, of a trained role.

        Raises:
            ConfigError: if it cannot be made of them.
        """
        settings = self.optimizer_of(role)
        try:
            return settings.make(parameters)
        except ReallocError:
            raise
        except Exception as error:  # of any class: optimizers check their arguments themselves
            raise ConfigError(
                f"{role}: its optimizer cannot be made ({type(error).__name__}: {error}); give optimizer= a class or "
                f"function that makes one from all parameters of {role}, such as partial(AdamW, lr=1e-6)"
            ) from error

    def configure_optimizers(self) -> Any:
        """Return one optimizer per trained role; its first parameter group has the name of the role."""
        made = []
        for role in self.dataflow.trained_roles:
            settings = self.optimizer_of(role)
            made.append(settings.configure(self.new_optimizer(role, settings.parameters(getattr(self, role))), role))
        return made if made else None

    @property
    def optimizer_bytes(self) -> int:
        """Largest optimizer state in bytes per fp32 weight, measured on a small weight; 0 if unknown."""
        written_by_hand = type(self).configure_optimizers is not OptimizedRoles.configure_optimizers
        if written_by_hand or not self.dataflow.trained_roles:
            return 0
        return max(state_bytes(partial(self.new_optimizer, role)) for role in self.dataflow.trained_roles)


def check_learning_rate(learning_rate: float | None, optimizer: OptimizerCallable | None) -> None:
    """Raise ConfigError for a learning rate next to an optimizer, which has its own."""
    if learning_rate is None or optimizer is None:
        return
    parts = (optimizer, getattr(optimizer, "func", optimizer), *getattr(optimizer, "args", ()))  # of a partial
    name = next((part.__name__ for part in parts if isinstance(part, type)), repr(optimizer))
    raise ConfigError(
        f"learning_rate={learning_rate} is for the default AdamW, and optimizer={name} has a learning rate of its own; "
        f"leave learning_rate out, and set lr={learning_rate} in the optimizer: partial({name}, lr=...), or its "
        f"init_args in YAML"
    )


def chosen_for(role: str, given: Mapping[str, RoleOptimizer], default: RoleOptimizer) -> RoleOptimizer:
    """Return the optimizer settings of a role: its own, with the default for fields that are None.

    Raises:
        ConfigError: for ``no_decay`` without weight decay.
    """
    chosen = given.get(role, RoleOptimizer()).over(default)
    if chosen.no_decay is not None and chosen.weight_decay is None:
        raise ConfigError(
            f"no_decay={chosen.no_decay} of {role} spares weights where none decay; give weight_decay, too"
        )
    return chosen


def with_learning_rate(
    given: Mapping[str, RoleOptimizer] | None, role: str, learning_rate: float | None
) -> dict[str, RoleOptimizer]:
    """Return the settings of all roles, with a learning rate for one of them; None changes nothing.

    Raises:
        ConfigError: if the role already has a learning rate.
    """
    settings = dict(given or {})
    check_positive(**{f"{role}_learning_rate": learning_rate})
    if learning_rate is None:
        return settings
    own = settings.get(role, RoleOptimizer())
    if own.learning_rate is not None:
        raise ConfigError(
            f"{role}_learning_rate={learning_rate} and optimizers[{role!r}].learning_rate={own.learning_rate} say the "
            f"same; leave one of them out"
        )
    return settings | {role: replace(own, learning_rate=learning_rate)}


def state_bytes(make: Callable[[Parameters], torch.optim.Optimizer]) -> int:
    """Return the bytes of optimizer state per fp32 weight, measured by a step on a small one.

    0 for an optimizer that cannot take this step. The strategy refuses one that needs a closure or sparse gradients.
    """
    weight = nn.Parameter(torch.zeros(16, 16))
    weight.grad = torch.zeros_like(weight)
    optimizer = make([weight])
    try:
        optimizer.step()
    except Exception as error:  # of any class: it may need a closure, or kernels of a device
        log.debug("a step of %s to measure its state failed: %s", type(optimizer).__name__, error)
        return 0
    kept = (value for value in optimizer.state[weight].values() if isinstance(value, Tensor) and value.dim())
    return sum(value.nbytes for value in kept) // weight.numel()


def parameters_of(model: nn.Module, kinds: Collection[NoDecay]) -> list[nn.Parameter]:
    """Return the parameters of some kinds. A parameter with several names has the kinds of all of them."""
    return [
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if _kind_of(module, name, parameter) in kinds
    ]


def _kind_of(module: nn.Module, name: str, parameter: nn.Parameter) -> NoDecay | None:
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if name.endswith("bias"):  # biases of experts have two dimensions
        return "biases"
    return "norms" if parameter.dim() == 1 else None
