"""Measure the bandwidth and latency of the links inside nodes and of every pair of nodes, in bounded time.

All ranks of a node send at the same time, so that ranks which share an adapter share its bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.runtime.measure.link_table import Link, LinkTable, num_rounds, partner_of
from lightning_realloc.runtime.measure.link_watch import describe_fall
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.transfer.point_to_point import default_backend

PAIRS_S = 3.0
"""Seconds for the pairs of nodes together. Raising it gives slow links larger messages, and so exacter figures."""
_DIRECTION_S = 0.5
"""Most seconds for one direction of a pair."""
_FIRST_BYTES = 16 << 10
"""Bytes of the first message: 1 ms at 100 Mb/s. Longer ones follow while they fit into the time."""
_GROWTH = 8
"""Bytes of a message over those of the one before."""
_MESSAGE_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
"""Bytes of the longest message, by kind of device: 1 ms at 8 and at 64 GB/s."""
_PINGS = 5
"""Round trips that show the latency of a pair."""
_REPEATS = 3
"""Measured exchanges inside a node, after one that opens the connections."""
_TAG = 7105
"""Tag of these messages, so that no other message on the default group matches them."""


class RunLinks:
    """The links between the nodes of a run, measured at its start and later on demand. Collective over all ranks.

    Args:
        cluster: Several nodes of the run's ranks, with nominal links.
        device: This rank's device.
        hosts: Name of the host of each node.
    """

    def __init__(self, cluster: ClusterSpec, device: torch.device, hosts: Sequence[str]) -> None:
        self._device = device
        self.start: LinkTable
        """Links at the start."""
        self.cluster: ClusterSpec
        """The cluster with its links as measured last."""
        self.cluster, self.start = measure_links(cluster, device, hosts)

    def measure_again(self) -> str | None:
        """Measure all links; return a line about those that are slower than at the start, None without any."""
        self.cluster, found = measure_links(self.cluster, self._device, self.start.hosts)
        return describe_fall(self.start, found)


def measure_links(cluster: ClusterSpec, device: torch.device, hosts: Sequence[str]) -> tuple[ClusterSpec, LinkTable]:
    """Return the cluster with its links as measured, and the table of its nodes. Collective over all ranks.

    Args:
        cluster: Several nodes of the run's ranks, with nominal links.
        device: This rank's device.
        hosts: Name of the host of each node.
    """
    rank, per_node = dist.get_rank(), cluster.devices_per_node
    table = measure_pairs(device, hosts, per_node)
    usual = table.usual
    cluster = replace(
        cluster,
        inter_node_bytes_per_s=usual.bytes_per_s,
        inter_node_latency_s=usual.latency_s,
        node_links=table.node_links(),
    )
    if per_node > 1:
        first = rank - rank % per_node
        following, preceding = (first + (rank - first + step) % per_node for step in (1, -1))
        link = _measure_ring(_wire(device), following, preceding)
        cluster = replace(cluster, intra_node_bytes_per_s=link.bytes_per_s, intra_node_latency_s=link.latency_s)
    return cluster, table


def measure_pairs(device: torch.device, hosts: Sequence[str], per_node: int) -> LinkTable:
    """Return the links between nodes, measured pair by pair in both directions. Collective over all ranks.

    It takes about `PAIRS_S`, for any number of nodes: more rounds get shorter messages, and many nodes meet a sample of
    the others. Each rank sends messages in at most O(log nodes) rounds, and one reduction shares all figures.

    Args:
        hosts: Name of the host of each node.
        per_node: Ranks of each node, which are consecutive.
    """
    num_nodes, (node, place) = len(hosts), divmod(dist.get_rank(), per_node)
    count, wire = num_rounds(num_nodes), _wire(device)
    found = torch.zeros(2, count, num_nodes, dtype=torch.float64)  # seconds of a byte, and latency, by sending node
    dist.barrier()
    for number in range(count):
        partner = partner_of(node, number, num_nodes)
        if partner is not None:
            ends = _Ends(partner * per_node + place, wire, min(_DIRECTION_S, PAIRS_S / (2 * count)))
            found[:, number, node] = torch.tensor(ends.measure(is_first=node < partner), dtype=torch.float64)
    found = found.to(wire)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)  # the slowest rank of a node counts
    byte_s, latency_s = found.tolist()
    links = {
        (sender, receiver): Link(1.0 / max(byte_s[number][sender], 1e-15), latency_s[number][sender])
        for number in range(count)
        for sender in range(num_nodes)
        if (receiver := partner_of(sender, number, num_nodes)) is not None
    }
    return LinkTable(tuple(hosts), links)


@dataclass(frozen=True, slots=True)
class _Ends:
    """This rank's end of a link, and the rank at the other one."""

    peer: int
    wire: torch.device
    """Device of the messages."""
    limit_s: float
    """Seconds for each direction."""

    def measure(self, *, is_first: bool) -> tuple[float, float]:
        """Return the seconds of a byte to the peer, and the latency of the link. Collective over both ends.

        Args:
            is_first: Whether this end sends first.
        """
        latency_s = self._ping() if is_first else self._pong()
        if is_first:
            byte_s = self._send_growing(latency_s)
            self._receive_growing()
        else:
            self._receive_growing()
            byte_s = self._send_growing(latency_s)
        return byte_s, latency_s

    def _ping(self) -> float:
        """Return the latency: half of the median round trip."""
        trips = []
        for _ in range(1 + _PINGS):  # the first one opens the connection
            began_at = time.perf_counter()
            self._send(self._number(0))
            self._receive(self._number(0))
            trips.append(time.perf_counter() - began_at)
        latency_s = median(trips[1:]) / 2
        self._send(self._number(round(latency_s * 1e9)))
        return latency_s

    def _pong(self) -> float:
        for _ in range(1 + _PINGS):
            self._receive(self._number(0))
            self._send(self._number(0))
        return int(self._receive(self._number(0)).item()) / 1e9

    def _send_growing(self, latency_s: float) -> float:
        """Send ever longer messages while their time suffices, and return the seconds of a byte of the longest."""
        began_at, size, longest = time.perf_counter(), _FIRST_BYTES, _MESSAGE_BYTES.get(self.wire.type, 8 << 20)
        rates: list[tuple[int, float]] = []
        while True:
            seconds = max(self._time_message(size) - 2 * latency_s, 1e-9)
            rates.append((size, seconds / size))
            repeats = len(rates) > 1 and rates[-2][0] == size == longest
            size = min(longest, _GROWTH * size)
            if repeats or time.perf_counter() - began_at + size * rates[-1][1] > self.limit_s:
                break
        self._send(self._number(0))
        return min(rate for sent, rate in rates if sent == rates[-1][0])

    def _time_message(self, size: int) -> float:
        """Return the seconds from the start of a message to the peer's answer."""
        self._send(self._number(size))
        message = torch.zeros(size, dtype=torch.uint8, device=self.wire)
        self._synchronize()
        began_at = time.perf_counter()
        self._send(message)
        self._receive(self._number(0))
        return time.perf_counter() - began_at

    def _receive_growing(self) -> None:
        """Receive messages, and answer each, until the peer announces one of no bytes."""
        while size := int(self._receive(self._number(0)).item()):
            self._receive(torch.empty(size, dtype=torch.uint8, device=self.wire))
            self._send(self._number(0))

    def _number(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self.wire)

    def _send(self, tensor: Tensor) -> None:
        self._run(dist.P2POp(dist.isend, tensor, self.peer, tag=_TAG))

    def _receive(self, tensor: Tensor) -> Tensor:
        self._run(dist.P2POp(dist.irecv, tensor, self.peer, tag=_TAG))
        return tensor

    def _run(self, operation: dist.P2POp) -> None:
        for work in dist.batch_isend_irecv([operation]):  # on the group's connections; single ones make new groups
            work.wait()
        self._synchronize()

    def _synchronize(self) -> None:
        if self.wire.type == "cuda":
            torch.cuda.synchronize(self.wire)


def _wire(device: torch.device) -> torch.device:
    """Return the device of messages: gloo sends from host memory only."""
    return torch.device("cpu") if default_backend(device) == "gloo" else device


def _measure_ring(wire: torch.device, following: int, preceding: int) -> Link:
    """Send to one rank while receiving from another, and return the slowest rank's link."""
    latency_s = _exchange_seconds(wire, 1, following, preceding)
    size = _MESSAGE_BYTES["cpu"]
    seconds = _exchange_seconds(wire, size, following, preceding)
    return Link(size / max(seconds - latency_s, 1e-9), latency_s)


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
