"""Run stacked experts and routers with their adapters added to the weights, in place of PEFT's own forward.

PEFT turns weights into parametrizations for each forward, and back. That reorders parameters, which layouts and FSDP
know by name and order. Ours hands the experts the sum as a plain tensor. The arithmetic is PEFT's. Imports PEFT.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from lightning_realloc.runtime.model.stacked_experts import parameter_adapters


def add_factors(model: nn.Module) -> None:
    """Let PEFT's adapters of single parameters run as `AddedFactors`."""
    for layer in parameter_adapters(model).values():
        layer.__class__ = AddedFactors


class AddedFactors(ParamWrapper):
    """Adapter of a router's weight, or of one parameter of stacked experts, which may be a rank's share of them."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the experts, or the next adapter around them, with the sum of weight and adapter."""
        if self.disable_adapters or self.merged:
            return self.base_layer(*args, **options)
        return _uncompiled(self, *args, **options)

    def added(self) -> Tensor:
        """Return the weight with the product of the factors added, in the weight's dtype."""
        weight: Tensor = self.get_param()
        if weight.ndim == 2:  # of a router
            product: Tensor = self.get_delta_weight(*self.active_adapters)
            return weight + product
        left, right, scaling = self.get_delta_factors(*self.active_adapters)
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, left, right, alpha=scaling)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the product to the weight in place."""
        with torch.no_grad():
            self.get_param().copy_(self.added())
        self.merged_adapters.extend(self.active_adapters)


def _run_added(layer: AddedFactors, *args: Any, **options: Any) -> Any:
    parameters: dict[str, Any] = layer.get_base_layer()._parameters
    own = parameters[layer.parameter_name]
    parameters[layer.parameter_name] = layer.added()
    try:
        return layer.base_layer(*args, **options)
    finally:
        parameters[layer.parameter_name] = own


_uncompiled: Any = torch.compiler.disable(_run_added)
"""Exchanged parameters would compile the experts anew."""
