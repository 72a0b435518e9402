"""Spread of a layout's communication groups over the nodes of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.estimate.hardware import Group, LinkRates


class Placement(NamedTuple):
    """Spread of a layout's communication groups over nodes.

    The widest group of each axis counts, with the slowest link of all groups of that axis.
    """

    tp: Group
    fsdp: Group
    dp: Group
    cp: Group
    ep: Group
    expert_fsdp: Group
    expert_dp: Group
    stages: Group

    @classmethod
    def from_layout(cls, layout: Layout, cluster: ClusterSpec) -> Placement:
        """Return the placement of a layout on a cluster."""
        nodes = np.array(layout.ranks) // cluster.devices_per_node
        dense = layout.tensor_axes, layout.shard_axes, layout.replica_axes, layout.token_axes
        experts = layout.expert_axes, layout.expert_shard_axes, layout.expert_replica_axes
        return cls(*(_widest(nodes, layout, axes, cluster) for axes in (*dense, *experts, layout.stage_axes)))

    def within_node(self) -> Placement:
        """Return the placement of the same groups on a single node."""
        return Placement(*(Group(group.size, nodes=1) for group in self))


def slowest_link(groups: np.ndarray, cluster: ClusterSpec) -> LinkRates | None:
    """Return the slowest link between nodes of the same group; None: the cluster's usual one.

    Args:
        groups: Nodes of each group: (groups, ranks).
    """
    if not cluster.node_links or groups.shape[1] < 2:
        return None
    members = {frozenset(row) for row in np.unique(groups, axis=0).tolist()}
    links = {link for nodes in members if len(nodes) > 1 for link in cluster.slow_links(nodes)}
    if not links:
        return None
    return LinkRates(min(link.bytes_per_s for link in links), max(link.latency_s for link in links))


def _widest(nodes: np.ndarray, layout: Layout, axes: Sequence[str], cluster: ClusterSpec) -> Group:
    if layout.count(*axes) == 1:
        return Group(1, nodes=1)
    index = first = np.arange(len(nodes))
    for degree, stride in layout.spans(axes):
        first = first - index // stride % degree * stride  # equal for the ranks of a group
    groups = np.sort(nodes[np.argsort(first, kind="stable")].reshape(-1, layout.count(*axes)), axis=1)
    spread = int(1 + (np.diff(groups, axis=1) != 0).sum(axis=1).max())
    return Group(groups.shape[1], spread, slowest_link(groups, cluster))
