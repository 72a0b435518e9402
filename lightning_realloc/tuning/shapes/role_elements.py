"""Count the elements of one role's tensors on the ranks of a layout, as `ModelLayout` cuts them.

Parameters of equal shape and cuts form a family, of which one is cut for all. Families are counted by *place*: the
input is place 0, block b is place b + 1, and the output is the last place. A pipeline stage has a range of places for
each of its runs of blocks.
Tied embeddings are families of their own, at place 0, which the first and the last stage hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_realloc.layout.cuts import Cut, ExpertCut, Intervals
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout, ParamSpec
from lightning_realloc.layout.sharding import LocalShard
from lightning_realloc.tuning.shapes.role_memory import RoleMemory, is_adapted

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankElements:
    """Elements of one role's tensors on one rank under one layout.

    *Unsharded* counts are those after tensor and pipeline parallelism, before FSDP: the elements that FSDP gathers, and
    those of gradients before their reduction. *Sharded* counts include the padding to equal length that FSDP adds.
    """

    dims: ParallelDims
    """The degrees of one copy of the weights."""
    stage: int
    """Index of the rank's pipeline stage."""
    num_sharded: int
    """Sharded elements."""
    num_trained_sharded: int
    """Sharded elements that are trained."""
    num_experts: int
    """Sharded elements of stacked experts."""
    num_trained_experts: int
    """Sharded elements of stacked experts that are trained."""
    num_tied: int
    """Sharded elements that are trained and that another stage holds, too: tied embeddings."""
    num_trained: int
    """Unsharded elements that are trained."""
    root: int
    """Unsharded elements outside of blocks."""
    trained_root: int
    """Unsharded elements outside of blocks that are trained."""
    num_blocks: int
    """Blocks of the rank's stage."""
    largest_block: int
    """Unsharded elements of the largest block."""
    trained_block: int
    """Unsharded trained elements of the block with most of them."""
    num_adapted: int
    """Unsharded elements of the weights that have adapters."""
    num_adapted_experts: int
    """Unsharded elements of stacked experts that have adapters."""


class Shards(NamedTuple):
    """Shards of a family at all positions within a pipeline stage and a replica."""

    number: IntArray
    """Number of the shard at each position; equal shards have the same number."""
    bounds: IntArray
    """First and last index plus one of each piece of each shard: (shards, pieces, dims, 2); unused pieces are empty."""
    sizes: IntArray
    """Elements of each shard."""

    @classmethod
    def from_dims(cls, num_positions: int, dims: Sequence[tuple[DimShares, IntArray]]) -> Shards:
        """Return the shards that the shares of all dims make up.

        Args:
            dims: Shares of each dim, and the share of each position.
        """
        place = np.zeros(num_positions, dtype=np.int64)
        for shares, at in dims:
            place = place * len(shares.ranges) + shares.number[at]
        _, first, number = np.unique(place, return_index=True, return_inverse=True)
        bounds, sizes = np.zeros((len(first), 1, 0, 2), dtype=np.int64), np.ones(len(first), dtype=np.int64)
        for shares, at in dims:
            ranges = shares.ranges[shares.number[at[first]]]
            sizes *= (ranges[..., 1] - ranges[..., 0]).sum(axis=1)
            further = np.tile(ranges, (1, bounds.shape[1], 1))[:, :, None]
            bounds = np.concatenate((np.repeat(bounds, ranges.shape[1], axis=1), further), axis=2)
        return cls(number, bounds, sizes)


class DimShares(NamedTuple):
    """Shares of one dim of a tensor."""

    number: IntArray
    """Number of each share; equal shares have the same number."""
    ranges: IntArray
    """First and last index plus one of each distinct share's ranges: (shares, ranges, 2); unused ones are empty."""


@lru_cache(maxsize=1024)
def divide_dim(size: int, cuts: tuple[Cut, ...], counts: tuple[int, ...]) -> DimShares:
    """Return the shares of a dim after some cuts, in row-major order of the numbers of shares of each cut."""
    held: list[Intervals] = [((0, size),)]
    for cut, count in zip(cuts, counts, strict=True):
        if count > 1:
            held = [cut.split(one, count, index) for one in held for index in range(count)]
    numbers: dict[Intervals, int] = {}
    number = np.array([numbers.setdefault(one, len(numbers)) for one in held])
    ranges = np.zeros((len(numbers), max(1, *map(len, numbers)), 2), dtype=np.int64)
    for row, one in zip(ranges, numbers, strict=True):
        row[: len(one)] = one or row[:0]
    return DimShares(number, ranges)


class RoleElements:
    """Counts the elements of a role on the ranks of layouts, and caches the counts."""

    def __init__(self, role: RoleMemory) -> None:
        self.role = role
        model = role.model
        self.num_elements = model.num_elements
        """Elements of the whole model."""
        self.num_trained = self.num_elements - role.num_frozen
        """Trained elements of the whole model."""
        self.trained_share = role.trained_share
        """Fraction of the elements outside of a tower that are trained."""
        self.largest = max((param.numel for param in model.params), default=0)
        """Elements of the largest parameter."""
        families: dict[tuple[tuple[int, ...], tuple[Cut, ...], bool], int] = {}
        keys = [(param.shape, param.cuts, param.section == "ends") for param in model.params]
        numbers = [families.setdefault(key, len(families)) for key in keys]
        self.on_ends = np.array([is_tied for *_, is_tied in families], dtype=np.bool_)
        """Families that both the first and the last pipeline stage hold."""
        self.of_experts = np.array([any(cut.axes == ExpertCut.axes for cut in cuts) for _, cuts, _ in families])
        """Families of stacked experts."""
        table = np.zeros((3, model.num_blocks + 2, len(families)), dtype=np.int64)
        for param, number in zip(model.params, numbers, strict=True):
            is_trained = param.name not in role.frozen_params
            table[:, _place(param, model.num_blocks), number] += (True, is_trained, is_adapted(param))
        self.counts, self.trained_counts, self.adapted_counts = table
        """For each place and family, the number of parameters: all, trained ones, and weights with adapters."""
        first = [model.params[numbers.index(number)] for number in range(len(families))]
        owners = (model.param(owner) for _, owner in model.aliases)
        self._names = [param.name for param in first]
        self._model = replace(model, params=tuple(dict.fromkeys((*first, *owners))))
        """The model with one parameter of each family, and those with tied names."""
        self._laid = cache(self._lay_out)
        self._count = cache(self._count_rank)
        self._on_fullest = cache(self._count_fullest)
        self._groups = cache(self._group_stages)
        self._shards_at = cache(self._cut_at)
        self.places = cache(self._place_stages)
        """Degrees pp and vpp -> the first place, and one past the last: (2, runs of a stage, stages, families)."""
        self.shards = cache(self._cut_everywhere)
        """Degrees -> the shards of each family."""

    def on_rank(self, layout: Layout, rank: int) -> RankElements:
        """Return the counts of a rank.

        Raises:
            LayoutError: for a layout that does not fit the model, and for a rank outside of the layout.
        """
        stage, position = _place_in(layout, rank)
        within = self._laid(inside(layout.dims)).layout
        shard = sum(position // stride % degree * stride for degree, stride in within.spans(Layout.shard_axes))
        return self._count(of_one_copy(layout.dims), stage, position - shard)  # other shards are padded to the first

    def on_stages(self, dims: ParallelDims) -> list[RankElements]:
        """Return the counts of the first ranks of the stages that can need most: the others hold less, and run later.

        These are the first and the last stage, and those between with more blocks of a kind than earlier ones.

        Raises:
            LayoutError: for degrees that do not fit the model.
        """
        return self._on_fullest(of_one_copy(dims))

    def equal_stages(self, dims: ParallelDims) -> list[list[RankElements]]:
        """Return the counts of the first ranks of all stages; those between the first and the last in equal groups.

        Raises:
            LayoutError: for degrees that do not fit the model.
        """
        return self._groups(of_one_copy(dims))

    def blocks_of_stages(self, dims: ParallelDims) -> tuple[int, ...]:
        """Return the number of blocks of every pipeline stage."""
        runs = self.role.model.stage_blocks(dims.num_runs)
        return tuple(sum(map(len, runs[stage :: dims.pp])) for stage in range(dims.pp))

    def _count_fullest(self, dims: ParallelDims) -> list[RankElements]:
        return [self._count(dims, stage, 0) for stage in self._fullest_stages(dims.pp, dims.vpp)]

    def _group_stages(self, dims: ParallelDims) -> list[list[RankElements]]:
        first, *between = (self._count(dims, stage, 0) for stage in range(dims.pp))
        last, groups = between[-1:], dict[RankElements, list[RankElements]]()
        for sizes in between[:-1]:
            groups.setdefault(replace(sizes, stage=0), []).append(sizes)
        return [group for group in ([first], *groups.values(), last) if group]

    def _fullest_stages(self, pp: int, vpp: int) -> list[int]:
        self._laid(ParallelDims(pp=pp, vpp=vpp))  # refuses more runs than blocks
        if pp == 1:
            return [0]
        tables = (self.counts, self.trained_counts, self.adapted_counts)
        kinds = np.unique(np.hstack([table[1:-1] for table in tables]), axis=0, return_inverse=True)[1].reshape(-1)
        runs = self.role.model.stage_blocks(pp * vpp)
        counted = np.array([np.bincount(kinds[run.start : run.stop], minlength=max(kinds) + 1) for run in runs])
        held = counted.reshape(vpp, pp, -1).sum(axis=0)
        kept = [0]
        for stage in range(1, pp - 1):  # an earlier stage keeps the activations of more micro-batches
            if not any((held[stage] <= held[earlier]).all() for earlier in kept):
                kept.append(stage)
        return [*kept, pp - 1]

    def tensors(self, layout: Layout, rank: int, *, unlike: Layout | None = None, trained_too: bool = True) -> int:
        """Return the elements of a rank's tensors, without padding.

        Args:
            unlike: Count only tensors that the rank does not hold in the same form under this layout.
            trained_too: Whether a trained tensor can be the same under both layouts.
        """
        (begin, end), shards = self._held(layout, rank)
        sizes = _sizes(shards)
        total = count_between(self.counts, begin, end) @ sizes
        if unlike is not None and rank in unlike:
            (other_begin, other_end), others = self._held(unlike, rank)
            equal = self.counts if trained_too else self.counts - self.trained_counts
            is_same = np.array([one == other for one, other in zip(shards, others, strict=True)])
            common = count_common(equal, (begin, end), (other_begin, other_end))
            total -= common @ (sizes * is_same)
        return int(total)

    def shapes(self, dims: ParallelDims) -> list[tuple[int, ...]]:
        """Return the shape of each family's tensor on the first rank."""
        return [shard.shape for shard in self._shards_at(inside(dims), 0)]

    def _place_stages(self, pp: int, vpp: int) -> IntArray:
        runs = self.role.model.stage_blocks(pp * vpp)
        places = np.array([[run.start + (run.start > 0), run.stop + 1] for run in runs])
        places[-1, 1] += 1
        of_ends = np.array(
            [[0 if number in (0, pp - 1) else 1, 1] for number in range(pp)] + [[1, 1]] * (len(runs) - pp)
        )
        found: IntArray = np.where(self.on_ends, of_ends.T[..., None], places.T[..., None])
        return found.reshape(2, vpp, pp, len(self.on_ends))

    def _held(self, layout: Layout, rank: int) -> tuple[IntArray, tuple[LocalShard, ...]]:
        stage, position = _place_in(layout, rank)
        places = self.places(layout.dims.pp, layout.dims.vpp)
        return places[:, :, stage], self._shards_at(inside(layout.dims), position)

    def _lay_out(self, dims: ParallelDims) -> ModelLayout:
        return ModelLayout(self._model, Layout(dims, tuple(range(dims.size))))

    def _cut_at(self, dims: ParallelDims, position: int, is_gathered: bool = False) -> tuple[LocalShard, ...]:
        laid = self._laid(dims)
        cut = laid.gathered_shard if is_gathered else laid.shard
        return tuple(shard for name in self._names if (shard := cut(name, position)) is not None)

    def _cut_everywhere(self, dims: ParallelDims) -> list[Shards]:
        laid = self._laid(dims)
        return [self._cut_family(laid, name) for name in self._names]

    def _cut_family(self, laid: ModelLayout, name: str) -> Shards:
        """Return the shards of a family; each dim is cut once, for all families with the same cuts of it."""
        param, layout = laid.model.param(name), laid.layout
        dims = []
        for dim, size in enumerate(param.shape):
            cuts = tuple(cut for cut in param.cuts if cut.dim == dim)
            counts = tuple(layout.count(*cut.axes) for cut in cuts)
            shares = axis_positions(layout, [axis for cut in cuts for axis in cut.axes])
            dims.append((divide_dim(size, cuts, counts), shares))
        return Shards.from_dims(len(layout.ranks), dims)

    def _count_rank(self, dims: ParallelDims, stage: int, position: int) -> RankElements:
        within = inside(dims)
        self._laid(ParallelDims(pp=dims.pp, vpp=dims.vpp))  # refuses more runs than blocks
        sharded = _sizes(self._shards_at(within, position))
        whole = _sizes(self._shards_at(within, position, True))
        begin, end = self.places(dims.pp, dims.vpp)[:, :, None, stage]
        place = np.arange(len(self.counts))[:, None]
        is_held = ((begin <= place) & (place < end)).any(axis=0)
        counts, trained_counts, adapted_counts = (
            table * is_held for table in (self.counts, self.trained_counts, self.adapted_counts)
        )
        held, trained = counts @ whole, trained_counts @ whole
        return RankElements(
            dims=dims,
            stage=stage,
            num_sharded=int((counts @ sharded).sum()),
            num_trained_sharded=int((trained_counts @ sharded).sum()),
            num_experts=int((counts @ (sharded * self.of_experts)).sum()),
            num_trained_experts=int((trained_counts @ (sharded * self.of_experts)).sum()),
            num_tied=int((trained_counts @ (sharded * self.on_ends)).sum()) if dims.pp > 1 else 0,
            num_trained=int(trained.sum()),
            root=int(held[[0, -1]].sum()),
            trained_root=int(trained[[0, -1]].sum()),
            num_blocks=int((held[1:-1] > 0).sum()),
            largest_block=int(held[1:-1].max(initial=0)),
            trained_block=int(trained[1:-1].max(initial=0)),
            num_adapted=int((adapted_counts @ whole).sum()),
            num_adapted_experts=int((adapted_counts @ (whole * self.of_experts)).sum()),
        )


@lru_cache(maxsize=64)
def elements_of(role: RoleMemory) -> RoleElements:
    """Return the counts of a role, which estimates of seconds and of bytes share."""
    return RoleElements(role)


@lru_cache(maxsize=4096)
def inside(dims: ParallelDims) -> ParallelDims:
    """Return the degrees of one pipeline stage and one copy of the weights, which ``ep`` may spread over ``dp``."""
    return replace(dims, pp=1, vpp=1, dp=max(1, dims.ep // dims.fsdp))


@lru_cache(maxsize=4096)
def of_one_copy(dims: ParallelDims) -> ParallelDims:
    """Return the degrees of all pipeline stages and one replica, which the elements of a rank depend on."""
    return replace(inside(dims), pp=dims.pp, vpp=dims.vpp)


def axis_positions(layout: Layout, axes: Sequence[str]) -> IntArray:
    """Return `Layout.share`'s position of every rank, in the layout's order."""
    index = np.arange(len(layout.ranks))
    position = np.zeros_like(index)
    for degree, stride in layout.spans(axes):
        position = position * degree + index // stride % degree
    return position


def _place_in(layout: Layout, rank: int) -> tuple[int, int]:
    """Return a rank's stage and position: its index among the ranks that hold one copy of the stage's weights."""
    return layout.share(rank, *layout.stage_axes).position, layout.share(rank, *layout.weight_axes).position


def _place(param: ParamSpec, num_blocks: int) -> int:
    if param.block is not None:
        return param.block + 1
    return num_blocks + 1 if param.section == "output" else 0


def count_between(counts: IntArray, begin: IntArray, end: IntArray) -> IntArray:
    """Return the number of parameters from the places ``begin`` to ``end`` of each family: (..., families).

    Args:
        counts: Number of parameters at each place: (places, families).
        begin: First place of each run of blocks: (runs, ..., families).
        end: One past the last.
    """
    before = np.concatenate((np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)))
    family = np.arange(counts.shape[1])
    found: IntArray = (before[np.maximum(begin, end), family] - before[begin, family]).sum(axis=0)
    return found


def count_common(counts: IntArray, one: tuple[IntArray, IntArray], other: tuple[IntArray, IntArray]) -> IntArray:
    """Return the number of parameters in both of two sets of places, each as in `count_between`."""
    begin, end = np.maximum(one[0][:, None], other[0]), np.minimum(one[1][:, None], other[1])
    pairs = len(begin) * len(begin[0])
    return count_between(counts, begin.reshape(pairs, *begin.shape[2:]), end.reshape(pairs, *end.shape[2:]))


def _sizes(shards: Sequence[LocalShard]) -> IntArray:
    return np.array([math.prod(shard.shape) for shard in shards], dtype=np.int64)
