"""Keys and values of running samples: one slot per sample, with the sequence at the slot's beginning.

A `KVCache` changes slots between forwards. For one forward it returns `StepPlaces`, which write and read. `SlotCache`
gives each slot room for the longest sequence, `PagedCache` gives it pages.

Head counts, head sizes and dtypes are taken from the layers' tensors instead of a config. A tensor-parallel rank has
fewer key-value heads, and mixed precision may give keys and values different dtypes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_realloc.limits import CACHE_MULTIPLE


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence in the packed row that are read into slots."""

    start: int
    stop: int
    slots: tuple[int, ...]
    """Slots that store the keys and values."""
    begin: int = 0
    """Position of the first token in its sequence; the slots hold all positions before it."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.begin + self.stop - self.start

    def slot_runs(self) -> list[slice]:
        """Return the slots as runs of neighbours, as those of a prompt's samples often are."""
        runs: list[slice] = []
        for slot in sorted(self.slots):
            if runs and runs[-1].stop == slot:
                runs[-1] = slice(runs[-1].start, slot + 1)
            else:
                runs.append(slice(slot, slot + 1))
        return runs


@dataclass(frozen=True, slots=True)
class Places:
    """Slots and positions of the tokens of one forward."""

    segments: tuple[Segment, ...]
    """Segments at the front of the packed row."""
    num_prefill: int
    """Tokens of segments; after them come the tokens of slot 0, then those of slot 1 …"""
    slots: Tensor
    """(N,) slot of each token after the segments."""
    positions: Tensor
    """(N,) position of each of these tokens."""
    num_rows: int
    """Number of slots with such tokens."""
    row_lengths: Sequence[int]
    """Positions of each of these slots, including this forward's."""
    max_length: int
    """Most positions of any slot, including this forward's."""


class StepPlaces(Protocol):
    """Places that one forward writes to and reads from in a cache."""

    attended_length: int
    """Positions that decoding reads: the longest sample's, rounded up."""

    @abstractmethod
    def store(self, layer: int, key: Tensor, value: Tensor) -> Any:
        """Store the packed row's keys and values (N, heads, head size) of a layer; return the layer's storage."""

    @abstractmethod
    def sequence(self, stored: Any, slot: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (end, heads, head size) of a slot's first positions, valid until the next call."""

    @abstractmethod
    def blocks(self, stored: Any) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks of rows, and their keys and values (rows, length, heads, head size), valid until the next."""


class KVCache:
    """Keys and values of the sequences in slots; between forwards the engine tells it how slots change.

    Subclasses override the methods that they need; by default, all but `places` do nothing.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes of storage held."""
        return 0

    def make_room(self, num_slots: int, length: int, *, longest: int) -> None:
        """Let slots hold ``length`` positions; they will never need more than ``longest``."""

    def places(self, places: Places) -> StepPlaces:
        """Return the cache's places for a forward of these tokens."""
        raise NotImplementedError

    def indices(self, slots: Tensor | int, positions: Tensor) -> Tensor:
        """Return the indices of these positions in a layer's storage with its first two dimensions joined."""
        raise NotImplementedError

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of one slot to others."""

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first ``length`` positions of a slot to an unused one."""

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the first ``length`` positions of two slots."""

    def begin_forward(self) -> None:
        """Bring what a forward reads up to date."""

    def own_layers(self) -> list[tuple[int, tuple[Tensor, Tensor]]]:
        """Return (number, keys and values) of all layers, in order, without a draft model's.

        Keys and values are (slots, capacity, heads, head size), or (pages, page size, heads, head size).
        """
        return []

    def read(self, slot: int, begin: int, end: int) -> Tensor:
        """Return the keys and values of all layers at these positions, as one (bytes,) uint8 tensor on the host."""
        parts = [tensor.index_select(0, places).view(-1).view(torch.uint8)
                 for tensor, places in self._tensors_at(slot, begin, end)]  # fmt: skip
        return torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.uint8)

    def write(self, slot: int, begin: int, end: int, content: Tensor) -> None:
        """Write the content that `read` returned, perhaps on another rank."""
        found = self._tensors_at(slot, begin, end)
        parts = model_parts(content, end - begin, [tensor for tensor, _ in found])
        for (tensor, places), part in zip(found, parts, strict=True):
            tensor.index_copy_(0, places, part)

    def describe(self) -> list[LayerShape]:
        """Return the shapes of all layers, for `prepare`."""
        return [cache_shape(index, *layer) for index, layer in self.own_layers()]

    def _tensors_at(self, slot: int, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values (N, heads, head size), and the indices of a slot's positions in them."""
        self.begin_forward()
        tensors = [tensor.flatten(0, 1) for _, layer in self.own_layers() for tensor in layer]
        if not tensors:
            return []
        places = self.indices(slot, torch.arange(begin, end, device=tensors[0].device))
        return [(tensor, places) for tensor in tensors]

    def prepare(self, shapes: Sequence[LayerShape], device: torch.device) -> None:
        """Allocate layers of these shapes before a forward does."""

    def release(self) -> None:
        """Free the storage."""


class LayerShape(NamedTuple):
    """Shapes and dtypes that a layer stores per position."""

    layer: int
    key: tuple[int, int]
    """Heads and head size."""
    value: tuple[int, int]
    key_dtype: torch.dtype
    value_dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one position's key and value."""
        return sum(like.nbytes for like in self.empty(torch.device("meta")))

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a key and a value of this shape."""
        key = torch.empty(self.key, dtype=self.key_dtype, device=device)
        return key, torch.empty(self.value, dtype=self.value_dtype, device=device)


def cache_shape(layer: int, key: Tensor, value: Tensor) -> LayerShape:
    """Return the shape of a layer with keys and values (…, heads, head size)."""
    return LayerShape(layer, (key.shape[-2], key.shape[-1]), (value.shape[-2], value.shape[-1]), key.dtype, value.dtype)


def model_parts(content: Tensor, num_positions: int, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor's part (positions, heads, head size) of ``content``, as `KVCache.read` returns it.

    ``tensors`` (…, heads, head size) are in the order in which they were read.
    """
    place = 0
    for tensor in tensors:
        shape = (num_positions, *tensor.shape[-2:])
        stop = place + math.prod(shape) * tensor.element_size()
        # Copy, because the part may not be aligned for its dtype.
        yield content[place:stop].to(tensor.device).clone().view(tensor.dtype).view(shape)
        place = stop
    assert place == content.numel(), f"{num_positions} positions hold {place} bytes, got {content.numel()}"


class CapturableCache(KVCache):
    """A cache of decoding steps that CUDA graphs hold: they write to indices that are filled in before each replay."""

    def __init__(self) -> None:
        self.num_slots = 0
        self.capacity = 0
        """Positions that one slot can hold."""
        self.num_allocations = 0
        """Grows whenever storage is allocated or freed."""

    @abstractmethod
    def captured_places(self, indices: Tensor, *, num_rows: int, attended_length: int) -> StepPlaces:
        """Return the places of a captured step; for the arguments see `SlotPlaces`."""

    @abstractmethod
    def host_index(self, slot: int, position: int) -> int:
        """Return `indices` of one position."""

    @abstractmethod
    def padding_index(self, slot: int) -> int:
        """Return an index that no sample uses."""


class SlotCache(CapturableCache):
    """Keys and values (slots, capacity, key-value heads, head size) of every layer, valid within one generation."""

    def __init__(self) -> None:
        super().__init__()
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def make_room(self, num_slots: int, length: int, *, longest: int) -> None:
        if length > self.capacity or num_slots > self.num_slots:
            grown = _rounded(length) if length <= self.capacity else max(_rounded(length), 2 * self.capacity)
            self.reserve(num_slots, max(length, min(grown, longest)))

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Make room for at least this many slots and positions, and keep the slots' content."""
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
        self._layers.clear()
        self.num_slots = self.capacity = 0
        self.num_allocations += 1

    def places(self, places: Places) -> SlotPlaces:
        return SlotPlaces(
            self, self.indices(places.slots, places.positions), num_rows=places.num_rows,
            attended_length=min(self.capacity, _rounded(places.max_length)), segments=places.segments,
            num_prefill=places.num_prefill,
        )  # fmt: skip

    def indices(self, slots: Tensor | int, positions: Tensor) -> Tensor:
        return slots * self.capacity + positions

    def captured_places(self, indices: Tensor, *, num_rows: int, attended_length: int) -> SlotPlaces:
        return SlotPlaces(self, indices, num_rows=num_rows, attended_length=attended_length)

    def host_index(self, slot: int, position: int) -> int:
        return slot * self.capacity + position

    def padding_index(self, slot: int) -> int:
        return (slot + 1) * self.capacity - 1

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the storage of a layer, given its ``key`` and ``value`` (…, heads, head size)."""
        stored = self._layers.get(index)
        if stored is None or not (fits(stored[0], key) and fits(stored[1], value)):
            stored = self._layers[index] = (self._allocate(key), self._allocate(value))
        return stored

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        if not length or not targets:
            return
        for layer in self._layers.values():
            for tensor in layer:
                prefix = tensor[source, :length]
                for target in targets:
                    tensor[target, :length] = prefix

    def move(self, source: int, target: int, length: int) -> None:
        self.copy(source, [target], length)

    def swap(self, first: int, second: int, length: int) -> None:
        for layer in self._layers.values() if length else ():
            for tensor in layer:
                kept = tensor[first, :length].clone()
                tensor[first, :length] = tensor[second, :length]
                tensor[second, :length] = kept

    def own_layers(self) -> list[tuple[int, tuple[Tensor, Tensor]]]:
        return sorted(self._layers.items(), key=itemgetter(0))

    def prepare(self, shapes: Sequence[LayerShape], device: torch.device) -> None:
        for shape in shapes:
            self.layer(shape.layer, *shape.empty(device))

    def _allocate(self, like: Tensor) -> Tensor:
        self.num_allocations += 1
        # Zeros, because attention gives positions after a sequence's end the weight 0, and 0 times NaN is NaN.
        return torch.zeros(
            self.num_slots, self.capacity, like.shape[-2], like.shape[-1], dtype=like.dtype, device=like.device
        )


class SlotPlaces(StepPlaces):
    """One forward's places in a `SlotCache`; for the arguments see `Places`.

    ``indices`` (N,) are those of the rows' tokens in the storage seen as (slots * capacity, …).
    """

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
        self._cache = cache
        self._indices = indices
        self._num_rows = num_rows
        self.attended_length = attended_length
        self._runs = [(segment, run) for segment in segments for run in segment.slot_runs()]
        self._num_prefill = num_prefill
        self._sources: Tensor | None = None
        """Tokens of the packed row that ``indices`` belong to. None: the rows' tokens, and segments are copied one by
        one."""
        if segments and indices.device.type != "cpu":
            self._write_at_once(segments)

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        stored = self._cache.layer(layer, key, value)
        for storage, new in zip(stored, (key, value), strict=True):
            for segment, run in self._runs:
                storage[run, segment.begin : segment.end] = new[segment.start : segment.stop]
            own = new[self._num_prefill :] if self._sources is None else new.index_select(0, self._sources)
            storage.flatten(0, 1).index_copy_(0, self._indices, own)
        return stored

    def _write_at_once(self, segments: Sequence[Segment]) -> None:
        """Write segments and rows by one call per layer, on devices where launching many calls costs more."""
        spans = [(segment, slot * self._cache.capacity) for segment in segments for slot in segment.slots]
        rows = torch.arange(self._num_prefill, self._num_prefill + len(self._indices))
        sources = [*(torch.arange(segment.start, segment.stop) for segment, _ in spans), rows]
        targets = [torch.arange(first + segment.begin, first + segment.end) for segment, first in spans]
        self._sources = torch.cat(sources).to(self._indices.device)
        if targets:
            self._indices = torch.cat([torch.cat(targets).to(self._indices.device), self._indices])
        self._runs = []

    def sequence(self, stored: tuple[Tensor, Tensor], slot: int, end: int) -> tuple[Tensor, Tensor]:
        return stored[0][slot, :end], stored[1][slot, :end]

    def blocks(self, stored: tuple[Tensor, Tensor]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        rows, length = self._num_rows, self.attended_length
        yield slice(rows), stored[0][:rows, :length], stored[1][:rows, :length]


def _rounded(length: int) -> int:
    return -(-length // CACHE_MULTIPLE) * CACHE_MULTIPLE


def fits(stored: Tensor, brought: Tensor) -> bool:
    return stored.shape[-2:] == brought.shape[-2:] and stored.dtype == brought.dtype and stored.device == brought.device
