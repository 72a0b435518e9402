"""Linear layers on copies of their weights in oneDNN's own order, for the time of one generation on CPU.

A step of decoding multiplies a few rows with every weight, and oneDNN would put a weight that lies in torch's order
into its own each time. The copies cost about three such products, and as much memory as the weights. Both operators
are private to torch: this module alone knows them, and leaves a model as it is where they do not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

_LEAST_STEPS = 32
_LEAST_SLOTS = 8
_LEAST_ROWS = 4
_LEAST_FLOAT32_WEIGHTS = 2**20


@contextmanager
def packed_linears(model: nn.Module, *, num_slots: int, num_steps: int) -> Iterator[None]:
    """Let the linear layers for which it pays multiply with packed copies of the weights they hold now.

    ``num_slots`` bounds the samples that run at a time, ``num_steps`` the tokens of one response. Layers are left alone
    that are not plain `nn.Linear` (tensor parallelism, quantization), whose weights are sharded, or whose forward
    somebody replaced; hooks stay in force.
    """
    layers = _packable_layers(model, num_slots) if num_steps >= _LEAST_STEPS else {}
    try:
        for layer, dtype in layers.items():
            vars(layer)["forward"] = _packed_forward(layer, dtype, num_slots)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Return whether this torch on this processor multiplies with packed weights of ``dtype`` as `linear` does."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight, rows = torch.eye(16, 32, dtype=dtype), torch.arange(64.0).to(dtype).view(2, 32)
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        product = _multiply(rows, _pack(weight, 2), rows[0, :16])
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(product, rows[:, :16] + rows[0, :16])


def _packable_layers(model: nn.Module, num_slots: int) -> dict[nn.Linear, torch.dtype]:
    """Return the layers for which packing pays, each with the dtype it multiplies in: autocast's where that is on."""
    if any(hasattr(module, "unshard") for module in model.modules()):  # FSDP frees weights between two uses
        return {}
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    layers = {}
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module) and type(module.weight.data) is Tensor:
            dtype = autocast or module.weight.dtype
            if module.weight.device.type == "cpu" and packs(dtype) and _pays(module.weight, dtype, num_slots):
                layers[module] = dtype
    return layers


def _pays(weight: Tensor, dtype: torch.dtype, num_slots: int) -> bool:
    """Return whether products get faster: in float32 those of few rows or with small weights do not."""
    return dtype is not torch.float32 or (num_slots >= _LEAST_SLOTS and weight.numel() >= _LEAST_FLOAT32_WEIGHTS)


def _packed_forward(layer: nn.Linear, dtype: torch.dtype, num_slots: int) -> Callable[[Tensor], Tensor]:
    packed = _pack(layer.weight.detach().to(dtype).contiguous(), num_slots)
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    plain, least_rows = layer.forward, _LEAST_ROWS if dtype is torch.float32 else 1

    def forward(input: Tensor) -> Tensor:
        rows = input.reshape(-1, layer.in_features)
        if rows.shape[0] < least_rows:
            return plain(input)
        return _multiply(rows.to(dtype), packed, bias).view(*input.shape[:-1], -1)

    return forward


def _pack(weight: Tensor, num_rows: int) -> Tensor:
    """Return the weight in the order that suits products of about ``num_rows`` rows; others are possible too."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
    return packed


def _multiply(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return product
