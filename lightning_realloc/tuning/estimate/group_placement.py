"""Spread of a layout's communication groups over the nodes of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.estimate.hardware import Group


class Placement(NamedTuple):
    """Spread of a layout's communication groups over nodes; the widest group of each axis counts."""

    tp: Group
    fsdp: Group
    dp: Group
    cp: Group
    ep: Group
    expert_fsdp: Group
    expert_dp: Group
    stages_share_node: bool
    """Whether all pipeline stages lie on the same node."""

    @classmethod
    def from_layout(cls, layout: Layout, cluster: ClusterSpec) -> Placement:
        """Return the placement of a layout on a cluster."""
        nodes = np.array(layout.ranks) // cluster.devices_per_node
        kinds = layout.tensor_axes, layout.shard_axes, layout.replica_axes, layout.token_axes
        expert_kinds = layout.expert_axes, layout.expert_shard_axes, layout.expert_replica_axes
        tensors, shards, replicas, tokens = (_widest(nodes, layout, axes) for axes in kinds)
        experts, expert_shards, expert_replicas = (_widest(nodes, layout, axes) for axes in expert_kinds)
        within_node = _widest(nodes, layout, layout.stage_axes).nodes == 1
        return cls(tensors, shards, replicas, tokens, experts, expert_shards, expert_replicas, within_node)

    def within_node(self) -> Placement:
        """Return the placement of the same groups on a single node."""
        tp, fsdp, dp, cp, ep, expert_fsdp, expert_dp = (Group(group.size, nodes=1) for group in self[:-1])
        return Placement(tp, fsdp, dp, cp, ep, expert_fsdp, expert_dp, stages_share_node=True)


def _widest(nodes: np.ndarray, layout: Layout, axes: Sequence[str]) -> Group:
    index = first = np.arange(len(nodes))
    for degree, stride in layout.spans(axes):
        first = first - index // stride % degree * stride  # equal for the ranks of a group
    groups = np.sort(nodes[np.argsort(first, kind="stable")].reshape(-1, layout.count(*axes)), axis=1)
    return Group(groups.shape[1], int(1 + (np.diff(groups, axis=1) != 0).sum(axis=1).max()))
