"""Refuse optimizers that cannot run here, before the first step: on parts of weights, without a closure, densely.

Ranks of a layout hold parts of every weight, and step on them alone. An optimizer whose update of an element depends on
others, as by a norm or a matrix product, would step differently in every layout. No list of names is complete: one that
is not among torch's elementwise ones takes two steps on small tensors, whole and cut.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, optim

from lightning_realloc.errors import ConfigError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.strategies.checkpoints.optimizer_settings import given_settings

_NAMES = "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"
_ELEMENTWISE = tuple(getattr(optim, name) for name in _NAMES)
_TOLERANCE = 1e-3
"""Largest difference of two updates, as a share of the largest update, that counts as rounding."""


def check_optimizers(
    optimizers: Mapping[str, optim.Optimizer],
    layouts: Mapping[str, ModelLayout],
    names: Mapping[str, Mapping[int, str]] | None = None,
) -> None:
    """Check the optimizers of roles before their first step.

    Args:
        layouts: Role -> its parameters in the layout that it is trained in.
        names: Role -> name of each parameter by its `id`, so that a group is checked for the cuts of its own
            parameters; None: for those of all.

    Raises:
        ConfigError: for an optimizer that needs a closure or sparse gradients, and for one that is not elementwise in a
            layout that cuts weights, or that mixes weights in one that divides them.
    """
    for role, optimizer in optimizers.items():
        name = type(optimizer).__name__
        if _needs_closure(optimizer):
            raise ConfigError(
                f"{role}: {name} computes the loss anew inside a step, and a training call computes it once before; "
                f"use an optimizer whose step() needs no closure, such as AdamW"
            )
        if isinstance(optimizer, optim.SparseAdam):
            raise ConfigError(f"{role}: {name} needs sparse gradients, and those of models here are dense; use Adam")
        if type(optimizer) not in _ELEMENTWISE and role in layouts:
            _check_parts(optimizer, role, layouts[role], (names or {}).get(role, {}))


def _needs_closure(optimizer: optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_parts(optimizer: optim.Optimizer, role: str, model_layout: ModelLayout, names: Mapping[int, str]) -> None:
    dims = model_layout.layout.dims
    if not model_layout.cut_dims() and dims.pp == 1:
        return
    for group in optimizer.param_groups:
        try:
            differing = _axes_that_change_a_step(optimizer, group, _own_layout(group, model_layout, names))
        except Exception as error:  # of any class: an optimizer may need kernels of a device, or names of its groups
            rank_zero_warn(
                f"{role}: whether {type(optimizer).__name__} updates every element on its own could not be tried "
                f"({type(error).__name__}: {error}); if it does not, results depend on the layout {dims}"
            )
            return
        if differing:
            raise ConfigError(
                f"{role}: {type(optimizer).__name__} updates an element by other elements, too, and ranks of the "
                f"layout {dims} hold parts of the weights; train {role} in a layout with {differing}, such as "
                f"dp{dims.size}, or use an elementwise optimizer such as AdamW"
            )


def _own_layout(group: Mapping[str, Any], model_layout: ModelLayout, names: Mapping[int, str]) -> ModelLayout:
    """Return the layout of a group's parameters; of all, where some have no name, or ranks hold other parameters."""
    known = {param.name for param in model_layout.model.params}
    own = {names.get(id(parameter), "") for parameter in group["params"]}
    return model_layout.subset(own) if own and own <= known and model_layout.layout.dims.pp == 1 else model_layout


def _axes_that_change_a_step(optimizer: optim.Optimizer, group: Mapping[str, Any], model_layout: ModelLayout) -> str:
    """Return the axes, as in ``"fsdp=1, tp=1"``, whose parts of small weights get other updates than in whole ones."""
    shape = (8,) if all(parameter.dim() < 2 for parameter in group["params"]) else (8, 6)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) * scale for scale in (1.0, 3.0)]
    gradients = [[torch.randn(shape, generator=generator) * scale for scale in (1.0, 30.0)] for _ in range(2)]
    whole = _updates(optimizer, group, weights, gradients)
    if not all(update.isfinite().all() and update.any() for update in whole):
        raise ValueError("it leaves a small weight as it is, or without finite values")
    differing = []
    for axis, cut_dims in model_layout.cut_dims().items():
        for dim in {min(dim, len(shape) - 1) for dim in cut_dims}:
            half = [weight.chunk(2, dim)[0].contiguous() for weight in weights]
            steps = [[gradient.chunk(2, dim)[0].contiguous() for gradient in step] for step in gradients]
            updates = _updates(optimizer, group, half, steps)
            if any(_differ(ours, theirs.chunk(2, dim)[0]) for ours, theirs in zip(updates, whole, strict=True)):
                differing.append(axis)
    stages = [axis for axis in Layout.stage_axes if model_layout.layout.count(axis) > 1]
    if stages and _differ(_updates(optimizer, group, weights[:1], [step[:1] for step in gradients])[0], whole[0]):
        differing += stages
    return ", ".join(f"{axis}=1" for axis in dict.fromkeys(differing))


def _differ(ours: Tensor, theirs: Tensor) -> bool:
    # Not ">": the update of a part may be NaN.
    return not (ours - theirs).abs().max() <= _TOLERANCE * theirs.abs().max()


def _updates(
    optimizer: optim.Optimizer, group: Mapping[str, Any], weights: Sequence[Tensor], steps: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the changes of weights by the steps of a new optimizer like this one, with one group.

    The group has the settings that it was made with, because a warm-up may begin with a learning rate of 0.
    """
    device = next((parameter.device for parameter in group["params"]), None)
    parameters = [torch.nn.Parameter(weight.to(device, copy=True)) for weight in weights]
    probe = object.__new__(type(optimizer))  # __init__ takes other arguments than an optimizer keeps
    vars(probe).update({key: value for key, value in vars(optimizer).items() if key != "step"})  # a schedule's wrapper
    probe_group = {**group, **given_settings(group), "params": parameters}
    vars(probe).update(
        state=defaultdict(dict),
        param_groups=[probe_group],
        _optimizer_step_pre_hooks={},  # those of the optimizer itself are not for a probe
        _optimizer_step_post_hooks={},
    )
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(device, copy=True)
        probe.step()
    return [parameter.detach().cpu() - weight for parameter, weight in zip(parameters, weights, strict=True)]
