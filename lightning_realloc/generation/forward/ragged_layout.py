"""How attention reads slots that have different numbers of tokens: a grid that most fit into, and what hangs over.

A grid pads every slot to its width, so one long draft among many short ones would cost as much as if all were long.
Tokens beyond the width attend in a call of their own for each slot instead, where that is cheaper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CALL_IN_TOKENS = {"cpu": 16.0}
"""What one more call of attention costs, in padded tokens, by the type of device. Elsewhere padding costs less than any
call."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """The last tokens of a slot, those beyond the grid's width."""

    slot: int
    start: int
    """Where they stand behind the grid."""
    stop: int


class PaddedRows:
    """Where the tokens of all slots, those of slot 0 first, stand in a grid (slots, width) and behind it."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        """Lay out ``counts`` tokens of each slot, one at least."""
        self.width = best_width(counts, _CALL_IN_TOKENS.get(device.type))
        self._num_rows = len(counts)
        self.overhangs: list[Overflow] = []
        self.longest_overhang = max(max(counts, default=0) - self.width, 0)
        """Tokens."""
        self._size = self._num_rows * self.width
        self._places: Tensor | None = None
        if self.longest_overhang or sum(counts) < self._size:
            self._places = torch.tensor(self._place(counts), device=device)

    def lay_out(self, tokens: Tensor) -> Tensor:
        """Return what each token has (N, …) as (slots * width, …), zero where a slot has fewer, overhangs behind."""
        if self._places is None:
            return tokens
        return tokens.new_zeros(self._size, *tokens.shape[1:]).index_copy_(0, self._places, tokens)

    def of(self, laid_out: Tensor) -> Tensor:
        """Return the grid (slots, width, …) of tokens that are laid out, as a view."""
        return laid_out[: self._num_rows * self.width].view(self._num_rows, self.width, *laid_out.shape[1:])

    def tokens_of(self, laid_out: Tensor) -> Tensor:
        """Return (N, …): the inverse of :meth:`lay_out`."""
        return laid_out if self._places is None else laid_out.index_select(0, self._places)

    def _place(self, counts: Sequence[int]) -> list[int]:
        """Return where each token stands, and note what hangs over."""
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
    """Return the width of the cheapest grid: its padding, and a call for each slot that has more tokens than that.

    Args:
        counts: Tokens of each slot.
        call_in_tokens: What a call costs, in padded tokens; None: more than any padding.
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
