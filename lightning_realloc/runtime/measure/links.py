"""Measured bandwidth and latency of the links inside and between nodes.

Every rank sends to another one at the same time, so that ranks which share an adapter share its bandwidth.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.transfer.point_to_point import default_backend

_MESSAGE_BYTES = 8 << 20
"""Bytes of the messages that show the bandwidth: 1 ms at 8 GB/s, and two thirds of a second at 100 Mb/s."""
_REPEATS = 3
"""Measured exchanges of each size, after one that opens the connections."""


@dataclass(frozen=True, slots=True)
class Link:
    """Speed of a rank's link while all ranks send."""

    bytes_per_s: float
    latency_s: float


def measure_links(cluster: ClusterSpec, device: torch.device) -> ClusterSpec:
    """Return the cluster with its links as measured; a kind of link that it lacks stays. Collective over all ranks.

    Args:
        cluster: Nodes of the run's ranks, with nominal links.
        device: This rank's device.
    """
    rank, per_node, world_size = dist.get_rank(), cluster.devices_per_node, cluster.num_devices
    if cluster.num_nodes > 1:
        link = _measure_ring(device, (rank + per_node) % world_size, (rank - per_node) % world_size)
        cluster = replace(cluster, inter_node_bytes_per_s=link.bytes_per_s, inter_node_latency_s=link.latency_s)
    if per_node > 1:
        first = rank - rank % per_node
        following, preceding = (first + (rank - first + step) % per_node for step in (1, -1))
        link = _measure_ring(device, following, preceding)
        cluster = replace(cluster, intra_node_bytes_per_s=link.bytes_per_s, intra_node_latency_s=link.latency_s)
    return cluster


def _measure_ring(device: torch.device, following: int, preceding: int) -> Link:
    """Send to one rank while receiving from another, and return the slowest rank's link."""
    wire = torch.device("cpu") if default_backend(device) == "gloo" else device
    latency_s = _exchange_seconds(wire, 1, following, preceding)
    seconds = _exchange_seconds(wire, _MESSAGE_BYTES, following, preceding)
    return Link(_MESSAGE_BYTES / max(seconds - latency_s, 1e-9), latency_s)


def _exchange_seconds(device: torch.device, num_bytes: int, following: int, preceding: int) -> float:
    """Return the median seconds of an exchange, of which each lasts as long as on its slowest rank."""
    outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(1 + _REPEATS):
        dist.barrier()
        began_at = time.perf_counter()
        operations = [
            dist.P2POp(dist.irecv, incoming, preceding),
            dist.P2POp(dist.isend, outgoing, following),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(max(gather_objects(time.perf_counter() - began_at)))
    return float(median(seconds[1:]))


def describe_links(cluster: ClusterSpec) -> str:
    """Return the rates of a cluster's links, for a log."""
    kinds = [("between nodes", cluster.inter_node_bytes_per_s, cluster.inter_node_latency_s)]
    if cluster.devices_per_node > 1:
        kinds.append(("inside a node", cluster.intra_node_bytes_per_s, cluster.intra_node_latency_s))
    rates = (f"{rate / 1e9:.3g} GB/s and {latency_s * 1e6:.0f} us {where}" for where, rate, latency_s in kinds)
    return f"{cluster.num_nodes} nodes of {cluster.devices_per_node} devices; each sends at {', '.join(rates)}"
