"""Hold 4-bit weights of bitsandbytes as buffers, which no layout cuts or casts, and no reallocation moves.

Packed integers can be neither cut nor cast, and training leaves them unchanged. So every rank keeps the weights that it
loaded, and all replicas of a role use the same ones. Layers are recognised by the class of their weight, so this module
does not import bitsandbytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_realloc.errors import ConfigError

_BLOCKS_PER_SCALE = 256
"""Blocks whose 8-bit scales share one float32 scale in double quantization. bitsandbytes has this constant, too."""


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """Return name -> layer for every linear layer with a 4-bit weight."""
    return {name: module for name, module in model.named_modules() if _is_packed(module)}


def _is_packed(module: nn.Module) -> bool:
    weight = module._parameters.get("weight", module._buffers.get("weight"))
    return type(weight).__name__ == "Params4bit"


def pin_quantized_weights(model: nn.Module, role: str) -> nn.Module:
    """Turn 4-bit weights into buffers that files leave out, in place, and return the model.

    On some processors, bitsandbytes packs the weights of a layer in eval mode anew. That rounds its scales, and a
    product with such weights has no gradient. So it is switched off.

    Raises:
        ConfigError: for weights that are packed so already.
    """
    for name, layer in quantized_layers(model).items():
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            raise ConfigError(
                f"{role}: bitsandbytes has packed {name} for inference on this processor, which rounded its scales; "
                f"load the model anew, and give it before it computes anything"
            )
        layer.support_avx512bf16_for_cpu = False
        if "weight" in layer._parameters:
            layer._buffers["weight"] = layer._parameters.pop("weight")
            layer._non_persistent_buffers_set.add("weight")
    return model


def replacements_in_copy(model: nn.Module) -> dict[int, object]:
    """Return id of a 4-bit weight or its scales -> what takes its place in a copy without weights.

    Pinned weights stay themselves, so that all copies share them. Others lose their storage.
    """
    found: dict[int, object] = {}
    for layer in quantized_layers(model).values():
        weight, is_pinned = layer.weight, "weight" in layer._buffers
        found[id(weight)] = weight if is_pinned else _without_storage(weight)
        for scales in (weight.quant_state, layer.quant_state):
            if scales is not None:
                found[id(scales)] = scales if is_pinned else None
    return found


def free_quantized_weights(*models: nn.Module) -> None:
    """Free the models' 4-bit weights, in place; they keep shape and dtype."""
    for layer in (layer for model in models for layer in quantized_layers(model).values()):
        layer._buffers["weight"], layer.quant_state = _without_storage(layer.weight), None


def quantized_bytes(model: nn.Module) -> int:
    """Return the bytes of 4-bit weights and of their scales, also for a model without storage."""
    total = 0
    for layer in quantized_layers(model).values():
        count, weight = layer.in_features * layer.out_features, layer.weight
        blocks = -(-count // weight.blocksize)
        scales = blocks + 4 * -(-blocks // _BLOCKS_PER_SCALE) if weight.compress_statistics else 4 * blocks
        total += -(-count // 2) + scales
    return total


def _without_storage(weight: Any) -> Any:
    return type(weight)(
        torch.empty(weight.shape, dtype=weight.dtype, device="meta"),
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
        bnb_quantized=weight.bnb_quantized,
    )
