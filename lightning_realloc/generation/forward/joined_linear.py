"""Products of layers that read the same tensor and whose weights lie next to each other, without copying a weight.

A reallocation stores the weights of a block's queries, keys and values one after the other, and those of gate and up.
As one weight they need one kernel in place of three or two, and the small ones of keys and values keep a GPU busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from lightning_realloc.generation.forward.shared_product import SharedProduct, layers_reading_the_same
from lightning_realloc.runtime.parallel.tensor_parallel import is_plain_linear


@dataclass(frozen=True, slots=True)
class _Product:
    """A product whose weight is an attribute, so that one compiled program serves all blocks."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def _forward(layer: Any, input: Tensor) -> Tensor:
    part: Tensor = layer._joined_product.part(layer._joined_index, input)
    return part


@contextmanager
def joined_linears(model: nn.Module) -> Iterator[int]:
    """Let sibling layers whose weights and biases are adjacent in memory multiply as one; yield the number of groups.

    Layers stay unchanged whose forward is more than the product with their own weight, or was replaced. Hooks keep
    working.
    """
    groups = []
    for layers in layers_reading_the_same(model):
        weight, bias = _joined([layer.weight for layer in layers]), _joined([layer.bias for layer in layers])
        has_bias = layers[0].bias is not None
        if weight is not None and (bias is not None or not has_bias) and all(map(is_plain_linear, layers)):
            groups.append((layers, SharedProduct(_Product(weight, bias), layers)))
    try:
        for layers, product in groups:
            for index, layer in enumerate(layers):
                own = {"_joined_product": product, "_joined_index": index, "forward": MethodType(_forward, layer)}
                vars(layer).update(own)
        yield len(groups)
    finally:
        for layers, _ in groups:
            for layer in layers:
                for name in ("_joined_product", "_joined_index", "forward"):
                    del vars(layer)[name]


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the concatenation of tensors along the first dim without copying; None if they are not adjacent."""
    tensors = [part.detach() for part in parts if part is not None]
    if not tensors or type(tensors[0]) is not Tensor:
        return None
    storage, end = tensors[0].untyped_storage(), tensors[0].data_ptr()
    for tensor in tensors:
        is_next = tensor.untyped_storage().data_ptr() == storage.data_ptr() and tensor.data_ptr() == end
        if not is_next or not tensor.is_contiguous() or tensor.numel() == 0:
            return None
        end += tensor.numel() * tensor.itemsize
    first = tensors[0]
    return first.as_strided((sum(len(tensor) for tensor in tensors), *first.shape[1:]), first.stride())
