"""Find the experts of a model whose weights are stacked, as transformers' interface for experts runs them.

Each parameter of such a module has the experts as its first dim. Transformers' interface still changes; only this
module and `experts_obstacle` depend on it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import TensorParallelCut
from lightning_realloc.runtime.model.batching_limits import has_experts

_ALIGNED_FEATURES = 8
"""Features that stay on one rank, if they divide the features of an expert: torch multiplies all experts of a layer at
once if the rows of their weights begin at multiples of 16 bytes."""
OUTPUT_BIAS = "down_proj_bias"
"""Bias of experts' outputs. Ranks that add up their outputs add it once."""


def stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of stacked experts by name; {} for a model without them."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "_apply_gate")}


def undivided_experts(model: nn.Module) -> str | None:
    """Return why ranks cannot divide the experts of a model; None if they can."""
    experts = stacked_experts(model)
    if not experts:
        is_mixture = hasattr(model, "config") and has_experts(model)
        return "its experts are modules of their own, not stacked weights" if is_mixture else "it has no experts"
    for name, module in experts.items():
        own, count = dict(module.named_parameters(recurse=False)), getattr(module, "num_experts", None)
        if other := next((inner for inner, _ in module.named_parameters() if inner not in own), None):
            return f"{name}.{other} belongs to all experts of a layer together"
        for inner, parameter in own.items():
            if parameter.ndim == 0 or parameter.shape[0] != count:
                return f"{name}.{inner} of shape {tuple(parameter.shape)} is not stacked by its num_experts={count}"
    return None


def feature_cuts(experts: Any, name: str) -> dict[str, TensorParallelCut]:
    """Return the cuts of stacked experts along their intermediate features, by the names of their own parameters.

    A rank then adds up its features' part of every output. Raises LayoutError, with the ``name`` of the experts, for a
    module whose ranks could not.
    """
    names = [inner for inner, _ in experts.named_parameters(recurse=False)]
    first = "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"
    known = {first, "down_proj", f"{first}_bias", OUTPUT_BIAS}
    obstacle = None
    if not hasattr(experts, "is_transposed") or not {first, "down_proj"} <= set(names) <= known:
        obstacle = f"tensor parallelism cuts experts of {first} and down_proj, and these have {names}"
    elif experts.has_post_expert_norm:
        obstacle = "a norm of each expert's output needs the features of all ranks"
    if obstacle is not None:
        raise LayoutError(f"{name}: {obstacle}; pass a tp_plan that says 'replicate' for it")
    inner_dim = 1 if experts.is_transposed else 2
    features = experts.down_proj.shape[inner_dim]
    units = features if features % _ALIGNED_FEATURES else features // _ALIGNED_FEATURES
    is_fused = first == "gate_up_proj" and experts.is_concatenated  # otherwise gate and up of a feature are neighbours
    outputs = {"num_units": 2 * units, "block_sizes": (features, features)} if is_fused else {"num_units": units}
    cuts = {
        first: TensorParallelCut(3 - inner_dim, **outputs),
        f"{first}_bias": TensorParallelCut(1, **outputs),
        "down_proj": TensorParallelCut(inner_dim, num_units=units),
    }
    return {inner: cut for inner, cut in cuts.items() if inner in names}
