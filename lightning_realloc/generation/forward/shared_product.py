"""One product for linear layers that read the same tensor, such as a block's queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_realloc.limits import READING_THE_SAME


class SharedProduct:
    """A product for several layers; the first of them that is called computes it.

    A later layer gets its part of the same product if its input is the same tensor, and was not written to since. Where
    blocks are compiled, writes are not noticed: models write to no input of these layers.

    Args:
        multiply: Returns the product (…, sum of the layers' outputs) with an input (…, in).
        layers: The layers, in the order of their outputs.
    """

    def __init__(self, multiply: Callable[[Tensor], Tensor], layers: Sequence[nn.Linear]) -> None:
        self._multiply = multiply
        self._widths = [layer.weight.shape[0] for layer in layers]
        self._parts: dict[int, Tensor] = {}
        """Parts (…, width of the layer) of the product that no layer has used yet."""
        self._input: Tensor | None = None
        self._version = 0

    def part(self, index: int, input: Tensor) -> Tensor:
        """Return the product of one layer with ``input``."""
        version = 0 if torch.compiler.is_compiling() else input._version  # a program would be cut in two there
        if self._input is not input or self._version != version or index not in self._parts:
            self._input, self._version = input, version
            self._parts = dict(enumerate(torch.split(self._multiply(input), self._widths, -1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part


def layers_reading_the_same(model: nn.Module) -> Iterator[tuple[nn.Linear, ...]]:
    """Yield distinct layers whose names say that they read the same tensor, and whose weights can be concatenated."""
    if torch.is_inference_mode_enabled():  # tensors do not say there whether they were written to since
        return
    for module in model.modules():
        for names in READING_THE_SAME:
            found = (getattr(module, name, None) for name in names)
            layers = tuple(layer for layer in found if isinstance(layer, nn.Linear))
            if len(layers) == len(names) and _can_be_joined(layers):
                yield layers


def _can_be_joined(layers: Sequence[nn.Linear]) -> bool:
    kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
    return len(kinds) == 1 and len(set(layers)) == len(layers)
