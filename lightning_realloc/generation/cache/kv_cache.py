"""Where keys and values of running samples live: one slot per sample, every sequence from the slot's beginning.

A cache (`KVCache`) says what happens to slots between forwards; for one forward it says where tokens are written and
how slots are read (`StepPlaces`). `SlotCache` gives every slot room for the longest sequence, `PagedCache` pages.

Head counts, head sizes and dtypes are taken from the tensors that a layer brings, never from a config: a
tensor-parallel rank has fewer key-value heads, and mixed precision may give keys and values different dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_realloc.limits import CACHE_MULTIPLE


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence in the packed row, to be read into slots."""

    start: int
    stop: int
    slots: tuple[int, ...]
    """Every slot that is to hold them."""
    begin: int = 0
    """Position of the first of them in its sequence; the slots hold what is before it."""

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.begin + self.stop - self.start

    def slot_runs(self) -> list[slice]:
        """Return the slots as runs of neighbours: those of a prompt's samples mostly are."""
        runs: list[slice] = []
        for slot in sorted(self.slots):
            if runs and runs[-1].stop == slot:
                runs[-1] = slice(runs[-1].start, slot + 1)
            else:
                runs.append(slice(slot, slot + 1))
        return runs


@dataclass(frozen=True, slots=True)
class Places:
    """Which positions of which slots the tokens of one forward are."""

    segments: tuple[Segment, ...]
    """At the front of the packed row."""
    num_prefill: int
    """Tokens of segments; behind them come the tokens of slot 0, then those of slot 1 …"""
    slots: Tensor
    """(N,) slot of each of these."""
    positions: Tensor
    """(N,) position of each of them."""
    num_rows: int
    """Slots that have such tokens."""
    row_lengths: Sequence[int]
    """Positions of each of these slots, with those of this forward."""
    max_length: int
    """Most positions of any slot, with those of this forward."""


class StepPlaces(Protocol):
    """Where one forward writes to a cache, and how it reads it."""

    attended_length: int
    """Positions that decoding reads: the longest sample's, rounded up."""

    def store(self, layer: int, key: Tensor, value: Tensor) -> Any:
        """Keep the packed row's keys and values (N, heads, head size) of a layer; return where, for the others."""
        ...

    def sequence(self, stored: Any, slot: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (end, heads, head size) of a slot's first positions, valid until the next call."""
        ...

    def num_blocks(self) -> int:
        """Return in how many parts the rows are read."""
        ...

    def block(self, stored: Any, index: int) -> tuple[slice, Tensor, Tensor]:
        """Return some rows, and their keys and values (rows, length, heads, head size), valid until the next call."""
        ...


class KVCache(Protocol):
    """What the engine asks of a cache."""

    @property
    def num_bytes(self) -> int:
        """Bytes of storage held."""
        ...

    def make_room(self, num_slots: int, length: int, *, longest: int) -> None:
        """Let slots hold so many positions; ``longest`` bounds what they will ever need."""
        ...

    def places(self, places: Places) -> StepPlaces:
        """Return how a forward of these tokens writes and reads."""
        ...

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of one slot into others."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first ``length`` positions of a slot into one that nobody needs."""
        ...

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the first ``length`` positions of two slots."""
        ...

    def read(self, slot: int, begin: int, end: int) -> Tensor:
        """Return the keys and values of all layers at these positions, as one (bytes,) uint8 tensor on the host."""
        ...

    def write(self, slot: int, begin: int, end: int, content: Tensor) -> None:
        """Put back what `read` returned, perhaps on another rank."""
        ...

    def describe(self) -> list[LayerShape]:
        """Return the shapes of all layers, for `prepare`."""
        ...

    def prepare(self, shapes: Sequence[LayerShape], device: torch.device) -> None:
        """Have storage for layers of these shapes before any of them brings keys and values."""
        ...

    def release(self) -> None:
        """Give the storage back."""
        ...


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


def cache_shape(layer: int, key: Tensor, value: Tensor) -> LayerShape:
    """Return the shape of a layer that keeps keys and values (…, heads, head size) like these."""
    return LayerShape(
        layer, (key.shape[-2], key.shape[-1]), (value.shape[-2], value.shape[-1]),
        str(key.dtype).removeprefix("torch."), str(value.dtype).removeprefix("torch."),
    )  # fmt: skip


def model_parts(content: Tensor, num_positions: int, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield what ``content``, as `KVCache.read` returns it, holds (positions, heads, head size) of each tensor in turn.

    Args:
        content: (bytes,) uint8.
        num_positions: How many it holds.
        tensors: (…, heads, head size), in the order in which they were read.
    """
    place = 0
    for tensor in tensors:
        shape = (num_positions, *tensor.shape[-2:])
        stop = place + math.prod(shape) * tensor.element_size()
        # A copy begins where its dtype may begin; a part of the content perhaps does not.
        yield content[place:stop].to(tensor.device).clone().view(tensor.dtype).view(shape)
        place = stop
    assert place == content.numel(), f"{num_positions} positions hold {place} bytes, got {content.numel()}"


class SlotCache:
    """Keys and values (slots, capacity, key-value heads, head size) of every layer.

    Contents mean something only within one generation; between two of them only the storage is kept.
    """

    def __init__(self) -> None:
        self.num_slots = 0
        self.capacity = 0
        """Positions that one slot can hold."""
        self.num_allocations = 0
        """Grows whenever storage is another one than before."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of storage held."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def make_room(self, num_slots: int, length: int, *, longest: int) -> None:
        """Let slots hold so many positions, and some more, up to ``longest``: room grows by copying what is there."""
        if length > self.capacity or num_slots > self.num_slots:
            rounded = -(-length // CACHE_MULTIPLE) * CACHE_MULTIPLE
            grown = rounded if length <= self.capacity else max(rounded, 2 * self.capacity)
            self.reserve(num_slots, max(length, min(grown, longest)))

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
        self.num_allocations += 1

    def places(self, places: Places) -> SlotPlaces:
        """Return how a forward of these tokens writes and reads."""
        rounded = -(-places.max_length // CACHE_MULTIPLE) * CACHE_MULTIPLE
        return SlotPlaces(
            self, places.slots * self.capacity + places.positions, num_rows=places.num_rows,
            attended_length=min(self.capacity, rounded), segments=places.segments, num_prefill=places.num_prefill,
        )  # fmt: skip

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the storage of a layer that brings ``key`` and ``value`` (…, heads, head size)."""
        stored = self._layers.get(index)
        if stored is None or not (fits(stored[0], key) and fits(stored[1], value)):
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

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first ``length`` positions of a slot into one that nobody needs."""
        self.copy(source, [target], length)

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
        tensors = [tensor for layer in self._in_order() for tensor in layer]
        for tensor, part in zip(tensors, model_parts(content, end - begin, tensors), strict=True):
            tensor[slot, begin:end] = part

    def describe(self) -> list[LayerShape]:
        """Return the shapes of all layers, for `prepare`."""
        return [cache_shape(index, *layer) for index, layer in sorted(self._layers.items())]

    def prepare(self, shapes: Sequence[LayerShape], device: torch.device) -> None:
        """Have storage for layers of these shapes before any of them brings keys and values."""
        for shape in shapes:
            self.layer(shape.layer, *shape.empty(device))

    def _in_order(self) -> list[tuple[Tensor, Tensor]]:
        return [layer for _, layer in sorted(self._layers.items())]

    def _allocate(self, like: Tensor) -> Tensor:
        self.num_allocations += 1
        # Zeros, not empty: attention gives positions beyond a sequence's end the weight 0, and 0 times NaN is NaN.
        return torch.zeros(
            self.num_slots, self.capacity, like.shape[-2], like.shape[-1], dtype=like.dtype, device=like.device
        )


class SlotPlaces:
    """One forward's places in a `SlotCache`."""

    def __init__(
        self,
        cache: SlotCache,
        indices: Tensor,
        *,
        num_rows: int,
        attended_length: int,
        segments: Sequence[Segment] = (),
        num_prefill: int = 0,
    ) -> None:
        """Write the rows' tokens to ``indices`` (N,) of the cache seen as (slots * capacity, …)."""
        self._cache = cache
        self._indices = indices
        self._num_rows = num_rows
        self.attended_length = attended_length
        self._runs = [(segment, run) for segment in segments for run in segment.slot_runs()]
        self._num_prefill = num_prefill
        self._sources: Tensor | None = None
        """Where kernels are launched: tokens of the packed row that ``indices`` are of; None: the rows', and runs
        are copied one by one."""
        if segments and indices.device.type != "cpu":
            self._write_at_once(segments)

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the packed row's keys and values; return the layer's storage."""
        stored = self._cache.layer(layer, key, value)
        for storage, new in zip(stored, (key, value), strict=True):
            for segment, run in self._runs:
                storage[run, segment.begin : segment.end] = new[segment.start : segment.stop]
            own = new[self._num_prefill :] if self._sources is None else new.index_select(0, self._sources)
            storage.flatten(0, 1).index_copy_(0, self._indices, own)
        return stored

    def _write_at_once(self, segments: Sequence[Segment]) -> None:
        """Let one call per layer write what segments and rows bring, where launching many costs more than that."""
        spans = [(segment, slot * self._cache.capacity) for segment in segments for slot in segment.slots]
        rows = torch.arange(self._num_prefill, self._num_prefill + len(self._indices))
        sources = [*(torch.arange(segment.start, segment.stop) for segment, _ in spans), rows]
        targets = [torch.arange(first + segment.begin, first + segment.end) for segment, first in spans]
        self._sources = torch.cat(sources).to(self._indices.device)
        if targets:
            self._indices = torch.cat([torch.cat(targets).to(self._indices.device), self._indices])
        self._runs = []

    def sequence(self, stored: tuple[Tensor, Tensor], slot: int, end: int) -> tuple[Tensor, Tensor]:
        """Return a slot's first positions: views of the storage."""
        return stored[0][slot, :end], stored[1][slot, :end]

    def num_blocks(self) -> int:
        """Return 1: all rows are read at once."""
        return 1

    def block(self, stored: tuple[Tensor, Tensor], index: int) -> tuple[slice, Tensor, Tensor]:
        """Return all rows: views of the storage."""
        rows, length = self._num_rows, self.attended_length
        return slice(rows), stored[0][:rows, :length], stored[1][:rows, :length]


def fits(stored: Tensor, brought: Tensor) -> bool:
    return stored.shape[-2:] == brought.shape[-2:] and stored.dtype == brought.dtype and stored.device == brought.device
