"""Regions of a parameter at one mesh coordinate, and their offsets in the local tensor.

Tensor parallelism cuts first; then FSDP chunks dim 0 of the result. Both follow ``torch.chunk``: chunks have
ceil(size / num_chunks) elements, and the last ones are smaller or empty. Attention heads stay whole: ranks get even
shares of them, group by group. Along every axis the first rank holds the most.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout.region import Region

Interval = tuple[int, int]
"""A half-open range of indices along one dim."""


@dataclass(frozen=True, slots=True)
class TensorParallelCut:
    """How tensor parallelism cuts one parameter."""

    dim: int
    """Tensor dim that is cut."""
    num_units: int | None = None
    """Number of units along ``dim`` that must stay whole (attention heads), over all blocks. None allows any split."""
    replicate_units: bool = False
    """Whether several ranks may hold the same unit (a key-value head), so that tp may exceed the units."""
    block_sizes: tuple[int, ...] = ()
    """Sizes of the fused blocks along ``dim`` (gate|up, q|k|v); each is cut separately. Empty means one block."""
    num_groups: int | None = None
    """Number of groups of units in every block, one for each key-value head: no rank holds parts of two groups.
    None: each unit is a group."""

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise LayoutError(f"dim={self.dim} of a tensor-parallel cut must be 0 or more; count dims from the first")
        if self.num_units is not None and self.num_units < 1:
            raise LayoutError(f"num_units={self.num_units} must be at least 1; use None where any split is allowed")
        if any(size < 1 for size in self.block_sizes):
            raise LayoutError(f"block_sizes={self.block_sizes} must all be at least 1; leave empty blocks out")
        for name in ("replicate_units", "num_groups"):
            if getattr(self, name) and self.num_units is None:
                given = f"{name}={getattr(self, name)}"
                raise LayoutError(f"{given} needs num_units; give the number of heads along the dim")

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise LayoutError unless the blocks and units fit a parameter of ``shape``."""
        if self.dim >= len(shape):
            raise LayoutError(f"the tensor-parallel cut along dim {self.dim} needs more dims than shape {shape} has")
        size = shape[self.dim]
        if self.block_sizes and sum(self.block_sizes) != size:
            raise LayoutError(
                f"block_sizes={self.block_sizes} must add up to {size}, the size of dim {self.dim} of {shape}"
            )
        if self.num_units is None:
            return
        if size % self.num_units:
            raise LayoutError(f"num_units={self.num_units} must divide {size}, the size of dim {self.dim} of {shape}")
        if any(block % (size // self.num_units) for block in self.block_sizes):
            raise LayoutError(
                f"every block of {self.block_sizes} must hold whole units of {size // self.num_units} indices "
                f"(num_units={self.num_units} over a dim of {size}); count the units of all blocks together"
            )
        units = [count for _, count in self.blocks(size) if count is not None]
        if self.num_groups is not None and any(self.num_groups < 1 or count % self.num_groups for count in units):
            raise LayoutError(
                f"num_groups={self.num_groups} must divide the units of every block, {tuple(units)}; give the number "
                "of key-value heads"
            )

    def blocks(self, size: int) -> tuple[tuple[int, int | None], ...]:
        """Return the size and the number of units (None: any split) of every block along a dim of ``size``."""
        sizes = self.block_sizes or (size,)
        if self.num_units is None:
            return tuple((block, None) for block in sizes)
        return tuple((block, block * self.num_units // size) for block in sizes)

    def allows(self, size: int, tp: int) -> bool:
        """Return whether each of ``tp`` ranks gets a unit of every block along a dim of ``size``.

        Several blocks need equal shares: they begin at the same index of every local tensor, as plans of moves assume.
        """
        units = [count for _, count in self.blocks(size) if count is not None]
        if len(units) > 1:
            return all(count % tp == 0 or (self._replicates(count) and tp % count == 0) for count in units)
        return all(tp <= count or self._replicates(count) for count in units)

    def shared_by(self, tp: int, index: int) -> range | None:
        """Return the tp ranks that hold the replicated units of rank ``index``; None if ``tp`` replicates no unit."""
        groups = self.num_groups or self.num_units
        return group_ranks(groups, tp, index) if self.replicate_units and groups and tp > groups else None

    def unit_bounds(self, units: int, tp: int, index: int) -> Interval:
        """Return the range of the ``units`` of a block that tp rank ``index`` holds."""
        groups = self.num_groups or units
        return group_bounds(groups, tp, index) if self._replicates(units) else head_bounds(units, groups, tp, index)

    def _replicates(self, units: int) -> bool:
        return self.replicate_units and units == (self.num_groups or units)


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


def chunk_bounds(size: int, num_chunks: int, index: int) -> Interval:
    """Return the range of chunk ``index`` when ``torch.chunk`` cuts ``size``; empty past the end."""
    length = -(-size // num_chunks)
    start = min(size, length * index)
    return start, min(size, start + length)


def share_bounds(count: int, num_shares: int, index: int) -> Interval:
    """Return the range of share ``index`` of ``count`` items. Shares differ by one at most, and larger ones come first.

    Unlike chunks, no share is empty while there are as many items as shares.
    """
    share, num_larger = divmod(count, num_shares)
    start = index * share + min(index, num_larger)
    return start, start + share + (index < num_larger)


def group_bounds(num_groups: int, tp: int, index: int) -> Interval:
    """Return the range of groups (key-value heads) that tp rank ``index`` holds: an even share, at least one.

    Where ``tp`` exceeds the groups, consecutive ranks hold the same group. The first groups have the fewest ranks, so
    that no rank holds more of its group than rank 0.
    """
    if tp <= num_groups:
        return share_bounds(num_groups, tp, index)
    group = ((index + 1) * num_groups - 1) // tp
    return group, group + 1


def group_ranks(num_groups: int, tp: int, index: int) -> range:
    """Return the tp ranks that hold the same groups as rank ``index``."""
    if tp <= num_groups:
        return range(index, index + 1)
    group, following = group_bounds(num_groups, tp, index)
    return range(group * tp // num_groups, following * tp // num_groups)


def head_bounds(num_heads: int, num_groups: int, tp: int, index: int) -> Interval:
    """Return the range of query heads that tp rank ``index`` holds, all of its groups.

    Ranks that hold the same group divide its heads. Up to ``num_heads`` ranks get at least one.

    >>> [head_bounds(9, 3, 2, index) for index in range(2)]
    [(0, 6), (6, 9)]
    >>> [head_bounds(14, 2, 4, index) for index in range(4)]
    [(0, 4), (4, 7), (7, 11), (11, 14)]
    """
    size = num_heads // num_groups
    ranks, (first, last) = group_ranks(num_groups, tp, index), group_bounds(num_groups, tp, index)
    if len(ranks) == 1:
        return first * size, last * size
    start, stop = share_bounds(size, len(ranks), index - ranks.start)
    return first * size + start, first * size + stop


def tensor_parallel_intervals(size: int, cut: TensorParallelCut | None, tp: int, index: int) -> tuple[Interval, ...]:
    """Return the global ranges, in local order, that tp rank ``index`` holds along the cut dim of ``size``.

    Ranges of adjacent blocks are not joined, so the ranges of two ranks are either equal or disjoint.
    """
    if cut is None or tp == 1:
        return ((0, size),)
    intervals = []
    begin = 0
    for block, units in cut.blocks(size):
        if units is None:
            start, stop = chunk_bounds(block, tp, index)
        else:
            start, stop = (block // units * bound for bound in cut.unit_bounds(units, tp, index))
        intervals.append((begin + start, begin + stop))
        begin += block
    return tuple((start, stop) for start, stop in intervals if start < stop)


@lru_cache(maxsize=65536)
def local_shard(
    shape: tuple[int, ...], cut: TensorParallelCut | None, tp: int, tp_index: int, fsdp: int, fsdp_index: int
) -> LocalShard:
    """Return the shard of a parameter of ``shape`` at one coordinate.

    Tensor parallelism cuts first, then FSDP along dim 0. The layout must allow the cut
    (``TensorParallelCut.allows``), and ``fsdp > 1`` needs at least one dim.
    """
    intervals: list[tuple[Interval, ...]] = [((0, size),) for size in shape]
    if cut is not None:
        intervals[cut.dim] = tensor_parallel_intervals(shape[cut.dim], cut, tp, tp_index)
    if fsdp > 1:
        start, stop = chunk_bounds(_length(intervals[0]), fsdp, fsdp_index)
        intervals[0] = _sub_range(intervals[0], start, stop)
    placed = [_with_offsets(dim) for dim in intervals]
    pieces = tuple(
        Piece(Region(tuple(a for (a, _), _ in combo), tuple(b for (_, b), _ in combo)), tuple(at for _, at in combo))
        for combo in itertools.product(*placed)
    )
    return LocalShard(tuple(map(_length, intervals)), tuple(piece for piece in pieces if piece.region.numel))


def _length(intervals: tuple[Interval, ...]) -> int:
    return sum(stop - start for start, stop in intervals)


def _sub_range(intervals: tuple[Interval, ...], start: int, stop: int) -> tuple[Interval, ...]:
    """Return the local indices ``start`` to ``stop`` of the concatenated ``intervals``."""
    taken, position = [], 0
    for first, last in intervals:
        low, high = max(start, position), min(stop, position + last - first)
        if low < high:
            taken.append((first + low - position, first + high - position))
        position += last - first
    return tuple(taken)


def _with_offsets(intervals: tuple[Interval, ...]) -> list[tuple[Interval, int]]:
    offsets = itertools.accumulate((stop - start for start, stop in intervals), initial=0)
    return list(zip(intervals, offsets, strict=False))
