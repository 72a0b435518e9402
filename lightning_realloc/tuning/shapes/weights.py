"""Elements that a rank holds, and elements that move between two layouts, in closed form.

Parameters with the same cut are counted together, and blocks count as equal. This gives in microseconds the sizes that
the planner in ``realloc`` derives parameter by parameter; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.cuts import TensorParallelCut
from lightning_realloc.layout.dims import AXES, Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec, ParamSpec, stage_blocks

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class Ranges(NamedTuple):
    """Ranges of a dim, one for each of some ranks, as arrays."""

    begin: IntArray
    end: IntArray
    length: int
    """Length of the dim, in the unit of ``begin`` and ``end``."""

    @property
    def share(self) -> FloatArray:
        """Size of each range as a fraction of the dim."""
        share: FloatArray = (self.end - self.begin) / self.length
        return share

    def chunked(self, index: IntArray, count: int) -> Ranges:
        """Return chunk ``index`` of ``count`` equal ones of each range."""
        size, begin = self.end - self.begin, self.begin * count
        return Ranges(begin + size * index, begin + size * (index + 1), self.length * count)

    def common(self, other: Ranges) -> FloatArray:
        """Return the fraction of the dim that lies in both ranges, rank by rank."""
        first = np.maximum(self.begin * other.length, other.begin * self.length)
        last = np.minimum(self.end * other.length, other.end * self.length)
        share: FloatArray = np.maximum(0, last - first) / (self.length * other.length)
        return share


class SizedCut(NamedTuple):
    """Tensor-parallel cut of a parameter, as far as its sizes depend on it."""

    along: int | None
    """0: the dim that FSDP chunks as well; 1: another dim; None: not cut."""
    heads: TensorParallelCut | None
    """The cut, if it is one between heads, of which ranks may hold different numbers; None: tp divides the dim."""
    rows: int | None = None
    """Length of the dim that FSDP chunks, if it is a number of experts, too small for equal chunks; None: large."""

    @classmethod
    def from_param(cls, param: ParamSpec) -> SizedCut:
        """Return the cut of one parameter."""
        rows = param.shape[0] if len(param.shape) == 3 else None
        cut = param.tensor_cut
        if cut is None:
            return cls(None, None, rows)
        has_heads = cut.num_units is not None and not cut.block_sizes
        return cls(min(cut.dim, 1), cut if has_heads else None, rows if cut.dim else None)

    def ranges(self, tp: int, index: IntArray) -> Ranges:
        """Return the ranges of the cut dim that tensor-parallel ranks hold; the whole dim if it is not cut."""
        if self.along is None or tp == 1:
            return Ranges(np.zeros_like(index), np.ones_like(index), 1)
        if self.heads is None:
            return Ranges(index, index + 1, tp)
        bounds, length = _head_bounds(self.heads, tp)
        return Ranges(bounds[index, 0], bounds[index, 1], length)

    def without_even_heads(self, *degrees: int) -> SizedCut:
        """Return the cut as one that tp divides, if all of these degrees share its heads evenly."""
        if self.heads is None or not all(_shares_evenly(self.heads, tp) for tp in degrees):
            return self
        return self._replace(heads=None)

    def largest_share(self, tp: int) -> float:
        """Return the fraction of the parameter that the first of ``tp`` ranks holds; no other rank holds more."""
        return float(self.ranges(tp, np.zeros(1, dtype=np.int64)).share[0])

    def padding(self, fsdp: int) -> float:
        """Return the size of the largest of ``fsdp`` chunks relative to an equal share."""
        return 1.0 if self.rows is None else -(-self.rows // fsdp) * fsdp / self.rows


@lru_cache(maxsize=1024)
def _head_bounds(cut: TensorParallelCut, tp: int) -> tuple[IntArray, int]:
    """Return begin and end (tp, 2) of each rank's heads, and the number of all heads."""
    assert cut.num_units is not None, "a cut between heads has units"
    return np.array([cut.unit_bounds(cut.num_units, tp, index) for index in range(tp)]), cut.num_units


@lru_cache(maxsize=1024)
def _shares_evenly(cut: TensorParallelCut, tp: int) -> bool:
    bounds, length = _head_bounds(cut, tp)
    even = np.arange(tp)[:, None] + (0, 1)
    return bool((bounds * tp == even * length).all())


@dataclass(frozen=True, slots=True)
class Weights:
    """Elements of a model by section and by cut."""

    num_blocks: int
    block: tuple[tuple[SizedCut, float], ...]
    """Elements of one block by cut, as a mean over blocks."""
    input: tuple[tuple[SizedCut, float], ...]
    """Elements before the blocks by cut; they lie on the first stage."""
    output: tuple[tuple[SizedCut, float], ...]
    """Elements after the blocks by cut; they lie on the last stage."""

    @classmethod
    def from_model(cls, model: ModelSpec, without: frozenset[str] = frozenset()) -> Weights:
        """Count the parameters of a model, except those named in ``without``."""
        sums: dict[str, dict[SizedCut, float]] = {"input": {}, "block": {}, "output": {}}
        for param in model.params:
            if param.name not in without:
                section = sums[param.section]
                section[SizedCut.from_param(param)] = section.get(SizedCut.from_param(param), 0) + param.numel
        blocks = max(1, model.num_blocks)
        block = tuple((cut, size / blocks) for cut, size in sums["block"].items())
        return cls(model.num_blocks, block, tuple(sums["input"].items()), tuple(sums["output"].items()))

    @property
    def total(self) -> float:
        """Elements of the whole model."""
        outside = sum(size for _, size in (*self.input, *self.output))
        return outside + self.num_blocks * sum(size for _, size in self.block)

    def stage_elements(self, dims: ParallelDims) -> float:
        """Return the elements of the fullest stage on one rank after FSDP's gather, with the padding of its shards."""
        return _fullest_stage(self, dims.pp, dims.fsdp, dims.tp)


@lru_cache(maxsize=4096)
def _fullest_stage(weights: Weights, pp: int, fsdp: int, tp: int) -> float:
    blocks = [len(run) for run in stage_blocks(weights.num_blocks, pp)]
    block, head, tail = (_local(sizes, fsdp, tp) for sizes in (weights.block, weights.input, weights.output))
    first, last = blocks[0] * block + head, blocks[-1] * block + tail
    return first + tail if pp == 1 else max(first, last)


def _local(sizes: tuple[tuple[SizedCut, float], ...], fsdp: int, tp: int) -> float:
    return sum(size * cut.padding(fsdp) * cut.largest_share(tp) for cut, size in sizes)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Elements that move from one layout to another, on the busiest ranks and nodes."""

    received: float
    """Elements received by the target rank that lacks most."""
    needed: float
    """Elements of the fullest target rank, with those that it already holds."""
    sent_inside: float
    """Elements that each source rank of the busiest node sends to ranks of its node."""
    received_between: float
    """Elements that each target rank of the node that lacks most receives from other nodes."""
    sent_between: float
    """Elements that each source rank sends to other nodes."""
    total_received: float
    """Elements received by all target ranks."""
    total_between: float
    """Elements that enter a node, over all nodes."""


def traffic(weights: Weights, source: Layout, target: Layout, cluster: ClusterSpec) -> Traffic:
    """Return the traffic under the planner's rules: ranks receive elements that they lack, and nodes none twice.

    Only ranks of the same node are compared with each other, so that a thousand ranks take about a millisecond.
    """
    before, after = _Mesh(source, cluster, weights.num_blocks), _Mesh(target, cluster, weights.num_blocks)
    nodes = int(max(before.nodes.max(), after.nodes.max())) + 1
    reader, holder = _neighbours(after, before, nodes)
    is_same = after.ranks[reader] == before.ranks[holder]
    needed, kept, near = (np.zeros(len(target.ranks)) for _ in range(3))
    ingress = np.zeros(nodes)
    for cut, sizes in _by_cut(weights, source.dims.tp, target.dims.tp).items():
        own, common = after.held(cut, sizes), _overlap(cut, sizes, (after, reader), (before, holder))
        needed += own
        kept += np.bincount(reader[is_same], weights=common[is_same], minlength=len(needed))
        # Equal pieces on a node count once.
        first_reader, first_holder = after.is_first(cut), before.is_first(cut)
        found = np.bincount(reader, weights=common * first_holder[holder], minlength=len(needed))
        near += found
        ingress += np.bincount(after.nodes, weights=(own - found) * first_reader, minlength=nodes)
    lacking = needed - kept
    inside = np.bincount(after.nodes, weights=near - kept, minlength=nodes)
    sources = np.bincount(before.nodes, minlength=nodes)
    targets = np.bincount(after.nodes, minlength=nodes)
    return Traffic(
        received=float(lacking.max()),
        needed=float(needed.max()),
        sent_inside=float((inside / np.maximum(1, sources)).max()),
        received_between=float((ingress / np.maximum(1, targets)).max()),
        sent_between=float(ingress.sum() / len(source.ranks)),
        total_received=float(lacking.sum()),
        total_between=float(ingress.sum()),
    )


class _Sizes(NamedTuple):
    """Elements with the same cut, by section."""

    block: float
    input: float
    output: float


@lru_cache(maxsize=1024)
def _by_cut(weights: Weights, *degrees: int) -> dict[SizedCut, _Sizes]:
    """Return the elements of each cut; cuts between heads that all of these degrees share evenly count as one."""
    found: dict[SizedCut, list[float]] = {}
    for section, sizes in enumerate((weights.block, weights.input, weights.output)):
        for cut, size in sizes:
            found.setdefault(cut.without_even_heads(*degrees), [0.0, 0.0, 0.0])[section] += size
    return {cut: _Sizes(*sums) for cut, sums in found.items()}


class _Mesh:
    """Nodes, coordinates and blocks of a layout's ranks, as arrays."""

    def __init__(self, layout: Layout, cluster: ClusterSpec, num_blocks: int) -> None:
        self.dims = dims = layout.dims
        self.ranks = np.array(layout.ranks)
        self.nodes = self.ranks // cluster.devices_per_node
        along = dict(zip(AXES, np.unravel_index(np.arange(dims.size), dims.degrees), strict=True))
        self.tp, self.fsdp, self.pp = along["tp"], along["fsdp"], along["pp"]
        runs = stage_blocks(num_blocks, dims.pp)
        self.begin = np.array([run.start for run in runs])[self.pp]
        self.end = np.array([run.stop for run in runs])[self.pp]

    def ranges(self, cut: SizedCut) -> Ranges:
        """Return the range of the cut dim that each rank holds before FSDP's chunks."""
        return cut.ranges(self.dims.tp, self.tp)

    def held(self, cut: SizedCut, sizes: _Sizes) -> FloatArray:
        """Return the number of elements that each rank holds."""
        whole = sizes.block * (self.end - self.begin)
        whole = whole + sizes.input * (self.pp == 0) + sizes.output * (self.pp == self.dims.pp - 1)
        held: FloatArray = whole * _chunk(self.fsdp, self.dims.fsdp, cut.rows).share * self.ranges(cut).share
        return held

    def is_first(self, cut: SizedCut) -> NDArray[np.bool_]:
        """Return, for each rank, whether it is the first on its node with its piece."""
        ranges = self.ranges(cut)
        piece = (self.pp * self.dims.fsdp + self.fsdp) * ranges.length + ranges.begin
        _, first = np.unique(self.nodes * self.dims.size * ranges.length + piece, return_index=True)
        result = np.zeros(len(self.ranks), dtype=np.bool_)
        result[first] = True
        return result


def _neighbours(after: _Mesh, before: _Mesh, nodes: int) -> tuple[IntArray, IntArray]:
    """Return all pairs of a target rank and a source rank on the same node, as positions in their meshes."""
    order = np.argsort(before.nodes, kind="stable")
    counts = np.bincount(before.nodes, minlength=nodes)
    starts = np.cumsum(counts) - counts
    each = counts[after.nodes]
    reader = np.repeat(np.arange(len(after.ranks)), each)
    within = np.arange(len(reader)) - np.repeat(np.cumsum(each) - each, each)
    return reader, order[starts[after.nodes[reader]] + within]


def _overlap(cut: SizedCut, sizes: _Sizes, one: tuple[_Mesh, IntArray], other: tuple[_Mesh, IntArray]) -> FloatArray:
    """Return the number of elements that both ranks of each pair hold."""
    (a, i), (b, j) = one, other
    blocks = np.maximum(0, np.minimum(a.end[i], b.end[j]) - np.maximum(a.begin[i], b.begin[j]))
    first = (a.pp[i] == 0) & (b.pp[j] == 0)
    last = (a.pp[i] == a.dims.pp - 1) & (b.pp[j] == b.dims.pp - 1)
    whole = sizes.block * blocks + sizes.input * first + sizes.output * last
    range_a, range_b = cut.ranges(a.dims.tp, a.tp[i]), cut.ranges(b.dims.tp, b.tp[j])
    if cut.along == 0:  # FSDP chunks the dim that tensor parallelism cuts
        share = range_a.chunked(a.fsdp[i], a.dims.fsdp).common(range_b.chunked(b.fsdp[j], b.dims.fsdp))
    else:
        chunks = _chunk(a.fsdp[i], a.dims.fsdp, cut.rows).common(_chunk(b.fsdp[j], b.dims.fsdp, cut.rows))
        share = chunks * range_a.common(range_b)
    common: FloatArray = whole * share
    return common


def _chunk(index: IntArray, count: int, rows: int | None) -> Ranges:
    """Return FSDP's chunks of a dim.

    They are equal or, with ``rows``, those of ``torch.chunk``, whose last ones may be shorter or empty.
    """
    if rows is None:
        return Ranges(index, index + 1, count)
    size = -(-rows // count)
    return Ranges(np.minimum(rows, index * size), np.minimum(rows, (index + 1) * size), rows)
