"""Shapes of captured decoding steps: few sizes to which rows, tokens and lengths are padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_realloc.generation.cache.kv_cache import CapturableCache
from lightning_realloc.generation.core.step import DecodeRow

_READING_IN_TOKENS = 256
"""Tokens whose products take as long as reading the weights, measured on H100 and H200."""
_MOST_DETOUR = 1.25
"""Factor by which a step may take longer when it runs as a larger shape."""


class StepShape(NamedTuple):
    """Shape that a graph is captured for."""

    rows: int
    width: int
    """Tokens of each row."""
    length: int
    """Positions that each row attends to."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.width

    def covers(self, other: StepShape) -> bool:
        """Return whether a step of the other shape can run as one of this shape in about the same time."""
        is_larger = all(ours >= theirs for ours, theirs in zip(self, other, strict=True))
        detour = (_READING_IN_TOKENS + self.num_tokens) / (_READING_IN_TOKENS + other.num_tokens)
        return is_larger and detour <= _MOST_DETOUR and self.length <= 2 * other.length


def rounded_up(number: int, per_octave: int) -> int:
    """Round up to a multiple of the power of two below ``number`` over ``per_octave``; small numbers stay."""
    step = max(1, (1 << number.bit_length() - 1) // per_octave)
    return -(-number // step) * step


def within_window(model: nn.Module, length: int, longest: int) -> int:
    """Return a length rounded up from ``longest``, without leaving a sliding window that ``longest`` does not leave.

    Attention refuses some models beyond their window.
    """
    window = getattr(getattr(model, "config", None), "sliding_window", None)
    return min(length, window) if window and longest <= window else length


def filled_up(
    rows: Sequence[DecodeRow], shape: StepShape, cache: CapturableCache
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return token ids, places in sequences, cache indices and positions of the rows' tokens, padded to the shape.

    Padding reads position 0, and writes to an index that no sample uses.
    """
    if shape.width == 1:  # the host's time counts
        ids = [row.tokens[0] for row in rows]
        positions = [row.position for row in rows]
        places = [cache.host_index(slot, position) for slot, position in enumerate(positions)]
        shifted = [row.position + row.shift for row in rows]
    else:
        ids, positions, places, shifted = [], [], [], []
        for slot, row in enumerate(rows):
            rest = shape.width - len(row.tokens)
            ids += [*row.tokens, *[0] * rest]
            positions += [*range(row.position, row.end), *[0] * rest]
            shifted += [*range(row.position + row.shift, row.end + row.shift), *[0] * rest]
            places += [cache.host_index(slot, position) for position in range(row.position, row.end)]
            places += [cache.padding_index(slot)] * rest
    rest = shape.num_tokens - len(ids)
    padding = [cache.padding_index(slot) for slot in range(len(rows), shape.rows) for _ in range(shape.width)]
    return ids + [0] * rest, positions + [0] * rest, places + padding, shifted + [0] * rest


def without_filling(logits: Tensor, rows: Sequence[DecodeRow], width: int) -> Tensor:
    """Return the logits (N, V) without those of padding."""
    if width == 1 or all(len(row.tokens) == width for row in rows):
        return logits[: len(rows) * width]
    kept = [slot * width + place for slot, row in enumerate(rows) for place in range(len(row.tokens))]
    return logits[torch.tensor(kept, device=logits.device)]
