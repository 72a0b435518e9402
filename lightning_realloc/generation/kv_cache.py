"""Where keys and values of running samples live: one slot per sample, every sequence from the slot's beginning.

Head counts, head sizes and dtypes are taken from the tensors that a layer brings, never from a config: a
tensor-parallel rank has fewer key-value heads, and mixed precision may give keys and values different dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotCache:
    """Keys and values (slots, capacity, key-value heads, head size) of every layer.

    Contents mean something only within one generation; between two of them only the storage is kept.
    """

    def __init__(self) -> None:
        self.num_slots = 0
        self.capacity = 0
        """Positions that one slot can hold."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of storage held."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Make room for at least this many slots and positions; what the slots hold is kept."""
        if num_slots <= self.num_slots and capacity <= self.capacity:
            return
        slots, length = self.num_slots, self.capacity
        self.num_slots, self.capacity = max(num_slots, slots), max(capacity, length)
        for index, old in self._layers.items():
            new = (self._allocate(old[0]), self._allocate(old[1]))
            for source, target in zip(old, new, strict=True):
                target[:slots, :length] = source
            self._layers[index] = new

    def release(self) -> None:
        """Give the storage back."""
        self._layers.clear()
        self.num_slots = self.capacity = 0

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the storage of a layer that brings ``key`` and ``value`` (…, heads, head size)."""
        stored = self._layers.get(index)
        if stored is None or not (_fits(stored[0], key) and _fits(stored[1], value)):
            stored = self._layers[index] = (self._allocate(key), self._allocate(value))
        return stored

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of one slot into others."""
        if not length or not targets:
            return
        for layer in self._layers.values():
            for tensor in layer:
                prefix = tensor[source, :length]
                for target in targets:
                    tensor[target, :length] = prefix

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the first ``length`` positions of two slots."""
        for layer in self._layers.values() if length else ():
            for tensor in layer:
                kept = tensor[first, :length].clone()
                tensor[first, :length] = tensor[second, :length]
                tensor[second, :length] = kept

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, not empty: attention gives positions beyond a sequence's end the weight 0, and 0 times NaN is NaN.
        return torch.zeros(
            self.num_slots, self.capacity, like.shape[-2], like.shape[-1], dtype=like.dtype, device=like.device
        )


def _fits(stored: Tensor, brought: Tensor) -> bool:
    return stored.shape[-2:] == brought.shape[-2:] and stored.dtype == brought.dtype and stored.device == brought.device
