"""Count the elements that move between two layouts, on the busiest ranks and nodes, and the bytes that ranks stage.

This gives in a few milliseconds the sizes that the planner in ``realloc`` derives transfer by transfer. A property test
compares the two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout
from lightning_realloc.limits import MAX_STAGING_BYTES, PACK_BELOW_BYTES
from lightning_realloc.tuning.shapes.role_elements import (
    IntArray,
    RoleElements,
    Shards,
    axis_positions,
    count_between,
    count_common,
    inside,
)


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

    Only ranks of the same node are compared with each other, and of nodes with equal ranks only the first is counted.

    Args:
        trained_only: Whether only parameters that are trained move.
    """
    counts = elements.trained_counts if trained_only else elements.counts
    before, after = _Mesh.from_layout(elements, source), _Mesh.from_layout(elements, target)
    first_nodes, times = _distinct_nodes(before, after, cluster.devices_per_node)
    (before, before_nodes), (after, after_nodes) = (
        mesh.on_nodes(first_nodes, cluster.devices_per_node) for mesh in (before, after)
    )
    nodes = len(first_nodes)
    reader, holder = _neighbours(after_nodes, before_nodes, nodes)
    is_same = after.ranks[reader] == before.ranks[holder]
    needed, kept, near = (np.zeros(len(after.ranks)) for _ in range(3))
    ingress = np.zeros(nodes)
    num_wanted = count_between(counts, after.begin, after.end)
    num_common = _count_common(counts, after, reader, before, holder)
    for family, (wanted, held) in enumerate(_shards(elements, target, source)):
        wanted_by, held_by = wanted.number[after.position], held.number[before.position]
        own = num_wanted[:, family] * wanted.sizes[wanted_by]
        common = num_common[:, family] * _overlap(wanted, wanted_by[reader], held, held_by[holder])
        needed += own
        kept += np.bincount(reader[is_same], weights=common[is_same], minlength=len(needed))
        # Equal shards on a node count once.
        first_reader = after.is_first(wanted_by, after_nodes, family)
        first_holder = before.is_first(held_by, before_nodes, family)
        found = np.bincount(reader, weights=common * first_holder[holder], minlength=len(needed))
        near += found
        ingress += np.bincount(after_nodes, weights=(own - found) * first_reader, minlength=nodes)
    lacking = needed - kept
    between = float((ingress * times).sum())
    sent = np.bincount(after_nodes, weights=near - kept, minlength=nodes)
    sources = np.bincount(before_nodes, minlength=nodes)
    targets = np.bincount(after_nodes, minlength=nodes)
    return Traffic(
        received=float(lacking.max()),
        needed=float(needed.max()),
        sent_inside=float((sent / np.maximum(1, sources)).max()),
        received_between=float((ingress / np.maximum(1, targets)).max()),
        sent_between=between / len(source.ranks),
        total_received=float((lacking * times[after_nodes]).sum()),
        total_between=between,
    )


def staging_bytes(
    elements: RoleElements, home: Layout, replica: Layout, *, element_bytes: int, casts_trained: bool
) -> Counter[int]:
    """Return rank -> the bytes that it stages to fill a replica from its home, for sending and receiving together.

    A piece that is large, contiguous on both ranks and of one dtype goes from storage to storage. The others are
    staged, by the rules of ``runtime.transfer.point_to_point``. Pieces are taken to be equal, and senders equally busy.

    Args:
        element_bytes: Bytes of a weight of the replica.
        casts_trained: Whether trained weights have another dtype at home. Frozen ones have the replica's.
    """
    shapes = elements.shapes(home.dims), elements.shapes(replica.dims)
    pieces = [tuple(map(min, *pair)) for pair in zip(*shapes, strict=True)]
    is_small = np.array([math.prod(piece) * element_bytes < PACK_BELOW_BYTES for piece in pieces])
    leaves_apart, arrives_apart = (_is_apart(pieces, whole) for whole in shapes)
    trained, found = elements.trained_counts, Counter[int]()
    for counts, is_cast in ((trained, casts_trained), (elements.counts - trained, False)):  # which move separately
        lacking = count_lacking(elements, home, replica, counts)
        sent = lacking.sum(axis=0) / len(home.ranks)
        # A small piece is packed for each of its receivers, a large one is staged once for all of them.
        outgoing = np.where(is_small, sent, np.minimum(sent, _count_held(elements, home, counts)))
        for ranks, staged in (
            (replica.ranks, lacking @ (is_small | arrives_apart)),
            (home.ranks, outgoing @ (is_small | is_cast | leaves_apart)),
        ):
            sizes = np.minimum(MAX_STAGING_BYTES, staged * element_bytes)
            found.update(dict(zip(ranks, map(int, sizes), strict=True)))
    return found


def _is_apart(pieces: Iterable[tuple[int, ...]], shapes: Iterable[tuple[int, ...]]) -> NDArray[np.bool_]:
    """Return whether pieces are a part of tensors along any dim but the first, and so are not contiguous there."""
    return np.array([piece[1:] != shape[1:] for piece, shape in zip(pieces, shapes, strict=True)])


def _count_held(elements: RoleElements, layout: Layout, counts: IntArray) -> IntArray:
    """Return the elements of each family on each rank of a layout: (ranks, families), without padding."""
    mesh = _Mesh.from_layout(elements, layout)
    sizes = [shards.sizes[shards.number[mesh.position]] for shards in elements.shards(inside(layout.dims))]
    held: IntArray = count_between(counts, mesh.begin, mesh.end) * np.stack(sizes, axis=1)
    return held


def count_lacking(elements: RoleElements, source: Layout, target: Layout, counts: IntArray) -> IntArray:
    """Return the elements of each family that a rank of ``target`` does not hold under ``source``: (ranks, families).

    Args:
        counts: Number of parameters for each place and family, such as `RoleElements.trained_counts`.
    """
    before, after = _Mesh.from_layout(elements, source), _Mesh.from_layout(elements, target)
    lacking = _count_held(elements, target, counts)
    _, reader, holder = np.intersect1d(after.ranks, before.ranks, return_indices=True)
    overlaps = [
        _overlap(wanted, wanted.number[after.position[reader]], held, held.number[before.position[holder]])
        for wanted, held in _shards(elements, target, source)
    ]
    lacking[reader] -= _count_common(counts, after, reader, before, holder) * np.stack(overlaps, axis=1)
    return lacking


class _Mesh(NamedTuple):
    """Positions and places of a layout's ranks, as arrays."""

    ranks: IntArray
    position: IntArray
    """Position of each rank within its stage and replica."""
    place: IntArray
    """Number of each rank's stage and position; ranks of the same place hold the same."""
    begin: IntArray
    """First place of each family in each run of blocks of each rank's stage: (runs, ranks, families)."""
    end: IntArray
    """One past the last such place."""

    @classmethod
    def from_layout(cls, elements: RoleElements, layout: Layout) -> _Mesh:
        """Return the arrays of a layout."""
        ranks = np.array(layout.ranks)
        stage, position = (axis_positions(layout, axes) for axes in (layout.stage_axes, layout.weight_axes))
        begin, end = elements.places(layout.dims.pp, layout.dims.vpp)[:, :, stage]
        return cls(ranks, position, stage * (position.max() + 1) + position, begin, end)

    def on_nodes(self, nodes: IntArray, devices_per_node: int) -> tuple[_Mesh, IntArray]:
        """Return the mesh of the ranks on some nodes, which ascend, and the index of each rank's node in ``nodes``."""
        (chosen,) = np.nonzero(np.isin(self.ranks // devices_per_node, nodes))
        ranks = self.ranks[chosen]
        mesh = _Mesh(ranks, self.position[chosen], self.place[chosen], self.begin[:, chosen], self.end[:, chosen])
        return mesh, np.searchsorted(nodes, ranks // devices_per_node)

    def is_first(self, shard: IntArray, nodes: IntArray, family: int) -> NDArray[np.bool_]:
        """Return, for each rank, whether it is the first on its node with its places and its shard of a family."""
        keys = (nodes * (self.end.max() + 1) + self.begin[0, :, family]) * (shard.max() + 1) + shard
        _, first = np.unique(keys, return_index=True)
        result = np.zeros(len(self.ranks), dtype=np.bool_)
        result[first] = True
        return result


def _distinct_nodes(before: _Mesh, after: _Mesh, devices_per_node: int) -> tuple[IntArray, IntArray]:
    """Return the first node of each class of nodes whose devices hold the same under both layouts, and its size.

    Nodes come in ascending order; those without a rank are left out.
    """
    most = int(max(before.ranks.max(), after.ranks.max())) // devices_per_node + 1
    held = np.full((most, 2, devices_per_node), -1)
    for side, mesh in enumerate((before, after)):
        held[mesh.ranks // devices_per_node, side, mesh.ranks % devices_per_node] = mesh.place
    (busy,) = np.nonzero(held.max(axis=(1, 2)) >= 0)
    _, first, times = np.unique(held[busy].reshape(len(busy), -1), axis=0, return_index=True, return_counts=True)
    order = np.argsort(first)
    return busy[first[order]], times[order]


def _shards(elements: RoleElements, one: Layout, other: Layout) -> Iterator[tuple[Shards, Shards]]:
    return zip(elements.shards(inside(one.dims)), elements.shards(inside(other.dims)), strict=True)


def _count_common(counts: IntArray, one: _Mesh, ranks: IntArray, other: _Mesh, others: IntArray) -> IntArray:
    """Return the number of parameters of each family that the stages of each pair of ranks share."""
    mine, theirs = (one.begin[:, ranks], one.end[:, ranks]), (other.begin[:, others], other.end[:, others])
    return count_common(counts, mine, theirs)


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
