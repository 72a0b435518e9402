"""Where keys and values of running samples live: one slot per sample, every sequence from the slot's beginning.

Head counts, head sizes and dtypes are taken from the tensors that a layer brings, never from a config: a
tensor-parallel rank has fewer key-value heads, and mixed precision may give keys and values different dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LayerShape(NamedTuple):
    """What a layer keeps of one position."""

    layer: int
    key: tuple[int, int]
    """Heads and head size."""
    value: tuple[int, int]
    key_dtype: str
    """Without ``torch.``."""
    value_dtype: str

    @property
    def num_bytes(self) -> int:
        """Of one position's key and value."""
        return sum(like.nbytes for like in self.empty(torch.device("meta")))

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a key and a value of this shape."""
        key = torch.empty(self.key, dtype=getattr(torch, self.key_dtype), device=device)
        return key, torch.empty(self.value, dtype=getattr(torch, self.value_dtype), device=device)


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

    def read(self, slot: int, begin: int, end: int) -> Tensor:
        """Return the keys and values of all layers at these positions, as one (bytes,) uint8 tensor on the host."""
        parts = [
            tensor[slot, begin:end].reshape(-1).view(torch.uint8) for layer in self._in_order() for tensor in layer
        ]
        return torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.uint8)

    def write(self, slot: int, begin: int, end: int, content: Tensor) -> None:
        """Put back what `read` returned, perhaps on another rank."""
        place = 0
        for layer in self._in_order():
            for tensor in layer:
                target = tensor[slot, begin:end]
                part = content[place : place + target.nbytes].to(target.device)
                # A copy begins where its dtype may begin; a part of the content perhaps does not.
                target.copy_(part.clone().view(target.dtype).view(target.shape))
                place += target.nbytes
        assert place == content.numel(), f"positions {begin} to {end} hold {place} bytes, got {content.numel()}"

    def describe(self) -> list[LayerShape]:
        """Return the shapes of all layers, for `prepare`."""
        return [
            LayerShape(index, (key.shape[-2], key.shape[-1]), (value.shape[-2], value.shape[-1]),
                       str(key.dtype).removeprefix("torch."), str(value.dtype).removeprefix("torch."))
            for index, (key, value) in sorted(self._layers.items())
        ]  # fmt: skip

    def prepare(self, shapes: Sequence[LayerShape], device: torch.device) -> None:
        """Have storage for layers of these shapes before any of them brings keys and values."""
        for shape in shapes:
            self.layer(shape.layer, *shape.empty(device))

    def _in_order(self) -> list[tuple[Tensor, Tensor]]:
        return [layer for _, layer in sorted(self._layers.items())]

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, not empty: attention gives positions beyond a sequence's end the weight 0, and 0 times NaN is NaN.
        return torch.zeros(
            self.num_slots, self.capacity, like.shape[-2], like.shape[-1], dtype=like.dtype, device=like.device
        )


def _fits(stored: Tensor, brought: Tensor) -> bool:
    return stored.shape[-2:] == brought.shape[-2:] and stored.dtype == brought.dtype and stored.device == brought.device
