"""Keys and values in pages of a fixed number of positions, within a bound on bytes.

The scheduler assigns pages to slots (`PageTables`); this module stores their content. Attention reads whole pages from
a buffer that all layers and forwards share. Pages and buffer together stay within the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import (
    CapturableCache,
    KVCache,
    Places,
    Segment,
    StepPlaces,
    fits,
)
from lightning_realloc.generation.cache.page_table import PageTables
from lightning_realloc.limits import BUFFER_SHARE, PAGE_SIZE

LayerKey = tuple[int, int]
"""Model, 0 for the target and 1 for its draft model, and the layer's number in it."""
Stored = tuple[Tensor, Tensor]
"""Keys and values (pages, page size, heads, head size) of a layer."""


class PageSizes(NamedTuple):
    """Sizes of the storage and tables of a `PagedCache` in one call."""

    num_pages: int
    buffer_pages: int
    """Pages of one layer's keys and values that the buffer holds."""
    num_slots: int
    pages_per_slot: int
    """Most pages of a slot."""


class PagedCache(CapturableCache):
    """Keys and values of every layer in pages, with the buffer at most ``max_bytes``, and a position more for padding.

    Contents are valid within one generation only; afterwards the storage is reused.

    Args:
        num_caches: Caches that have an equal share of ``max_bytes`` each, this one among them.
    """

    def __init__(self, max_bytes: int, *, page_size: int = PAGE_SIZE, num_caches: int = 1) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.num_caches = num_caches
        self.page_size = page_size
        self.tables = PageTables(0, page_size, num_slots=0)
        self.table = torch.zeros(0, 0, dtype=torch.long)
        """(slots, most pages) pages of each slot on the device, 0 where it has none."""
        self.buffer_pages = 0
        """Pages of one layer's keys and values that the buffer holds."""
        self._rows = self.table
        self._shapes: dict[LayerKey, Stored] = {}
        """Empty tensors with the shape, dtype and device of a position."""
        self._layers: dict[LayerKey, Stored] = {}
        self._positions: dict[LayerKey, Stored] = {}
        """The same memory as (positions, heads, head size), and one position more."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._num_pages = self._num_defined = 0

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes + sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def release(self) -> None:
        self._layers.clear()
        self._positions.clear()
        self._buffer = self._buffer.new_empty(0)
        self._num_pages = self._num_defined = self.buffer_pages = 0
        self.num_allocations += 1

    # ---- at the start of a call
    def forget_shapes(self) -> None:
        """Let the next forward of each model set its layers' shapes and store nothing, before :meth:`plan_pages`."""
        self._shapes = {}

    def plan_pages(
        self,
        lengths: Sequence[int],
        *,
        num_slots: int,
        may_grow: bool = False,
        largest: Callable[[Sequence[int]], Sequence[int]] = list,
    ) -> PageSizes:
        """Return the sizes for a call, for :meth:`allocate`.

        Args:
            lengths: Most positions of each sample.
            may_grow: Whether samples of any length that fits may arrive later.
            largest: Returns the largest value of each number over the ranks that need equal numbers of pages.

        Raises:
            GenerationError: if the bound does not hold the longest sample.
        """
        longest, most = max(lengths, default=1), self.max_bytes // self.num_caches
        least = self.tables.pages_for(longest)
        page_bytes, buffer_page_bytes = largest(self.measure_page())
        needed = least * (page_bytes + buffer_page_bytes)
        if needed > most:
            groups = "" if self.num_caches == 1 else f", for each of {self.num_caches} groups of samples"
            suffices = needed * self.num_caches
            raise GenerationError(
                f"max_cache_bytes={self.max_bytes} must hold the longest sample of a call{groups}, and one here may "
                f"reach {longest} tokens of prompt and response: {least} pages of {self.page_size} tokens, "
                f"{page_bytes} bytes each in all layers, and {least * buffer_page_bytes} bytes to read one layer, "
                f"{needed} bytes together; raise max_cache_bytes to at least {suffices}, lower max_new_tokens, or "
                "shorten prompts"
            )
        if may_grow:
            least = most // (page_bytes + buffer_page_bytes)
            lengths = [least * self.page_size] * num_slots
        share = most // BUFFER_SHARE // buffer_page_bytes
        left = (most - least * page_bytes) // buffer_page_bytes
        buffer_pages = min(max(share, least), left, num_slots * least)
        of_use = sum(self.tables.pages_for(length) for length in sorted(lengths)[-num_slots:]) or least
        num_pages = min((most - buffer_pages * buffer_page_bytes) // page_bytes, of_use)
        return PageSizes(num_pages, buffer_pages, num_slots, least)

    def allocate(self, sizes: PageSizes) -> PageTables:
        """Allocate pages and return empty tables for a call."""
        num_pages, buffer_pages, num_slots, least = sizes
        self._allocate(num_pages, buffer_pages)
        self.tables = PageTables(num_pages, self.page_size, num_slots=num_slots)
        self._rows = torch.zeros(num_slots, least, dtype=torch.long)
        if self.table.shape != self._rows.shape or self.table.device != self._buffer.device:
            self.table = torch.empty_like(self._rows, device=self._buffer.device)
            self.num_allocations += 1
        self.table.zero_()
        self.num_slots, self.capacity = num_slots, least * self.page_size
        return self.tables

    def measure_page(self) -> list[int]:
        """Return the bytes of one page in all layers, and in the layer that needs most."""
        layers = list(map(self._layer_bytes, self._shapes.values()))
        return [sum(layers), max(layers)]

    def _layer_bytes(self, shape: Stored) -> int:
        return self.page_size * sum(one.shape[-2] * one.shape[-1] * one.element_size() for one in shape)

    def _allocate(self, num_pages: int, buffer_pages: int) -> None:
        """Allocate storage for the pages, unless there is enough of the right shapes."""
        known = self._layers.keys() == self._shapes.keys() and all(
            fits(stored, shape) for layer, shapes in self._shapes.items()
            for stored, shape in zip(self._layers[layer], shapes, strict=True)
        )  # fmt: skip
        if known and num_pages <= self._num_pages and buffer_pages <= self.buffer_pages:
            return
        self.release()
        for layer, (key, value) in self._shapes.items():
            count = num_pages * self.page_size
            keys, values = (one.new_empty(count + 1, *one.shape[-2:]) for one in (key, value))
            self._positions[layer] = (keys, values)
            self._layers[layer] = (self._as_pages(keys), self._as_pages(values))
        device = next(iter(self._shapes.values()))[0].device
        self._buffer = torch.empty(buffer_pages * self.measure_page()[1], dtype=torch.uint8, device=device)
        self._num_pages, self.buffer_pages = num_pages, buffer_pages

    def _as_pages(self, positions: Tensor) -> Tensor:
        pages: Tensor = positions[:-1].unflatten(0, (-1, self.page_size))
        return pages

    # ---- between forwards
    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of one slot to others; shared pages need no copy."""
        tables, count = self.tables.tables, self.tables.pages_for(length)
        pairs = [
            (old, new) for target in targets
            for old, new in zip(tables[source][:count], tables[target], strict=False) if old != new
        ]  # fmt: skip
        if not pairs:
            return
        self._define_pages()
        old, new = torch.tensor(pairs, device=self.table.device).T
        for layer in self._layers.values():
            for tensor in layer:
                tensor.index_copy_(0, new, tensor.index_select(0, old))

    def move(self, source: int, target: int, length: int) -> None:
        assert not self.tables.tables[target], f"slot {target} holds pages"
        self.tables.swap(source, target)

    def swap(self, first: int, second: int, length: int) -> None:
        self.tables.swap(first, second)

    def own_layers(self) -> list[tuple[int, Stored]]:
        return [
            (index, stored) for (model, index), stored in sorted(self._layers.items(), key=itemgetter(0)) if not model
        ]

    # ---- within one forward
    def places(self, places: Places) -> PagedPlaces:
        self.begin_forward()
        return PagedPlaces(self, places)

    def begin_forward(self) -> None:
        """Update the table on the device, and fill pages that are used for the first time."""
        self._define_pages()
        self._renew_table()

    def captured_places(self, indices: Tensor, *, num_rows: int, attended_length: int) -> CapturedPages:
        return CapturedPages(self, indices, num_rows=num_rows, attended_length=attended_length)

    def host_index(self, slot: int, position: int) -> int:
        page, offset = divmod(position, self.page_size)
        return self.tables.tables[slot][page] * self.page_size + offset

    def padding_index(self, slot: int) -> int:
        return self._num_pages * self.page_size

    def layer(self, layer: LayerKey, key: Tensor, value: Tensor) -> Stored | None:
        """Return the storage of a layer; None in the forward that sets its shape, which must not use the result."""
        if layer not in self._shapes:
            self._shapes[layer] = (key.new_empty(0, *key.shape[-2:]), value.new_empty(0, *value.shape[-2:]))
        return self._layers.get(layer)

    def write_layer(self, layer: LayerKey, targets: Tensor, new: Stored) -> None:
        """Write keys and values (N, heads, head size) of a layer to these indices (N,)."""
        for positions, part in zip(self._positions[layer], new, strict=True):
            positions.index_copy_(0, targets, part)

    def indices(self, slots: Tensor | int, positions: Tensor) -> Tensor:
        return self.table[slots, positions // self.page_size] * self.page_size + positions % self.page_size

    def span(self, slot: int, begin: int, end: int) -> Tensor:
        """Return the indices of a slot's positions from ``begin`` to ``end``."""
        return self.indices(slot, torch.arange(begin, end, device=self.table.device))

    def gather(self, stored: Stored, pages: Tensor) -> Stored:
        """Copy pages (P) of a layer to the buffer; return their positions (P * page size, heads, head size)."""
        keys, values = stored
        num_bytes = len(pages) * keys[0].nbytes
        both = (self._buffer[:num_bytes], self._buffer[num_bytes : num_bytes + len(pages) * values[0].nbytes])
        read = []
        for storage, buffer in zip(stored, both, strict=True):
            target = buffer.view(storage.dtype).view(len(pages), *storage.shape[1:])
            read.append(torch.index_select(storage, 0, pages, out=target).flatten(0, 1))
        return read[0], read[1]

    def _define_pages(self) -> None:
        """Fill pages with zeros before their first use: masked positions get the weight 0, and 0 times NaN is NaN."""
        touched = max(1, self.tables.num_touched)  # page 0 stands for missing ones
        if self._layers and touched > self._num_defined:
            end = min(self._num_pages, max(touched, 2 * self._num_defined))
            for layer in self._layers.values():
                for tensor in layer:
                    tensor[self._num_defined : end].zero_()
            self._num_defined = end

    def _renew_table(self) -> None:
        if self.tables.changed:
            for slot in self.tables.changed:
                pages = self.tables.tables[slot]
                self._rows[slot, : len(pages)] = torch.tensor(pages, dtype=torch.long)
                self._rows[slot, len(pages) :] = 0
            self.tables.changed.clear()
            self.table.copy_(self._rows, non_blocking=True)


class DraftCache(KVCache):
    """Keys and values of a draft model, in the pages of its target: they follow the target's slots."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def places(self, places: Places) -> PagedPlaces:
        self._cache.begin_forward()
        return PagedPlaces(self._cache, places, model=1)


class PagedPlaces(StepPlaces):
    """One forward's places in a `PagedCache`: where each token is written, and which pages the rows read."""

    def __init__(self, cache: PagedCache, places: Places, *, model: int = 0) -> None:
        self._cache = cache
        self._model = model
        size = cache.page_size
        self._sources, self._targets = self._writes(places)
        widths = [cache.tables.pages_for(length) for length in places.row_lengths]
        self.attended_length = max(widths, default=0) * size
        self._blocks = [
            (slice(first, stop), cache.table[first:stop, :width].reshape(-1))
            for first, stop, width in blocks_of(widths, cache.buffer_pages)
        ]

    def _writes(self, places: Places) -> tuple[Tensor | None, Tensor | None]:
        """Return the tokens of the packed row to write, and their indices; None: all tokens, and no index."""
        cache, rows = self._cache, None
        if places.num_rows:
            rows = cache.indices(places.slots, places.positions)
        if not places.segments:
            return None, rows
        spans = [span for segment in places.segments for span in _written(segment, cache.tables)]
        device = places.positions.device
        sources = [torch.arange(segment.start + begin - segment.begin, segment.stop, device=device)
                   for segment, _, begin in spans]  # fmt: skip
        targets = [cache.span(slot, begin, segment.end) for segment, slot, begin in spans]
        if rows is not None:
            sources.append(torch.arange(places.num_prefill, places.num_prefill + len(rows), device=device))
            targets.append(rows)
        return (torch.cat(sources), torch.cat(targets)) if targets else (None, None)

    def store(self, layer: int, key: Tensor, value: Tensor) -> Stored | None:
        stored = self._cache.layer((self._model, layer), key, value)
        if stored is not None and self._targets is not None:
            if self._sources is not None:
                key, value = key.index_select(0, self._sources), value.index_select(0, self._sources)
            self._cache.write_layer((self._model, layer), self._targets, (key, value))
        return stored

    def sequence(self, stored: Stored, slot: int, end: int) -> Stored:
        pages = self._cache.table[slot, : self._cache.tables.pages_for(end)]
        keys, values = self._cache.gather(stored, pages)
        return keys[:end], values[:end]

    def blocks(self, stored: Stored) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for rows, pages in self._blocks:
            keys, values = self._cache.gather(stored, pages)
            count = rows.stop - rows.start
            yield rows, keys.unflatten(0, (count, -1)), values.unflatten(0, (count, -1))


class CapturedPages(PagedPlaces):
    """Places of a captured step in a `PagedCache`: all rows read as many pages, those in the table at each replay."""

    def __init__(self, cache: PagedCache, indices: Tensor, *, num_rows: int, attended_length: int) -> None:
        self._cache, self._model = cache, 0
        self._sources, self._targets = None, indices
        width = cache.tables.pages_for(attended_length)
        self.attended_length = width * cache.page_size
        self._blocks = [
            (slice(first, stop), cache.table[first:stop, :width].reshape(-1))
            for first, stop, _ in blocks_of([width] * num_rows, cache.buffer_pages)
        ]


def _written(segment: Segment, tables: PageTables) -> list[tuple[Segment, int, int]]:
    """Return (segment, slot, first position to write) for each slot; shared pages are written by the first slot
    only."""
    spans, first = [], segment.slots[:1]
    for slot in segment.slots:
        begin = segment.begin
        if slot not in first:
            pages = list(zip(tables.tables[first[0]], tables.tables[slot], strict=False))
            shared = next((index for index, (one, other) in enumerate(pages) if one != other), len(pages))
            begin = max(begin, shared * tables.page_size)
        spans.append((segment, slot, begin))
    return [span for span in spans if span[2] < segment.end]


def blocks_of(widths: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """Return blocks of rows (first, stop, pages per row) with at most ``most`` pages, or a single row."""
    blocks, first, widest = [], 0, 0
    for row, width in enumerate(widths):
        if row > first and (row + 1 - first) * max(widest, width) > most:
            blocks.append((first, row, widest))
            first, widest = row, 0
        widest = max(widest, width)
    return [*blocks, (first, len(widths), widest)] if widths else []
