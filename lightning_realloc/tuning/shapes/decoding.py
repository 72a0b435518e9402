"""Batch sizes and context lengths of a generation engine's decoding steps, from response lengths alone.

Assumes continuous batching: a free slot is filled at once, so that batches shrink only when no sequence waits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MAX_SEGMENTS = 8
"""Segments that a generation is divided into at most. More of them follow the batch size more closely."""
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class DecodeSegment(NamedTuple):
    """Consecutive decoding steps with about the same batch."""

    steps: float
    """Number of decoding steps."""
    sequences: float
    """Mean number of sequences in a step."""
    context: float
    """Mean number of tokens that a sequence attends to."""
    longest: float
    """Number of tokens that the longest running sequence attends to. Rows are padded to it when they read the cache."""


def sample_lengths(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return ``count`` quantiles of the equally likely ``lengths``, with the longest, in a low-discrepancy order.

    Long and short lengths are spread evenly over the order.
    """
    ordered = sorted(lengths)
    chosen = [ordered[math.ceil((index + 1) * len(ordered) / count) - 1] for index in range(count)]
    return tuple(length for _, length in sorted(((i * _GOLDEN_RATIO) % 1, length) for i, length in enumerate(chosen)))


@lru_cache(maxsize=4096)
def plan_decoding(lengths: tuple[int, ...], prompt_tokens: int, count: int, slots: int) -> tuple[DecodeSegment, ...]:
    """Return the segments of decoding ``count`` sequences in ``slots`` slots, from the first step to the last.

    The forward pass of a prompt yields the first token of its response, which no decoding step is needed for.

    Args:
        lengths: Equally likely response lengths.
        prompt_tokens: Mean length of a prompt.
    """
    starts, ends = [], []
    free = [0] * min(slots, count)
    for length in sample_lengths(lengths, count):
        start = heapq.heappop(free)
        heapq.heappush(free, start + length - 1)
        starts.append(start)
        ends.append(start + length - 1)
    last = max(ends, default=0)
    if last == 0:
        return ()
    first, end = np.array(starts)[:, None], np.array(ends)[:, None]
    edges = np.linspace(0, last, min(MAX_SEGMENTS, last) + 1)
    left, right = np.maximum(first, edges[:-1]), np.minimum(end, edges[1:])
    running = np.maximum(0, right - left)  # steps of each sequence in each segment
    attended = np.where(running > 0, prompt_tokens + (left + right) / 2 - first, 0)
    columns = np.diff(edges), running.sum(axis=0), (running * attended).sum(axis=0), attended.max(axis=0)
    return tuple(
        DecodeSegment(float(steps), float(total / steps), float(contexts / total), float(longest))
        for steps, total, contexts, longest in zip(*columns, strict=True)
        if total > 0
    )


def count_step_shapes(segments: Iterable[DecodeSegment]) -> int:
    """Return the number of shapes that steps are padded to for CUDA graphs.

    There are four sizes to an octave of sequences, and two to an octave of lengths from 128 on.
    """
    sizes = ((max(1.0, segment.sequences), max(128.0, segment.longest)) for segment in segments)
    return len({(math.ceil(4 * math.log2(rows)), math.ceil(2 * math.log2(length))) for rows, length in sizes})
