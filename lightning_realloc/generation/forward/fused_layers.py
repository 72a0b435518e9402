"""Layers of captured steps as fewer kernels, without copying a weight.

A reallocation stores the weights of a block's queries, keys and values one after the other, and those of gate and up.
As one weight they need one kernel in place of three or two, and the small ones of keys and values keep a GPU busy.
Models compute an RMS norm by eight operators, and torch has one kernel for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from lightning_realloc.generation.forward.shared_product import SharedProduct, layers_reading_the_same
from lightning_realloc.runtime.parallel.tensor_parallel import is_plain_linear


# ---- products
@dataclass(frozen=True, slots=True)
class _Product:
    """A product whose weight is an attribute, so that one compiled program serves all blocks."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def _joined_forward(layer: Any, input: Tensor) -> Tensor:
    part: Tensor = layer._joined_product.part(layer._joined_index, input)
    return part


@contextmanager
def joined_linears(model: nn.Module) -> Iterator[int]:
    """Let sibling layers whose weights and biases are adjacent in memory multiply as one; yield the number of groups.

    Layers stay unchanged whose forward is more than the product with their own weight, or was replaced. Hooks keep
    working.
    """
    groups: list[tuple[tuple[nn.Linear, ...], SharedProduct]] = []
    taken: set[nn.Linear] = set()
    for layers in layers_reading_the_same(model):
        weight, bias = _joined([layer.weight for layer in layers]), _joined([layer.bias for layer in layers])
        has_bias = layers[0].bias is not None
        is_whole = (bias is not None or not has_bias) and all(map(is_plain_linear, layers))
        if weight is not None and is_whole and taken.isdisjoint(layers):
            taken.update(layers)
            groups.append((layers, SharedProduct(_Product(weight, bias), layers)))
    try:
        for layers, product in groups:
            for index, layer in enumerate(layers):
                own = {
                    "_joined_product": product,
                    "_joined_index": index,
                    "forward": MethodType(_joined_forward, layer),
                }
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


# ---- norms
@contextmanager
def fused_norms(model: nn.Module) -> Iterator[int]:
    """Let the model's RMS norms run as one kernel each; yield the number of norms.

    Norms stay unchanged that compute something else, such as Gemma's, or whose forward was replaced. In bfloat16 the
    kernel rounds once, and models round twice.
    """
    kinds = [kind for kind in {type(module) for module in model.modules()} if _is_rms_norm(kind)]
    norms = [module for module in model.modules() if type(module) in kinds and "forward" not in vars(module)]
    try:
        for norm in norms:
            vars(norm)["forward"] = MethodType(_fused_forward, norm)
        yield len(norms)
    finally:
        for norm in norms:
            del vars(norm)["forward"]


def _fused_forward(norm: Any, input: Tensor) -> Tensor:
    if input.dtype != norm.weight.dtype:
        made: Tensor = type(norm).forward(norm, input)
        return made
    epsilon: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return rms_norm(input, norm.weight.shape, norm.weight, epsilon)


def _is_rms_norm(kind: type[nn.Module]) -> bool:
    """Return whether modules of this class compute the RMS norm of their last dim, times their weight."""
    if not kind.__name__.endswith("RMSNorm"):
        return False
    weight, input = torch.linspace(0.5, 1.5, 8, device="cpu"), torch.linspace(-2.0, 3.0, 24, device="cpu").view(3, 8)
    norm: Any = SimpleNamespace(weight=weight, variance_epsilon=1e-2, eps=1e-2)
    try:
        made = kind.forward(norm, input)
        return torch.allclose(made, rms_norm(input, weight.shape, weight, 1e-2), rtol=1e-5, atol=1e-6)
    except Exception:  # a forward that needs more than a weight and an epsilon
        return False
