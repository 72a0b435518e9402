"""Layout of one forward: the tokens that it reads, their places in the packed row, and the masks of its attention.

Attention reads the slots' tokens as a grid. A grid pads every slot to its width, so one long draft among many short
ones would cost as much as if all were long. Where it is cheaper, tokens beyond the width attend in a call per slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_realloc.generation.cache.kv_cache import Segment, StepPlaces
from lightning_realloc.generation.core.step import PrefillChunk

_CALL_IN_TOKENS = {"cpu": 16.0}
"""Cost of one more call of attention, in padded tokens, by device type. On other devices padding is always cheaper."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """Tokens of a slot that do not fit into the grid."""

    slot: int
    start: int
    """Index of the first token among the tokens that are laid out."""
    stop: int


class PaddedRows:
    """Places of all slots' tokens, at least one each, in a grid (slots, width) and after it."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.width = best_width(counts, _CALL_IN_TOKENS.get(device.type))
        self._num_rows = len(counts)
        self.overhangs: list[Overflow] = []
        self.longest_overhang = max(max(counts, default=0) - self.width, 0)
        """Most tokens of a slot that do not fit into the grid."""
        self._size = self._num_rows * self.width
        self._places: Tensor | None = None
        """(N,) index of each token among those laid out; None: tokens and grid are the same."""
        if self.longest_overhang or sum(counts) < self._size:
            self._places = torch.tensor(self._place(counts), device=device)

    def lay_out(self, tokens: Tensor) -> Tensor:
        """Return values of the tokens (N, …) as the grid's rows (slots * width, …), zero-padded, then the overflow."""
        if self._places is None:
            return tokens
        return tokens.new_zeros(self._size, *tokens.shape[1:]).index_copy_(0, self._places, tokens)

    def as_grid(self, laid_out: Tensor) -> Tensor:
        """Return the grid (slots, width, …) of values that are laid out, as a view."""
        return laid_out[: self._num_rows * self.width].view(self._num_rows, self.width, *laid_out.shape[1:])

    def tokens_of(self, laid_out: Tensor) -> Tensor:
        """Return the tokens' values (N, …): the inverse of :meth:`lay_out`."""
        return laid_out if self._places is None else laid_out.index_select(0, self._places)

    def _place(self, counts: Sequence[int]) -> list[int]:
        """Return the place of each token, and add the slots' overflows."""
        places: list[int] = []
        for slot, count in enumerate(counts):
            inside = min(count, self.width)
            places.extend(range(slot * self.width, slot * self.width + inside))
            if count > inside:
                start, self._size = self._size, self._size + count - inside
                places.extend(range(start, self._size))
                self.overhangs.append(Overflow(slot, start, self._size))
        return places


def best_width(counts: Sequence[int], call_in_tokens: float | None) -> int:
    """Return the width of the cheapest grid: its padding, plus one call for each slot with more tokens.

    ``call_in_tokens`` is the cost of a call in padded tokens; None: more than any padding.
    """
    widest = max(counts, default=0)
    if call_in_tokens is None or len(counts) * widest - sum(counts) <= call_in_tokens:
        return widest
    slots_by_count = Counter(counts)
    best, least = widest, float("inf")
    inside, longer = sum(counts), 0
    for width in range(widest, 0, -1):  # inside: tokens of the grid; longer: slots with more
        cost = len(counts) * width - inside + call_in_tokens * longer
        if cost < least:
            best, least = width, cost
        longer += slots_by_count[width]
        inside -= longer
    return best


@dataclass(slots=True)
class PackedStep:
    """Inputs that the layers of one forward share.

    The packed row begins with segments: tokens of new prompts, or tokens that follow a slot's content. After them come
    the tokens of every running sample: its last one, and the tokens drafted to follow it.
    """

    cached: StepPlaces
    """Places that the forward writes to and reads from in the cache."""
    positions: Tensor
    """(N,) position of each token of the running samples, slot by slot."""
    counts: Sequence[int]
    """Number of these tokens of each slot."""
    row_lengths: Sequence[int]
    """Positions of each of these slots, including this forward's."""
    max_length: int
    """Largest position + 1."""
    segments: tuple[Segment, ...] = ()
    num_prefill: int = 0
    """Tokens of segments."""
    blocks: Tensor | None = None
    """(num_prefill,) image that each token of segments belongs to, -1 for text; None: tokens see earlier ones alone."""
    grid: PaddedRows = field(init=False)
    attended: set[int] = field(default_factory=set, init=False)
    """Layers that have attended."""
    _masks: dict[tuple[int | None, int, torch.dtype], Tensor] = field(default_factory=dict, init=False)
    _segment_bounds: tuple[Tensor, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.grid = PaddedRows(self.counts, self.positions.device)

    @property
    def reads_from_the_beginning(self) -> bool:
        """Whether there are segments, and each begins its sequence."""
        return bool(self.segments) and not any(segment.begin for segment in self.segments)

    def segment_bounds(self) -> tuple[Tensor, int]:
        """Return the segments' bounds (segments + 1,) int32 and the longest segment's tokens; made once per forward."""
        if self._segment_bounds is None:
            bounds = [0, *(segment.stop for segment in self.segments)]
            longest = max(segment.stop - segment.start for segment in self.segments)
            self._segment_bounds = torch.tensor(bounds, dtype=torch.int32, device=self.positions.device), longest
        return self._segment_bounds

    def decode_mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask (slots, 1, repeats * width, attended length), made once per forward.

        Additive and in the queries' dtype, because SDPA would convert a boolean mask again in every layer.
        """
        repeats = repeats if self.grid.width > 1 else 1  # a single position broadcasts
        mask = self._masks.get((window, repeats, dtype))
        if mask is None:
            keys = torch.arange(self.cached.attended_length, device=self.positions.device)
            distance = self.grid.as_grid(self.grid.lay_out(self.positions))[..., None] - keys
            mask = _additive(is_visible(distance, window), dtype)
            mask = self._masks[window, repeats, dtype] = mask.repeat(1, repeats, 1)[:, None]
        return mask

    def overhang_mask(self, overhang: Overflow, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask (T, S) of a slot's last T tokens, which attend to the slot's S positions.

        A view of one mask for all slots, made once per forward: it depends on distances only.
        """
        longest, most = self.max_length, self.grid.longest_overhang
        mask = self._masks.get((window, 0, dtype))
        if mask is None:
            queries, keys = (torch.arange(size, device=self.positions.device) for size in (most, longest + most))
            distance = longest + queries[:, None] - keys
            mask = self._masks[window, 0, dtype] = _additive(is_visible(distance, window), dtype)
        count = overhang.stop - overhang.start
        return mask[:count, longest + count - self.row_lengths[overhang.slot] : longest + count]


def is_visible(distance: Tensor, window: int | None) -> Tensor:
    """Return whether a query sees a key ``distance`` positions before it; ``window``: last positions that it sees."""
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores: 0 where ``keep`` is True, else -inf."""
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, float("-inf"))


def segments_of(prefills: Sequence[PrefillChunk]) -> tuple[Segment, ...]:
    """Return the places of prefills in the packed row; those without tokens have none."""
    segments, start = [], 0
    for prefill in prefills:
        stop = start + len(prefill.tokens)
        if stop > start:
            segments.append(Segment(start, stop, prefill.slots, prefill.begin))
        start = stop
    return tuple(segments)
