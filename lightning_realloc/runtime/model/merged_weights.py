"""Weights that transformers merges from several tensors of a checkpoint, such as experts, merged region by region.

In place of a concatenation of mapped tensors, a parameter on the meta device keeps the parts. A rank then reads the
regions of its experts alone, and no model is whole in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_realloc.runtime.model.recorded_init import RECIPE, weight_values


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """Tensors that are concatenated along a dim when they are read."""

    parts: tuple[Tensor, ...]
    """Mapped tensors, or parameters on the meta device that have parts of their own."""
    dim: int
    shape: tuple[int, ...]

    @classmethod
    def from_call(cls, func: Any, tensors: Sequence[Tensor], dim: int = 0) -> MergedWeight:
        """Return the result of ``torch.stack`` or ``torch.cat``."""
        parts = tuple(tensor.unsqueeze(dim) if func is torch.stack else tensor for tensor in tensors)
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        return cls(parts, dim, tuple(shape))

    def parameter(self) -> nn.Parameter:
        """Return a parameter on the meta device that stands for the weight."""
        empty = nn.Parameter(torch.empty(self.shape, dtype=self.parts[0].dtype, device="meta"))
        setattr(empty, RECIPE, self)
        return empty

    def make(self) -> Tensor:
        """Return the values of the whole weight."""
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, starts: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the values of a region, given its first indices and its shape."""
        start, stop = starts[self.dim], starts[self.dim] + shape[self.dim]
        found, position = [], 0
        for part in self.parts:
            low, high = max(start - position, 0), min(stop - position, part.shape[self.dim])
            if low < high:
                found.append(read_region(part, _with(starts, self.dim, low), _with(shape, self.dim, high - low)))
            position += part.shape[self.dim]
        return torch.cat(found, self.dim)


def read_region(weight: Tensor, starts: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the values of a region of an undivided weight, of which only a merged one's are copied."""
    recipe = getattr(weight, RECIPE, None)
    if isinstance(recipe, MergedWeight):
        return recipe.read(starts, shape)
    values = weight_values(weight)
    for dim, (start, length) in enumerate(zip(starts, shape, strict=True)):
        values = values.narrow(dim, start, length)
    return values


def is_merged(value: object) -> bool:
    """Return whether a tensor stands for a merged weight."""
    return isinstance(getattr(value, RECIPE, None), MergedWeight)


def with_values(tree: Any) -> Any:
    """Return arguments with values in place of merged weights."""
    return tree_map_only(Tensor, lambda tensor: weight_values(tensor) if is_merged(tensor) else tensor, tree)


def _with(numbers: Sequence[int], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])
