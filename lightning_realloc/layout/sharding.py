"""Regions of a parameter at one place of the layout's axes, and their offsets in the local tensor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from lightning_realloc.layout.cuts import Cut, Interval, Intervals, total_length
from lightning_realloc.layout.dims import Share
from lightning_realloc.layout.region import Region


@dataclass(frozen=True, slots=True)
class Piece:
    """A region that a rank holds, and its place in the rank's local tensor."""

    region: Region
    offset: tuple[int, ...]
    """First index of the region in the local tensor, along every dim."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The local tensor at one coordinate: its shape and the pieces that fill it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """Empty when the local tensor has no elements."""


@lru_cache(maxsize=65536)
def local_shard(shape: tuple[int, ...], cuts: tuple[Cut, ...], shares: tuple[Share, ...]) -> LocalShard:
    """Return the part of a parameter of ``shape`` that is left after ``cuts``, given the rank's share of each.

    The cuts must allow the numbers of shares (``Cut.refusal``).
    """
    intervals: list[Intervals] = [((0, size),) for size in shape]
    for cut, (count, index) in zip(cuts, shares, strict=True):
        if count > 1:
            intervals[cut.dim] = cut.split(intervals[cut.dim], count, index)
    placed = [_with_offsets(dim) for dim in intervals]
    pieces = tuple(
        Piece(Region(tuple(a for (a, _), _ in combo), tuple(b for (_, b), _ in combo)), tuple(at for _, at in combo))
        for combo in itertools.product(*placed)
    )
    return LocalShard(tuple(map(total_length, intervals)), tuple(piece for piece in pieces if piece.region.numel))


def _with_offsets(intervals: Intervals) -> list[tuple[Interval, int]]:
    offsets = itertools.accumulate((stop - start for start, stop in intervals), initial=0)
    return list(zip(intervals, offsets, strict=False))
