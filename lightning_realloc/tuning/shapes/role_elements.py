"""Count the elements of one role's tensors on one rank of a layout. Equal blocks are counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from lightning_realloc.layout.cuts import Cut
from lightning_realloc.layout.dims import Coordinate, Layout, ParallelDims, Share
from lightning_realloc.layout.model import ModelLayout, ParamSpec, stage_blocks
from lightning_realloc.layout.sharding import LocalShard, local_shard
from lightning_realloc.tuning.shapes.role_memory import RoleMemory, is_adapted


@dataclass(frozen=True, slots=True, kw_only=True)
class RankElements:
    """Elements of one role's tensors on one rank under one layout.

    *Unsharded* counts are those after tensor and pipeline parallelism, before FSDP: the elements that FSDP gathers, and
    those of gradients before their reduction. *Sharded* counts include the padding to equal length that FSDP adds.
    """

    dims: ParallelDims
    stage: int
    """Index of the rank's pipeline stage."""
    num_sharded: int
    """Sharded elements."""
    num_trained_sharded: int
    """Sharded elements that are trained."""
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


class RoleElements:
    """Counts the elements of a role on the ranks of layouts, and caches the counts."""

    def __init__(self, role: RoleMemory) -> None:
        self.role = role
        self.largest = max((param.numel for param in role.model.params), default=0)
        outside: dict[str, list[_Param]] = {"input": [], "output": []}
        blocks: list[list[_Param]] = [[] for _ in range(role.model.num_blocks)]
        for param in role.model.params:
            place = outside[param.section] if param.block is None else blocks[param.block]
            place.append(_Param.from_spec(param, role))
        kinds: dict[tuple[_Param, ...], int] = {}
        self._input, self._output, *self._blocks = (
            kinds.setdefault(tuple(params), len(kinds)) for params in (*outside.values(), *blocks)
        )
        self._kinds = tuple(kinds)
        self._require_fit = cache(self._check_fit)
        self._count = cache(self._count_kind)
        self._stage = cache(self._count_stage)
        self._num_in_tensors = cache(self._count_tensors)

    def on_rank(self, layout: Layout, rank: int) -> RankElements:
        """Return the counts of a rank.

        Raises:
            LayoutError: for a layout that does not fit the model, and for a rank outside of the layout.
        """
        return self.at_coordinate(layout.dims, layout.coordinate(rank))

    def at_coordinate(self, dims: ParallelDims, at: Coordinate) -> RankElements:
        """Return the counts at a coordinate of a layout. Raises LayoutError as :meth:`on_rank` does."""
        self._require_fit(dims)
        return RankElements(dims=dims, stage=at.pp, **self._stage(dims.tp, at.tp, dims.fsdp, dims.pp, at.pp))

    def _check_fit(self, dims: ParallelDims) -> None:
        ModelLayout(self.role.model, Layout(dims, tuple(range(dims.size))))

    def tensors(self, layout: Layout, rank: int, *, unlike: Layout | None = None, trained_too: bool = True) -> int:
        """Return the elements of a rank's tensors, without padding.

        Args:
            unlike: Count only tensors that the rank does not hold in the same form under this layout.
            trained_too: Whether a trained tensor can be the same under both layouts.
        """
        at, there = _Position.from_rank(layout, rank), None
        same: dict[int | str, int] = {}
        if unlike is not None and rank in unlike:
            there = _Position.from_rank(unlike, rank)
            same = self._places(unlike.dims.pp, unlike.coordinate(rank).pp)
        places = self._places(layout.dims.pp, layout.coordinate(rank).pp)
        return sum(
            self._num_in_tensors(kind, at, there if place in same else None, trained_too)
            for place, kind in places.items()
        )

    def _count_tensors(self, kind: int, at: _Position, unlike: _Position | None, trained_too: bool) -> int:
        size = 0
        for param in self._kinds[kind]:
            shard = param.shard(*at)
            other = None if unlike is None or (param.is_trained and not trained_too) else param.shard(*unlike)
            if shard != other:
                size += math.prod(shard.shape)
        return size

    def _places(self, pp: int, stage: int) -> dict[int | str, int]:
        """Return the kinds of a stage's blocks, by block number, and of its parameters before and after the blocks."""
        run = stage_blocks(self.role.model.num_blocks, pp)[stage]
        places: dict[int | str, int] = {block: self._blocks[block] for block in run}
        if stage == 0:
            places["input"] = self._input
        if stage == pp - 1:
            places["output"] = self._output
        return places

    def _count_stage(self, tp: int, tp_index: int, fsdp: int, pp: int, stage: int) -> dict[str, int]:
        places = self._places(pp, stage)
        blocks = [self._count(kind, tp, tp_index, fsdp) for place, kind in places.items() if isinstance(place, int)]
        outside = [self._count(kind, tp, tp_index, fsdp) for place, kind in places.items() if isinstance(place, str)]
        everything = blocks + outside
        return {
            "num_sharded": sum(count.sharded for count in everything),
            "num_trained_sharded": sum(count.trained_sharded for count in everything),
            "num_trained": sum(count.trained for count in everything),
            "root": sum(count.whole for count in outside),
            "trained_root": sum(count.trained for count in outside),
            "num_blocks": sum(count.whole > 0 for count in blocks),
            "largest_block": max((count.whole for count in blocks), default=0),
            "trained_block": max((count.trained for count in blocks), default=0),
            "num_adapted": sum(count.adapted for count in everything),
        }

    def _count_kind(self, kind: int, tp: int, tp_index: int, fsdp: int) -> _Count:
        return _Count.from_params(self._kinds[kind], tp, tp_index, fsdp)


class _Position(NamedTuple):
    """Index of a rank along the axes that cut tensors."""

    tp: int
    tp_index: int
    fsdp: int
    fsdp_index: int

    @classmethod
    def from_rank(cls, layout: Layout, rank: int) -> _Position:
        at = layout.coordinate(rank)
        return cls(layout.dims.tp, at.tp, layout.dims.fsdp, at.fsdp)


class _Param(NamedTuple):
    """Properties of a parameter that its size on a rank depends on."""

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    is_trained: bool
    is_adapted: bool

    @classmethod
    def from_spec(cls, param: ParamSpec, role: RoleMemory) -> _Param:
        return cls(param.shape, param.cuts, param.name not in role.frozen_params, is_adapted(param))

    def shard(self, tp: int, tp_index: int, fsdp: int, fsdp_index: int) -> LocalShard:
        """Return the shard at a position."""
        shares = (Share(fsdp, fsdp_index) if cut.is_gathered else Share(tp, tp_index) for cut in self.cuts)
        return local_shard(self.shape, self.cuts, tuple(shares))


class _Count(NamedTuple):
    """Elements of some parameters on one rank."""

    whole: int
    trained: int
    sharded: int
    trained_sharded: int
    adapted: int

    @classmethod
    def from_params(cls, params: Iterable[_Param], tp: int, tp_index: int, fsdp: int) -> _Count:
        sums = [0, 0, 0, 0, 0]
        for param in params:
            shape = param.shard(tp, tp_index, 1, 0).shape
            whole = math.prod(shape)
            padded = -(-shape[0] // fsdp) * math.prod(shape[1:]) if shape else 1
            trained, adapted = param.is_trained, param.is_adapted
            for at, size in enumerate((whole, whole * trained, padded, padded * trained, whole * adapted)):
                sums[at] += size
        return cls(*sums)
