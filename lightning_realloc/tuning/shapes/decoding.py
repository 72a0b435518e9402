"""How many sequences does a generation engine decode at a time, and how much do they remember? From lengths alone.

Continuous batching: a slot that is freed is filled at once, so batches thin out only when nobody waits any more.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MAX_STRETCHES = 8
"""Into how many stretches of equal batches a generation is divided at most."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class Stretch(NamedTuple):
    """Decoding steps that are alike."""

    steps: float
    sequences: float
    """Decoded in each step, as a mean."""
    context: float
    """Tokens that one of them attends to, as a mean."""


def sample_lengths(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return ``count`` response lengths as the equally likely ``lengths`` suggest, the longest among them, in an order
    that has long and short ones everywhere."""
    ordered = sorted(lengths)
    chosen = [ordered[math.ceil((index + 1) * len(ordered) / count) - 1] for index in range(count)]
    return tuple(length for _, length in sorted(((i * _GOLDEN) % 1, length) for i, length in enumerate(chosen)))


@lru_cache(maxsize=4096)
def plan_decoding(lengths: tuple[int, ...], prompt_tokens: int, count: int, slots: int) -> tuple[Stretch, ...]:
    """Return what decoding ``count`` sequences in ``slots`` slots is like, from its first step to its last.

    ``lengths`` are equally likely response lengths; a prompt's own pass yields the first token of its response.
    """
    begins, ends = [], []
    free = [0] * min(slots, count)
    for length in sample_lengths(lengths, count):
        begin = heapq.heappop(free)
        heapq.heappush(free, begin + length - 1)
        begins.append(begin)
        ends.append(begin + length - 1)
    last = max(ends, default=0)
    if last == 0:
        return ()
    first, behind = np.array(begins)[:, None], np.array(ends)[:, None]
    edges = np.linspace(0, last, min(MAX_STRETCHES, last) + 1)
    left, right = np.maximum(first, edges[:-1]), np.minimum(behind, edges[1:])
    running = np.maximum(0, right - left)  # steps of each sequence in each stretch
    remembered = running * (prompt_tokens + (left + right) / 2 - first)
    steps = np.diff(edges)
    total = running.sum(axis=0)
    return tuple(
        Stretch(float(n), float(t / n), float(r / t))
        for n, t, r in zip(steps, total, remembered.sum(axis=0), strict=True)
        if t > 0
    )
