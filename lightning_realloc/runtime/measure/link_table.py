"""Measured links between pairs of nodes: which pairs meet in which round, and which nodes or pairs are slow. Pure.

Nodes meet as in a round-robin tournament. In each round every node has at most one partner, so that pairs do not share
an adapter. `links` measures; this module decides what the figures mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median, median_high
from typing import Literal

from lightning_realloc.layout.cluster import NodeLink

FAR_RATIO = 2.0
"""A link whose bandwidth is the usual one divided by more than this is slow. Raising it names fewer links."""
EQUAL_RATIO = 1.25
"""Bandwidths within this ratio count as equal, since measurements have noise. Raising it lets plans see fewer
differences, and makes their search faster."""
FAR_LATENCY_S = 1e-3
"""Least latency above the usual one that plans count. Raising it hides more noise."""
ROUNDS_PER_DOUBLING = 4
"""Rounds for each doubling of the number of nodes, at most. Up to 20 nodes, all pairs meet; 64 nodes have 24 rounds."""
MAX_NAMED = 3
"""Most slow hosts, and most slow pairs, that a warning names."""

Direction = Literal["sends", "receives", "sends and receives"]


def num_rounds(num_nodes: int) -> int:
    """Return the rounds of a tournament: every pair meets once, or a sample of the pairs among many nodes."""
    if num_nodes < 2:
        return 0
    return min(_num_all_rounds(num_nodes), ROUNDS_PER_DOUBLING * math.ceil(math.log2(num_nodes)))


def partner_of(node: int, number: int, num_nodes: int) -> int | None:
    """Return the partner of a node in round ``number`` of `num_rounds`; None if it pauses.

    Rounds of a sample are spread evenly over those of the whole tournament.

    Source: the circle method. Of an odd number m of seats, i and j meet in the round i + j (mod m). The seat that would
    meet itself meets the last node of an even number of nodes, and pauses otherwise.
    """
    seats = _num_all_rounds(num_nodes)
    chosen = number * seats // num_rounds(num_nodes)
    if node == seats:  # the last of an even number of nodes meets the seat i with 2 i = chosen
        return chosen * (seats + 1) // 2 % seats
    other = (chosen - node) % seats
    if other != node:
        return other
    return seats if num_nodes % 2 == 0 else None


def _num_all_rounds(num_nodes: int) -> int:
    return num_nodes - 1 + num_nodes % 2


@dataclass(frozen=True, slots=True)
class Link:
    """Speed of a link for each rank of a node, while all ranks of the node use it."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class SlowHost:
    """A node whose every measured link is slow in a direction."""

    node: int
    direction: Direction
    bytes_per_s: float
    """Median bandwidth of its links in the slow direction."""


@dataclass(frozen=True)
class LinkTable:
    """Links between nodes, in both directions."""

    hosts: tuple[str, ...]
    """Name of the host of each node."""
    links: Mapping[tuple[int, int], Link]
    """(sending node, receiving node) -> the link; both directions of every pair that was measured, and no others."""

    @cached_property
    def pairs(self) -> dict[tuple[int, int], Link]:
        """Pair of nodes, the lower one first -> its link in the slower direction."""
        return {
            (a, b): Link(min(one.bytes_per_s, back.bytes_per_s), max(one.latency_s, back.latency_s))
            for (a, b), one in self.links.items()
            if a < b
            for back in [self.links[b, a]]
        }

    @cached_property
    def usual(self) -> Link:
        """The median node's best link, which one slow node of three, or slow pairs between racks, do not change."""
        best: dict[int, list[Link]] = {}
        for pair, link in self.pairs.items():
            for node in pair:
                best.setdefault(node, []).append(link)
        return Link(
            median_high(max(link.bytes_per_s for link in links) for links in best.values()),
            median(min(link.latency_s for link in links) for links in best.values()),
        )

    @property
    def slowest(self) -> tuple[int, int]:
        """Sending and receiving node of the link with the least bandwidth."""
        return min(self.links, key=lambda ends: (self.links[ends].bytes_per_s, ends))

    @cached_property
    def slow_links(self) -> tuple[tuple[int, int], ...]:
        """Sending and receiving nodes of slow links, the slowest first; a link of two nodes has nothing to compare."""
        limit = self.usual.bytes_per_s / FAR_RATIO
        slow = (ends for ends, link in self.links.items() if len(self.hosts) > 2 and link.bytes_per_s < limit)
        return tuple(sorted(slow, key=lambda ends: (self.links[ends].bytes_per_s, ends)))

    @cached_property
    def slow_hosts(self) -> tuple[SlowHost, ...]:
        """Nodes with at least two links in a direction that are all slow, the slowest first."""
        slow, found = set(self.slow_links), []
        by_end: tuple[dict[int, list[tuple[int, int]]], ...] = ({}, {})
        for ends in self.links:
            for end in (0, 1):
                by_end[end].setdefault(ends[end], []).append(ends)
        for node in range(len(self.hosts)):
            both = [sides.get(node, []) for sides in by_end]
            is_slow = [len(ends) > 1 and slow.issuperset(ends) for ends in both]
            if any(is_slow):
                direction: Direction = "sends and receives" if all(is_slow) else "sends" if is_slow[0] else "receives"
                chosen = [ends for ends, counts in zip(both, is_slow, strict=True) if counts]
                rate = min(median(self.links[one].bytes_per_s for one in ends) for ends in chosen)
                found.append(SlowHost(node, direction, rate))
        return tuple(sorted(found, key=lambda host: host.bytes_per_s))

    @property
    def lone_slow_links(self) -> tuple[tuple[int, int], ...]:
        """Slow links that no slow host explains, the slowest first."""
        senders = {host.node for host in self.slow_hosts if host.direction != "receives"}
        receivers = {host.node for host in self.slow_hosts if host.direction != "sends"}
        return tuple(ends for ends in self.slow_links if ends[0] not in senders and ends[1] not in receivers)

    # ---- text
    def describe(self) -> str:
        """Return the slowest link with its figure, and how many pairs were measured."""
        count, total = len(self.pairs), len(self.hosts) * (len(self.hosts) - 1) // 2
        counted = f"all {total} pairs" if count == total else f"{count} of {total} pairs"
        return f"slowest link of {counted}: {self.text_of(self.slowest)}"

    def text_of(self, ends: tuple[int, int]) -> str:
        """Return the hosts of a link, and its figures."""
        link, (sender, receiver) = self.links[ends], ends
        figures = f"{link.bytes_per_s / 1e9:.3g} GB/s and {link.latency_s * 1e6:.0f} us"
        return f"{self.hosts[sender]} -> {self.hosts[receiver]} at {figures}"

    def warnings(self) -> Iterator[str]:
        """Yield a line about slow hosts, and one about other slow links; none without any."""
        usual = f"{self.usual.bytes_per_s / 1e9:.3g} GB/s"
        if hosts := self.slow_hosts:
            named = [f"{self.hosts[h.node]} {h.direction} at {h.bytes_per_s / 1e9:.3g} GB/s" for h in hosts]
            yield (
                f"slow host: {few_of(named)} on all of its links, and hosts usually at {usual}; check its cable, its "
                f"adapter's speed (ethtool) and other jobs on it, or leave it out; plans count with its real speed"
            )
        if links := self.lone_slow_links:
            named = [self.text_of(ends) for ends in links]
            yield (
                f"slow link: {few_of(named)}, and hosts usually send at {usual}; check the switch and the cables "
                f"between these hosts; plans count with the real speed of each pair"
            )

    # ---- plans
    def node_links(self) -> tuple[NodeLink, ...]:
        """Return the pairs that are slower than the usual link, for `ClusterSpec`.

        Nearly equal figures become their median, so that a search sees few kinds of nodes. A pair that did not meet has
        the slower of its nodes' usual figures.
        """
        bandwidths, latencies = self._known_pairs()
        usual = self.usual
        rates = _merged({pair: rate for pair, rate in bandwidths.items() if rate * EQUAL_RATIO < usual.bytes_per_s})
        late = _merged({pair: value for pair, value in latencies.items() if value > usual.latency_s + FAR_LATENCY_S})
        return tuple(
            NodeLink(*pair, rates.get(pair, usual.bytes_per_s), late.get(pair, usual.latency_s))
            for pair in sorted(rates.keys() | late.keys())
        )

    def _known_pairs(self) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
        """Return the bandwidth and the latency of every pair, from its nodes' medians if it did not meet."""
        bandwidths = {pair: link.bytes_per_s for pair, link in self.pairs.items()}
        latencies = {pair: link.latency_s for pair, link in self.pairs.items()}
        nodes = range(len(self.hosts))
        if len(bandwidths) < len(nodes) * (len(nodes) - 1) // 2:
            of_node: dict[int, list[Link]] = {node: [] for node in nodes}
            for pair, link in self.pairs.items():
                for node in pair:
                    of_node[node].append(link)
            rates = [median(link.bytes_per_s for link in of_node[node]) for node in nodes]
            times = [median(link.latency_s for link in of_node[node]) for node in nodes]
            for pair in ((a, b) for a in nodes for b in range(a + 1, len(nodes))):
                bandwidths.setdefault(pair, min(rates[pair[0]], rates[pair[1]]))
                latencies.setdefault(pair, max(times[pair[0]], times[pair[1]]))
        return bandwidths, latencies


def _merged(values: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return the values with those within `EQUAL_RATIO` of the smallest of their class replaced by its median."""
    found: dict[tuple[int, int], float] = {}
    members: list[tuple[int, int]] = []
    for pair in sorted(values, key=lambda pair: (values[pair], pair)):
        if members and values[pair] > EQUAL_RATIO * values[members[0]]:
            found |= dict.fromkeys(members, median(values[one] for one in members))
            members = []
        members.append(pair)
    return found | dict.fromkeys(members, median(values[one] for one in members)) if members else found


def few_of(texts: Sequence[str]) -> str:
    """Return the first `MAX_NAMED` texts, and the number of the others."""
    rest = len(texts) - MAX_NAMED
    return "; ".join(texts[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
