"""Find the experts of a model whose weights are stacked, as transformers' interface for experts runs them.

Each parameter of such a module has the experts as its first dim. Transformers' interface still changes; only this
module and `experts_obstacle` depend on it.
"""

from __future__ import annotations

from torch import nn

from lightning_realloc.runtime.model.batching_limits import has_experts


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
