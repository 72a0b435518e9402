"""Parameters of a model, and the regions of each that every rank of a layout holds.

``ModelSpec`` describes the parameters without weights; ``ModelLayout`` distributes them over ranks.
``lightning_realloc.realloc`` plans how they move between two model layouts.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, get_args

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout.cuts import Cut, ExpertCut, FsdpCut, TensorParallelCut
from lightning_realloc.layout.dims import Layout, ParallelDims, name_expert_degrees
from lightning_realloc.layout.sharding import LocalShard, Piece, local_shard

Section = Literal["input", "block", "output", "ends"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its global shape, its cuts, and its place in the model."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    cuts: tuple[Cut, ...] = (FsdpCut(),)
    """Cuts in the order in which they apply. Ranks along axes of none of them hold the same elements."""
    section: Section = "block"
    """Place relative to the blocks: "input" lies on the first pipeline stage, "output" on the last, "ends" on both (as
    embeddings that the head is tied to)."""
    block: int | None = None
    """Index of the parameter's block; None outside blocks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "cuts", tuple(self.cuts))
        if self.section not in get_args(Section):
            raise LayoutError(f"{self.name}: section={self.section!r} must be one of {', '.join(get_args(Section))}")
        if (self.section == "block") != (self.block is not None):
            raise LayoutError(
                f"{self.name}: section={self.section!r} with block={self.block}; "
                'give an index to "block" and to no other section'
            )
        try:
            self._check_cuts()
        except LayoutError as error:
            raise LayoutError(f"{self.name}: {error}") from None

    def _check_cuts(self) -> None:
        axes = [axis for cut in self.cuts for axis in cut.axes]
        if len(set(axes)) < len(axes):
            raise LayoutError(f"its cuts go by the axes {axes}; let each axis cut once")
        for number, cut in enumerate(self.cuts):
            cut.check_shape(self.shape)
            earlier = self.cuts[:number]
            if cut.needs_whole_dim and cut.dim in (other.dim for other in earlier):
                raise LayoutError(f"{cut} counts units along the whole dim; let it be the first cut of dim {cut.dim}")
            if not cut.is_gathered and any(other.is_gathered for other in earlier):
                raise LayoutError(f"{cut} follows one that FSDP gathers; let FSDP's cut be the last")

    @property
    def tensor_cut(self) -> TensorParallelCut | None:
        """The cut by tensor parallelism; None if every tensor-parallel rank holds all of the parameter."""
        return next((cut for cut in self.cuts if isinstance(cut, TensorParallelCut)), None)

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Parameters of a model without their values; tied parameters are listed once.

    >>> from lightning_realloc.layout import ParamSpec
    >>> embedding = ParamSpec("embed.weight", (32, 8), section="input")
    >>> blocks = [ParamSpec(f"blocks.{i}.weight", (8, 8), block=i) for i in range(2)]
    >>> ModelSpec((embedding, *blocks), num_blocks=2).num_elements
    384
    """

    params: tuple[ParamSpec, ...]
    num_blocks: int
    """Number of blocks, which pipeline stages divide among themselves."""
    aliases: tuple[tuple[str, str], ...] = ()
    """(tied name, owner name) pairs. A tied name shares the owner's parameter and is not listed in ``params``."""
    tp_refusal: str | None = None
    """Reason why tp > 1 is impossible for this model; None when it is possible."""
    ep_refusal: str | None = "it has no experts"
    """Reason why ep > 1 is impossible for this model; None when it is possible."""
    attention_heads: tuple[tuple[int, int], ...] = ()
    """Numbers of query and key-value heads of the kinds of attention layers; empty if they are unknown."""
    costs: tuple[int, ...] = ()
    """Relative costs per token of the input, of every block, and of the output, which pipeline stages balance. (): only
    blocks cost something, all the same."""
    first_blocks: int = 1
    """Blocks that the first pipeline stage needs: those after which parts of the input are added again."""
    _by_name: dict[str, ParamSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {param.name: param for param in self.params})
        if len(self._by_name) != len(self.params):
            names = [param.name for param in self.params]
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise LayoutError(f"parameters {repeated} are listed more than once; list tied names as aliases")
        if self.costs and len(self.costs) != self.num_blocks + 2:
            raise LayoutError(
                f"costs has {len(self.costs)} entries for num_blocks={self.num_blocks}; give one for the input, one "
                "for each block and one for the output"
            )
        for param in self.params:
            if param.block is not None and not 0 <= param.block < self.num_blocks:
                raise LayoutError(f"{param.name}: block={param.block} must be below num_blocks={self.num_blocks}")
        for tied, owner in self.aliases:
            if owner not in self._by_name or tied in self._by_name:
                raise LayoutError(f"alias ({tied!r}, {owner!r}) must map a name outside params to one inside")

    @property
    def num_elements(self) -> int:
        """Number of elements of all parameters; tied parameters count once."""
        return sum(param.numel for param in self.params)

    def param(self, name: str) -> ParamSpec:
        """Return the parameter called ``name``, or the owner that the name is tied to."""
        owner = dict(self.aliases).get(name, name)
        if owner not in self._by_name:
            raise LayoutError(f"the model has no parameter {name!r}; it has {', '.join(list(self._by_name)[:4])}, …")
        return self._by_name[owner]

    def stage_blocks(self, pp: int) -> tuple[range, ...]:
        """Return the blocks of each of ``pp`` pipeline stages, or runs of blocks."""
        return balanced_stages(self.costs or (0, *(1,) * self.num_blocks, 0), pp, self.first_blocks)

    def tensor_parallel_degrees(self, limit: int) -> tuple[int, ...]:
        """Return the tp degrees up to ``limit`` that every parameter allows."""
        return (1,) if self.tp_refusal is not None else self.allowed_counts(TensorParallelCut.axes, limit)

    def expert_parallel_degrees(self, limit: int) -> tuple[int, ...]:
        """Return the ep degrees up to ``limit`` that the experts of every layer allow."""
        return (1,) if self.ep_refusal is not None else self.allowed_counts(ExpertCut.axes, limit)

    def context_parallel_degrees(self, limit: int) -> tuple[int, ...]:
        """Return the cp degrees up to ``limit``: all, or 1 if no heads are known, as of models without attention."""
        return tuple(range(1, (limit if self.attention_heads else 1) + 1))

    def allowed_counts(self, axes: tuple[str, ...], limit: int) -> tuple[int, ...]:
        """Return the numbers of ranks along ``axes``, up to ``limit``, that can divide every parameter they cut."""
        cuts = {(cut, param.shape) for param in self.params for cut in param.cuts if cut.axes == axes}
        counts = range(1, limit + 1)
        return tuple(n for n in counts if n == 1 or all(cut.refusal(shape, n) is None for cut, shape in cuts))


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A model distributed over the ranks of a layout.

    >>> from lightning_realloc.layout import ParamSpec
    >>> model = ModelSpec((ParamSpec("weight", (8, 4), block=0),), num_blocks=1)
    >>> ModelLayout(model, Layout.parse("fsdp2@0-1")).local_shape("weight", rank=1)
    (4, 4)
    """

    model: ModelSpec
    layout: Layout
    _first_blocks: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """First block of every run of blocks."""

    def __post_init__(self) -> None:
        tp = self.layout.count(*TensorParallelCut.axes)
        if tp > 1 and self.model.tp_refusal is not None:
            raise LayoutError(f"tp={tp} is impossible for this model: {self.model.tp_refusal}; use tp=1")
        self._check_experts()
        self._check_cuts()
        self._check_pipeline()
        runs = self.model.stage_blocks(self.layout.dims.num_runs)
        object.__setattr__(self, "_first_blocks", tuple(run.start for run in runs))

    def cut_dims(self) -> dict[str, set[int]]:
        """Return, for every degree by which ranks divide parameters, the dims that are cut."""
        found: dict[str, set[int]] = {}
        for cut in {cut for param in self.model.params for cut in param.cuts}:
            for axis in cut.axes:
                if axis in ParallelDims.__dataclass_fields__ and self.layout.count(axis) > 1:
                    found.setdefault(axis, set()).add(cut.dim)
        return dict(sorted(found.items()))

    def subset(self, names: Collection[str]) -> ModelLayout:
        """Return the layout of some of the parameters alone, without tied names."""
        wanted = frozenset(names)  # of experts there are tens of thousands
        params = tuple(param for param in self.model.params if param.name in wanted)
        return ModelLayout(replace(self.model, params=params, aliases=()), self.layout)

    def stages(self, name: str) -> tuple[int, ...]:
        """Return the pipeline stages that hold the parameter: one, or the first and the last for "ends"."""
        return tuple(run % self.layout.dims.pp for run in self.runs(name))

    def runs(self, name: str) -> tuple[int, ...]:
        """Return the runs of blocks that use the parameter. Those before the blocks belong to the first run."""
        param, last = self.model.param(name), self.layout.dims.num_runs - 1
        if param.block is not None:
            return (bisect_right(self._first_blocks, param.block) - 1,)
        if param.section == "ends" and last > 0:
            return (0, last)
        return (0 if param.section == "input" else last,)

    def names(self, rank: int) -> tuple[str, ...]:
        """Return the parameters of the rank's pipeline stage, including empty shards; () outside the layout."""
        if rank not in self.layout:
            return ()
        stage = self.layout.coordinate(rank).pp
        return tuple(param.name for param in self.model.params if stage in self.stages(param.name))

    def shard(self, name: str, rank: int) -> LocalShard | None:
        """Return the rank's local shard of a parameter; None when the rank's stage does not hold the parameter."""
        return self._shard(name, rank, self.model.param(name).cuts)

    def gathered_shard(self, name: str, rank: int) -> LocalShard | None:
        """Return, as `shard` does, the part of a parameter that modules compute with: all but what FSDP divides."""
        return self._shard(name, rank, tuple(cut for cut in self.model.param(name).cuts if not cut.is_gathered))

    def _shard(self, name: str, rank: int, cuts: tuple[Cut, ...]) -> LocalShard | None:
        if rank not in self.layout or self.layout.coordinate(rank).pp not in self.stages(name):
            return None
        shares = tuple(self.layout.share(rank, *cut.axes) for cut in cuts)
        return local_shard(self.model.param(name).shape, cuts, shares)

    def pieces(self, name: str, rank: int) -> tuple[Piece, ...]:
        """Return the regions that the rank holds, with their offsets in its local tensor; () if there are none."""
        shard = self.shard(name, rank)
        return () if shard is None else shard.pieces

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the shape of the rank's local tensor. Raises LayoutError when the rank has no such parameter."""
        shard = self.shard(name, rank)
        if shard is None:
            raise LayoutError(f"rank {rank} has no {name!r} under {self.layout}; use the parameters of names({rank})")
        return shard.shape

    def holders(self, name: str) -> tuple[tuple[LocalShard, tuple[int, ...]], ...]:
        """Return every distinct shard (including empty ones) with the ranks that hold it, in the layout's order."""
        ranks: dict[LocalShard, list[int]] = {}
        for rank in self.layout.ranks:
            shard = self.shard(name, rank)
            if shard is not None:
                ranks.setdefault(shard, []).append(rank)
        return tuple((shard, tuple(held_by)) for shard, held_by in ranks.items())

    def num_holders(self, name: str, rank: int) -> int:
        """Return the number of ranks that hold the same elements of a parameter as ``rank``, itself included."""
        number = len(self.layout.ranks) // self.layout.count(*self.layout.stage_axes) * len(self.stages(name))
        for cut in self.model.param(name).cuts:
            count, index = self.layout.share(rank, *cut.axes)
            sharing = cut.shared_by(count, index)
            number = number // count * (1 if sharing is None else len(sharing))
        return number

    def num_local_elements(self, rank: int) -> int:
        """Return the number of elements of all local tensors of the rank."""
        return sum(math.prod(self.local_shape(name, rank)) for name in self.names(rank))

    def _check_cuts(self) -> None:
        for param in self.model.params:
            for cut in param.cuts:
                count = self.layout.count(*cut.axes)
                rule = None if count == 1 else cut.refusal(param.shape, count)
                if rule is not None:
                    allowed = self.model.allowed_counts(cut.axes, count)
                    raise LayoutError(f"{param.name}: {rule}; use {'*'.join(cut.axes)} in {allowed}")

    def _check_experts(self) -> None:
        dims = self.layout.dims
        if dims.ep > 1 and self.model.ep_refusal is not None:
            raise LayoutError(f"ep={dims.ep} is impossible for this model: {self.model.ep_refusal}; leave ep out")
        possible = self.model.expert_parallel_degrees(dims.expert_degrees[-1]) if dims.ep > 1 else (1,)
        if dims.ep not in possible:
            cuts = ((param, cut) for param in self.model.params for cut in param.cuts if cut.axes == ExpertCut.axes)
            name, rule = next((param.name, rule) for param, cut in cuts if (rule := cut.refusal(param.shape, dims.ep)))
            here = tuple(degree for degree in dims.expert_degrees if degree in possible)
            others = "" if here == possible else f", or use ep in {possible} with other degrees of dp and fsdp"
            raise LayoutError(f"{name}: {rule}; {name_expert_degrees(here)}{others}")

    def _check_pipeline(self) -> None:
        pp = self.layout.dims.pp
        if pp == 1:
            return
        if pp > self.model.num_blocks:
            raise LayoutError(
                f"pp={pp} needs at least one block per stage but the model has {self.model.num_blocks} blocks; "
                f"use pp of at most {max(1, self.model.num_blocks)}"
            )
        if self.layout.dims.num_runs > self.model.num_blocks:
            largest = self.model.num_blocks // pp
            raise LayoutError(
                f"pp={pp} with vpp={self.layout.dims.vpp} needs pp*vpp={self.layout.dims.num_runs} blocks but the "
                f"model has {self.model.num_blocks}; "
                f"{f'use vpp of at most {largest}' if largest > 1 else 'leave vpp out'}"
            )
        for tied, owner in self.model.aliases:
            if self.model.param(owner).section in ("input", "output"):
                raise LayoutError(
                    f"pp={pp} divides models with a head that is tied to the embeddings, and no other ties such as "
                    f"{tied!r} to {owner!r}; untie them or use pp=1"
                )


@lru_cache(maxsize=4096)
def balanced_stages(costs: tuple[int, ...], pp: int, first_blocks: int = 1) -> tuple[range, ...]:
    """Return the blocks of every stage: contiguous runs, at least one block each.

    Of all divisions, it has the cheapest most expensive stage, then the cheapest second one, and so on. Of equal ones,
    earlier stages have more blocks. Exact, by dynamic programming over the blocks that the first stages hold.

    Args:
        costs: Costs of the input, which the first stage runs, of every block, and of the output, which the last runs.
        first_blocks: Blocks of the first stage, at least, if there are enough for the others.

    >>> balanced_stages((0, 1, 1, 1, 1, 1, 1, 3), pp=3)
    (range(0, 3), range(3, 5), range(5, 6))
    """
    first, *blocks, last = costs
    if pp == 1:
        return (range(len(blocks)),)
    assert pp <= len(blocks), "ModelLayout refuses more stages than blocks"
    blocks[0] += first
    blocks[-1] += last
    before = [0, *itertools.accumulate(blocks)]
    least = min(first_blocks, len(blocks) - pp + 1)
    # Filling stages up to their mean, one block more, needs no further stage.
    most = max(before[-1] // pp + max(blocks), before[least])
    # Blocks that the first stages hold -> costs of these stages, descending, and the first block of each.
    best: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {0: ((), ())}
    for stage in range(pp):
        reached: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for end in range(max(stage + 1, least), len(blocks) - (pp - stage - 1) + 1):
            starts = (n for n in range(end - 1, stage - 1, -1) if n in best and before[end] - before[n] <= most)
            found = [(_descending(best[start][0], before[end] - before[start]), start) for start in starts]
            if found:
                stage_costs, start = min(found, key=lambda one: one[0])
                reached[end] = stage_costs, (*best[start][1], start)
        best = reached
    begins = best[len(blocks)][1]
    return tuple(map(range, begins, (*begins[1:], len(blocks))))


def _descending(costs: tuple[int, ...], cost: int) -> tuple[int, ...]:
    return tuple(sorted((*costs, cost), reverse=True))
