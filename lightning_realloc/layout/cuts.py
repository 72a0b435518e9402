"""Kinds of cuts: how the ranks along some axes of a layout divide one dim of a parameter.

The cuts of a parameter apply in order. Each divides the part that the ones before have left, so that their pieces are
disjoint and cover the parameter. Chunks follow ``torch.chunk``: they have ceil(size / num_chunks) elements, and the
last ones are smaller or empty. Attention heads stay whole: ranks get even shares of them, group by group. The first
rank always holds the most. CONTRIBUTING.md lists what a further kind concerns.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout.dims import Layout

Interval = tuple[int, int]
"""A half-open range of indices along one dim."""
Intervals = tuple[Interval, ...]
"""The ranges that a rank holds along one dim, in local order."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Chunks of one dim, as ``torch.chunk`` makes them. A kind of cut names its axes, and may keep units whole."""

    axes: ClassVar[tuple[str, ...]]
    """Axes of the layout along which ranks divide the dim, outermost first."""
    is_gathered: ClassVar[bool] = False
    """Whether FSDP gathers the dim for use. If not, modules compute with the ranks' parts."""
    dim: int
    """Tensor dim that is cut."""

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise LayoutError(f"dim={self.dim} of a cut must be 0 or more; count dims from the first")

    @property
    def needs_whole_dim(self) -> bool:
        """Whether no other cut may divide the dim before."""
        return False

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise LayoutError unless the cut fits a parameter of ``shape``."""
        if self.dim >= len(shape):
            by = ", ".join(self.axes)
            raise LayoutError(f"the cut along dim {self.dim} by {by} needs more dims than shape {shape} has")

    def refusal(self, shape: tuple[int, ...], count: int) -> str | None:
        """Return the rule by which ``count`` ranks cannot divide a parameter of ``shape``; None if they can."""
        return None

    def split(self, held: Intervals, count: int, index: int) -> Intervals:
        """Return the part that rank ``index`` of ``count`` gets of the ranges ``held`` along the dim."""
        start, stop = chunk_bounds(total_length(held), count, index)
        taken, position = [], 0
        for first, last in held:
            low, high = max(start, position), min(stop, position + last - first)
            if low < high:
                taken.append((first + low - position, first + high - position))
            position += last - first
        return tuple(taken)

    def shared_by(self, count: int, index: int) -> range | None:
        """Return the ranks of ``count`` that hold the same elements as rank ``index``; None if it holds its own."""
        return None


@dataclass(frozen=True, slots=True)
class FsdpCut(Cut):
    """Chunks that FSDP gathers for use."""

    axes = Layout.shard_axes
    is_gathered = True
    dim: int = 0

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Accept a scalar, which one rank can hold."""
        if shape:
            Cut.check_shape(self, shape)

    def refusal(self, shape: tuple[int, ...], count: int) -> str | None:
        """Refuse scalars."""
        if shape:
            return None
        return f"fsdp and cp, {count} ranks here, need a dim to chunk but the parameter is a scalar; give it shape (1,)"


@dataclass(frozen=True, slots=True)
class ExpertCut(Cut):
    """Equal shares of whole experts."""

    axes = Layout.expert_axes
    dim: int = 0
    num_blocks: int = 1
    """Number of equal blocks of the dim, each of which lists all experts, as in the second factors of adapters."""

    @property
    def needs_whole_dim(self) -> bool:
        """Whether the cut keeps blocks, which are counted along the whole dim."""
        return self.num_blocks > 1

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise LayoutError unless the blocks fit a parameter of ``shape``."""
        Cut.check_shape(self, shape)
        if self.num_blocks < 1 or shape[self.dim] % self.num_blocks:
            raise LayoutError(f"num_blocks={self.num_blocks} must divide {shape[self.dim]}, the size of dim {self.dim}")

    def refusal(self, shape: tuple[int, ...], count: int) -> str | None:
        """Refuse degrees that do not divide the experts."""
        experts = shape[self.dim] // self.num_blocks
        return f"ep={count} must divide the {experts} experts" if experts % count else None

    def split(self, held: Intervals, count: int, index: int) -> Intervals:
        """Return the experts that rank ``index`` of ``count`` gets of each block."""
        if not self.needs_whole_dim:
            return Cut.split(self, held, count, index)
        ((begin, size),) = held
        length = size // self.num_blocks
        start, stop = chunk_bounds(length, count, index)
        return tuple((first + start, first + stop) for first in range(begin, begin + size, length))


@dataclass(frozen=True, slots=True)
class ExpertFsdpCut(FsdpCut):
    """Chunks of the experts of an expert-parallel rank, which FSDP gathers for use."""

    axes = Layout.expert_shard_axes


@dataclass(frozen=True, slots=True)
class TensorParallelCut(Cut):
    """Tensor parallelism's cut: chunks, or shares of whole units (attention heads, some features of experts)."""

    axes = Layout.tensor_axes
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
        Cut.__post_init__(self)
        if self.num_units is not None and self.num_units < 1:
            raise LayoutError(f"num_units={self.num_units} must be at least 1; use None where any split is allowed")
        if any(size < 1 for size in self.block_sizes):
            raise LayoutError(f"block_sizes={self.block_sizes} must all be at least 1; leave empty blocks out")
        for name in ("replicate_units", "num_groups"):
            if getattr(self, name) and self.num_units is None:
                given = f"{name}={getattr(self, name)}"
                raise LayoutError(f"{given} needs num_units; give the number of heads along the dim")

    @property
    def needs_whole_dim(self) -> bool:
        """Whether the cut keeps units or blocks, which are counted along the whole dim."""
        return self.num_units is not None or bool(self.block_sizes)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise LayoutError unless the blocks and units fit a parameter of ``shape``."""
        Cut.check_shape(self, shape)
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

    def refusal(self, shape: tuple[int, ...], count: int) -> str | None:
        """Refuse degrees that leave a rank without a unit of a block.

        Several blocks need equal shares: they begin at the same index of every local tensor, as plans of moves assume.
        """
        units = [units for _, units in self.blocks(shape[self.dim]) if units is not None]
        if len(units) > 1:
            if all(n % count == 0 or (self._replicates(n) and count % n == 0) for n in units):
                return None
            return (
                f"tp={count} must divide the heads or units of the blocks that are fused along dim {self.dim} "
                f"{tuple(units)}"
            )
        if all(count <= n or self._replicates(n) for n in units):
            return None
        return (
            f"tp={count} must not exceed the number of heads or units along dim {self.dim} ({units[0]}), so that "
            "every rank gets one"
        )

    def split(self, held: Intervals, count: int, index: int) -> Intervals:
        """Return the part that rank ``index`` of ``count`` gets of each block.

        Ranges of adjacent blocks are not joined, so the ranges of two ranks are either equal or disjoint.
        """
        if not self.needs_whole_dim:
            return Cut.split(self, held, count, index)
        ((begin, size),) = held
        intervals = []
        for block, units in self.blocks(size):
            if units is None:
                start, stop = chunk_bounds(block, count, index)
            else:
                start, stop = (block // units * bound for bound in self.unit_bounds(units, count, index))
            intervals.append((begin + start, begin + stop))
            begin += block
        return tuple((start, stop) for start, stop in intervals if start < stop)

    def shared_by(self, count: int, index: int) -> range | None:
        """Return the ranks that hold the replicated units of rank ``index``; None if no unit is replicated."""
        groups = self.num_groups or self.num_units
        return group_ranks(groups, count, index) if self.replicate_units and groups and count > groups else None

    def unit_bounds(self, units: int, tp: int, index: int) -> Interval:
        """Return the range of the ``units`` of a block that tp rank ``index`` holds."""
        groups = self.num_groups or units
        return group_bounds(groups, tp, index) if self._replicates(units) else head_bounds(units, groups, tp, index)

    def _replicates(self, units: int) -> bool:
        return self.replicate_units and units == (self.num_groups or units)


def sharded(*cuts: Cut | None) -> tuple[Cut, ...]:
    """Return these cuts, without None, and FSDP's after them."""
    return (*(cut for cut in cuts if cut is not None), FsdpCut())


def sharded_experts(*cuts: Cut | None, by_expert: ExpertCut | None = None) -> tuple[Cut, ...]:
    """Return the cuts of stacked experts: by whole experts, then these without None, then FSDP's."""
    return (by_expert or ExpertCut(), *(cut for cut in cuts if cut is not None), ExpertFsdpCut())


def total_length(intervals: Intervals) -> int:
    """Return the number of indices in ``intervals``."""
    return sum(stop - start for start, stop in intervals)


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


@lru_cache(maxsize=4096)
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


@lru_cache(maxsize=4096)
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


def num_head_shares(heads: Collection[tuple[int, int]], cp: int, tp: int) -> int:
    """Return how many of ``cp`` ranks divide the query heads of each of ``tp`` ranks; 1 if no heads are known.

    The others divide the queries of each row, and read the keys of the whole row.

    Args:
        heads: Numbers of query and key-value heads of the layers.

    >>> num_head_shares([(14, 2)], cp=4, tp=1), num_head_shares([(14, 2)], cp=4, tp=4)
    (2, 1)
    """
    bounds = [head_bounds(*one, tp, index) for one in heads for index in range(tp)]
    return math.gcd(cp, *(stop - start for start, stop in bounds)) if bounds else 1
