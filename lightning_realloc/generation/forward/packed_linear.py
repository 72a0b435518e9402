"""Linear layers on copies of their weights in oneDNN's own order, during one generation on CPU.

A decoding step multiplies a few rows with every weight, and oneDNN would reorder each weight every time. The copies
cost about three such products, and as much memory as the weights. Layers that read the same tensor, such as a block's
queries, keys and values, share one copy and one product. Both operators are private to torch. Only this module uses
them, and it leaves a model unchanged where they do not work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_realloc.generation.forward.latents import absorbed_projections
from lightning_realloc.generation.forward.shared_product import SharedProduct, layers_reading_the_same
from lightning_realloc.limits import MIN_PACKED_FLOAT32_WEIGHTS, MIN_PACKED_STEPS
from lightning_realloc.runtime.parallel.tensor_parallel import is_plain_linear

_LEAST_FOR_ONE_ROW = 1 << 20
"""Float32 weights from which on even a product of one row is faster."""
_TYPICAL_ROWS = 32
"""Rows that weights are packed for. With torch 2.13 any number but one gives the same speed for all others."""


class _Group(NamedTuple):
    """Layers that share a packed weight, often one."""

    layers: tuple[nn.Linear, ...]
    dtype: torch.dtype
    """Dtype of the product: autocast's if it is on."""

    @property
    def num_weights(self) -> int:
        """Number of weights of all layers."""
        return sum(layer.weight.numel() for layer in self.layers)

    @property
    def pays(self) -> bool:
        """Whether steps get faster: small float32 weights gain nothing."""
        return self.dtype is not torch.float32 or self.num_weights >= MIN_PACKED_FLOAT32_WEIGHTS


@contextmanager
def packed_linears(model: nn.Module, *, num_steps: int) -> Iterator[Callable[[], None]]:
    """Let linear layers multiply with packed copies of their current weights where that is faster.

    Yields a function that copies the weights anew, after they were updated.

    ``num_steps`` bounds the tokens of one response. Layers stay unchanged if their forward is more than the product
    with their own weight, or was replaced, or if their weights are sharded or quantized, or absorbed by others. Hooks
    keep working.
    """
    groups = [group for group in _packable_groups(model) if group.pays] if num_steps >= MIN_PACKED_STEPS else []

    def unpack() -> None:
        for group in groups:
            for layer in group.layers:
                vars(layer).pop("forward", None)

    def pack() -> None:
        unpack()
        for group in groups:
            _pack_group(group)

    try:
        pack()
        yield pack
    finally:
        unpack()


@cache
def packs(dtype: torch.dtype) -> bool:
    """Return whether packed products of ``dtype`` work on this torch and processor, and equal those of `linear`."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    weight, rows = torch.eye(16, 32, dtype=dtype), torch.arange(64.0).to(dtype).view(2, 32)
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        product = _multiply(rows, _pack(weight), rows[0, :16])
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(product, rows[:, :16] + rows[0, :16])


def _packable_groups(model: nn.Module) -> list[_Group]:
    """Return the layers that can be packed, grouped by the tensor that they read."""
    if any(hasattr(module, "unshard") for module in model.modules()):  # FSDP frees weights between two uses
        return []
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    dtypes: dict[nn.Module, torch.dtype] = {}
    absorbed = set(absorbed_projections(model))
    for module in model.modules():
        if module in absorbed or not is_plain_linear(module):
            continue
        if type(module.weight.data) is Tensor and module.weight.device.type == "cpu":
            dtype = autocast or module.weight.dtype
            if packs(dtype) and module.weight.numel():
                dtypes[module] = dtype
    groups = []
    for layers in layers_reading_the_same(model):
        if all(layer in dtypes for layer in layers):
            groups.append(_Group(layers, dtypes[layers[0]]))
            for layer in layers:
                del dtypes[layer]
    return groups + [_Group((layer,), dtype) for layer, dtype in dtypes.items()]  # type: ignore[arg-type]


def _pack_group(group: _Group) -> None:
    """Give each layer of the group a forward by the packed product, for steps in which that is faster."""
    layers, dtype = group.layers, group.dtype
    weight = _joined([layer.weight.detach().to(dtype) for layer in layers])
    biases = [layer.bias.detach().to(dtype) for layer in layers if layer.bias is not None]
    multiply = partial(_multiply_packed, _pack(weight), _joined(biases) if biases else None)
    least_rows = 1 if group.num_weights >= _LEAST_FOR_ONE_ROW else 2
    product = SharedProduct(multiply, layers)
    for index, layer in enumerate(layers):
        own = multiply if len(layers) == 1 else partial(product.part, index)
        vars(layer)["forward"] = _forward_from(own, layer, least_rows) if dtype is torch.float32 else own


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0].contiguous()


def _forward_from(packed: Callable[[Tensor], Tensor], layer: nn.Linear, least_rows: int) -> Callable[[Tensor], Tensor]:
    """Return a float32 layer's forward, packed from ``least_rows`` rows on."""
    plain, fewest_elements = layer.forward, least_rows * layer.in_features

    def forward(input: Tensor) -> Tensor:
        return packed(input) if input.numel() >= fewest_elements else plain(input)

    return forward


def _pack(weight: Tensor) -> Tensor:
    """Return the weight in oneDNN's order for products of a few rows; other products stay possible."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    return packed


def _multiply(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return product


def _multiply_packed(packed: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    """Return the product (…, out) with ``input`` (…, in), in the packed weight's dtype."""
    rows = input.reshape(-1, input.shape[-1]).to(packed.dtype)
    return _multiply(rows, packed, bias).view(*input.shape[:-1], -1)
