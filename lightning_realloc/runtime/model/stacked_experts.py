"""Find the experts of a model whose weights are stacked, as transformers' interface for experts runs them.

Each parameter of such a module has the experts as its first dim. Transformers' interface still changes; only this
module and `experts_obstacle` depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import TensorParallelCut
from lightning_realloc.layout.cuts import ExpertCut
from lightning_realloc.runtime.model.batching_limits import has_experts

_BASE = ".base_layer"
"""Suffix that PEFT adds to the name of a module that it wraps."""
_ALIGNED_FEATURES = 8
"""Features that stay on one rank, if they divide the features of an expert: torch multiplies all experts of a layer at
once if the rows of their weights begin at multiples of 16 bytes."""
OUTPUT_BIAS = "down_proj_bias"
"""Bias of experts' outputs. Ranks that add up their outputs add it once."""


def stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of stacked experts by name; {} for a model without them."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "_apply_gate")}


def is_router(module: Any) -> bool:
    """Return whether a module chooses ``top_k`` of ``num_experts`` by one weight per expert, as transformers' do."""
    sizes = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    weight = vars(module).get("_parameters", {}).get("weight")
    return all(isinstance(size, int) for size in sizes) and weight is not None and weight.shape[0] == sizes[0]


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


def with_adapters(model: nn.Module, name: str) -> nn.Module:
    """Return the module that runs the stacked experts called ``name``: themselves, or PEFT's layers around them."""
    while name.endswith(_BASE):
        name = name.removesuffix(_BASE)
    return model.get_submodule(name)


def parameter_adapters(model: nn.Module) -> dict[str, Any]:
    """Return name -> layer for PEFT's adapters of single parameters (``target_parameters``), outer ones first."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "parameter_name") and isinstance(getattr(module, "base_layer", None), nn.Module)
    }


def expert_adapters(model: nn.Module) -> dict[str, Any]:
    """Return name -> layer for adapters of stacked experts, outer ones first.

    The first factor has ``r`` rows for each expert, one expert after the other. The second one has ``r`` blocks of
    columns, each of which has a column for every expert.
    """
    experts = set(stacked_experts(model).values())
    return {name: layer for name, layer in parameter_adapters(model).items() if layer.get_base_layer() in experts}


def adapter_cuts(model: nn.Module) -> dict[str, ExpertCut]:
    """Return the cuts by whole experts of the factors of their adapters, by the names of parameters."""
    return {
        f"{name}.{factor}.{adapter}.weight": ExpertCut() if factor == "lora_A" else ExpertCut(1, num_blocks=rank)
        for name, layer in expert_adapters(model).items()
        for adapter, rank in layer.r.items()
        for factor in ("lora_A", "lora_B")
    }


def cut_factor(adapter: Any, cuts: Mapping[str, TensorParallelCut]) -> tuple[str, TensorParallelCut]:
    """Return the factor of an adapter that is cut with the weight of the experts, by whose ``cuts``, and its cut.

    The other factor is whole on every rank, each of which computes a part of its gradient.
    """
    cut = cuts[adapter.parameter_name]
    is_transposed = adapter.get_base_layer().is_transposed
    cuts_outputs = cut.dim == (2 if is_transposed else 1)
    return ("lora_B", replace(cut, dim=0)) if cuts_outputs else ("lora_A", replace(cut, dim=1))


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
