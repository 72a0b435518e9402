"""Count the elements that move between two layouts, on the busiest ranks and nodes.

This gives in a few milliseconds the sizes that the planner in ``realloc`` derives transfer by transfer. A property test
compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import AXES, Layout
from lightning_realloc.tuning.shapes.role_elements import CUTTING_AXES, IntArray, RoleElements, Shards, inside


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


def traffic(
    elements: RoleElements, source: Layout, target: Layout, cluster: ClusterSpec, *, trained_only: bool = False
) -> Traffic:
    """Return the traffic under the planner's rules: ranks receive elements that they lack, and nodes none twice.

    Only ranks of the same node are compared with each other, so that the time grows in proportion to the ranks.

    Args:
        trained_only: Whether only parameters that are trained move.
    """
    counts = elements.trained_counts if trained_only else elements.counts
    before, after = _Mesh.from_layout(elements, source, cluster), _Mesh.from_layout(elements, target, cluster)
    nodes = int(max(before.nodes.max(), after.nodes.max())) + 1
    reader, holder = _neighbours(after.nodes, before.nodes, nodes)
    is_same = after.ranks[reader] == before.ranks[holder]
    needed, kept, near = (np.zeros(len(target.ranks)) for _ in range(3))
    ingress = np.zeros(nodes)
    begin = np.maximum(after.begin[reader], before.begin[holder])
    shared = begin, np.maximum(begin, np.minimum(after.end[reader], before.end[holder]))
    shards = zip(elements.shards(inside(target.dims)), elements.shards(inside(source.dims)), strict=True)
    for count, (wanted, held) in zip(counts.T, shards, strict=True):
        upto = np.concatenate(([0], np.cumsum(count)))  # parameters before each place
        wanted_by, held_by = wanted.number[after.position], held.number[before.position]
        own = (upto[after.end] - upto[after.begin]) * wanted.sizes[wanted_by]
        common = (upto[shared[1]] - upto[shared[0]]) * _overlap(wanted, wanted_by[reader], held, held_by[holder])
        needed += own
        kept += np.bincount(reader[is_same], weights=common[is_same], minlength=len(needed))
        # Equal shards on a node count once.
        first_reader, first_holder = after.is_first(wanted_by), before.is_first(held_by)
        found = np.bincount(reader, weights=common * first_holder[holder], minlength=len(needed))
        near += found
        ingress += np.bincount(after.nodes, weights=(own - found) * first_reader, minlength=nodes)
    lacking = needed - kept
    sent = np.bincount(after.nodes, weights=near - kept, minlength=nodes)
    sources = np.bincount(before.nodes, minlength=nodes)
    targets = np.bincount(after.nodes, minlength=nodes)
    return Traffic(
        received=float(lacking.max()),
        needed=float(needed.max()),
        sent_inside=float((sent / np.maximum(1, sources)).max()),
        received_between=float((ingress / np.maximum(1, targets)).max()),
        sent_between=float(ingress.sum() / len(source.ranks)),
        total_received=float(lacking.sum()),
        total_between=float(ingress.sum()),
    )


class _Mesh(NamedTuple):
    """Nodes, positions and places of a layout's ranks, as arrays."""

    ranks: IntArray
    nodes: IntArray
    position: IntArray
    """Position of each rank within its stage and replica."""
    begin: IntArray
    """First place of each rank's stage."""
    end: IntArray
    """One past the last place of each rank's stage."""

    @classmethod
    def from_layout(cls, elements: RoleElements, layout: Layout, cluster: ClusterSpec) -> _Mesh:
        """Return the arrays of a layout."""
        dims, ranks = layout.dims, np.array(layout.ranks)
        along = dict(zip(AXES, np.unravel_index(np.arange(dims.size), dims.degrees), strict=True))
        stage, position = (
            np.ravel_multi_index([along[axis] for axis in axes], [layout.count(axis) for axis in axes])
            for axes in (layout.stage_axes, CUTTING_AXES)
        )
        places = [elements.places(dims.pp, index) for index in range(dims.pp)]
        begin, end = np.array([[run.start, run.stop] for run in places])[stage].T
        return cls(ranks, ranks // cluster.devices_per_node, position, begin, end)

    def is_first(self, shard: IntArray) -> NDArray[np.bool_]:
        """Return, for each rank, whether it is the first on its node with its stage and its shard."""
        keys = (self.nodes * (self.end.max() + 1) + self.begin) * (shard.max() + 1) + shard
        _, first = np.unique(keys, return_index=True)
        result = np.zeros(len(self.ranks), dtype=np.bool_)
        result[first] = True
        return result


def _neighbours(after: IntArray, before: IntArray, nodes: int) -> tuple[IntArray, IntArray]:
    """Return all pairs of a target rank and a source rank on the same node, as positions in their layouts."""
    order = np.argsort(before, kind="stable")
    counts = np.bincount(before, minlength=nodes)
    starts = np.cumsum(counts) - counts
    each = counts[after]
    reader = np.repeat(np.arange(len(after)), each)
    within_node = np.arange(len(reader)) - np.repeat(np.cumsum(each) - each, each)
    return reader, order[starts[after[reader]] + within_node]


def _overlap(wanted: Shards, reader: IntArray, held: Shards, holder: IntArray) -> IntArray:
    """Return the number of elements that both shards of each pair have."""
    common = np.zeros(len(reader), dtype=np.int64)
    for one in range(wanted.bounds.shape[1]):
        for other in range(held.bounds.shape[1]):
            a, b = wanted.bounds[reader, one], held.bounds[holder, other]
            lengths = np.minimum(a[..., 1], b[..., 1]) - np.maximum(a[..., 0], b[..., 0])
            common += np.maximum(0, lengths).prod(axis=-1)
    return common
