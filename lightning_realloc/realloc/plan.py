"""What moves from which rank to which, and how many bytes is that?

A plan is a value: it can be printed, compared, priced and hashed. ``planner`` makes it, ``schedule`` puts it into
rounds, ``lightning_realloc.runtime`` carries it out and decides nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from lightning_realloc.layout import ModelLayout

Item = TypeVar("Item")

SUMMARY_RANKS = 32
"""How many ranks a summary lists one by one."""


class Route(NamedTuple):
    """A transfer without the parameter's name: the same for every parameter of a family's variant."""

    shape: tuple[int, ...]
    sender: int
    receiver: int
    sender_offset: tuple[int, ...]
    receiver_offset: tuple[int, ...]
    hop: int

    @property
    def numel(self) -> int:
        """Elements that move."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of one parameter that goes from one rank's local tensor into another's."""

    param: str
    shape: tuple[int, ...]
    sender: int
    receiver: int
    """The sender itself when the box stays on its rank: a local copy, or nothing at all where storage is shared."""
    sender_offset: tuple[int, ...]
    """Where the box begins in the sender's source tensor (hop 0) or target tensor (hop 1)."""
    receiver_offset: tuple[int, ...]
    """Where the box begins in the receiver's target tensor."""
    hop: int
    """0: from a source tensor. 1: spread inside a node, from the target tensor that hop 0 filled."""

    @property
    def numel(self) -> int:
        """Elements that move."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RoutedFamily:
    """The routes of every parameter of a family; parameter k takes variant ``k % len(variants)``."""

    names: tuple[str, ...]
    kept: tuple[Route, ...]
    """What stays on its rank: the same for all variants."""
    variants: tuple[tuple[Route, ...], ...]
    """What moves. Variants differ in the senders only, so that all replicas take their turn."""

    def weight(self, variant: int) -> int:
        """How many parameters take a variant."""
        return len(range(variant, len(self.names), len(self.variants)))

    def moves(self) -> Iterator[tuple[Route, int]]:
        """Every route that moves, with the number of parameters that take it."""
        for index, routes in enumerate(self.variants):
            weight = self.weight(index)
            for route in routes:
                yield route, weight


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """Bytes that one rank sends, receives and keeps in a run of a plan."""

    sent_bytes: int
    received_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class ReallocationPlan:
    """How the parameters go from one layout to another: everybody's transfers, or one rank's share of them.

    Totals and digest are those of the whole plan, for a share too.
    """

    source: ModelLayout
    target: ModelLayout
    element_bytes: int
    """Bytes of one element as it travels."""
    rank: int | None
    """None: everybody's transfers. Otherwise only those that the rank sends or receives."""
    transfers: tuple[Transfer, ...] = field(repr=False)
    digest: str
    """SHA-256 of all inputs and of the planner's version: equal on ranks that will agree on every message."""
    bytes_minimum: int
    """What the target's ranks need and do not hold: no plan can move less."""
    inter_node_bytes_minimum: int
    """What the target's nodes need and do not hold: no plan can move less between nodes."""
    nodes: tuple[tuple[int, int], ...] = field(repr=False)
    """(rank, node) of every rank that takes part."""
    families: tuple[RoutedFamily, ...] = field(repr=False, compare=False)

    def share(self, rank: int) -> ReallocationPlan:
        """The same plan with the transfers of one rank only."""
        return ReallocationPlan(
            self.source, self.target, self.element_bytes, rank, list_transfers(self.families, rank), self.digest,
            self.bytes_minimum, self.inter_node_bytes_minimum, self.nodes, self.families,
        )  # fmt: skip

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of the source or the target, ascending."""
        return tuple(rank for rank, _ in self.nodes)

    @property
    def bytes_moved(self) -> int:
        """Bytes that go from one rank to another, over all ranks."""
        return self.element_bytes * sum(
            route.numel * weight for family in self.families for route, weight in family.moves()
        )

    @property
    def inter_node_bytes(self) -> int:
        """Bytes that go from one node to another, over all ranks."""
        return sum(amount for (sender, receiver), amount in self.bytes_by_node_pair().items() if sender != receiver)

    def bytes_by_rank(self) -> dict[int, RankTraffic]:
        """What every rank sends, receives and keeps."""
        sent, received, kept = ({rank: 0 for rank in self.ranks} for _ in range(3))
        for family in self.families:
            for route, weight in family.moves():
                sent[route.sender] += route.numel * weight
                received[route.receiver] += route.numel * weight
            for route in family.kept:
                kept[route.receiver] += route.numel * len(family.names)
        size = self.element_bytes
        return {rank: RankTraffic(sent[rank] * size, received[rank] * size, kept[rank] * size) for rank in self.ranks}

    def bytes_by_node_pair(self) -> dict[tuple[int, int], int]:
        """Bytes moved from (node) to (node), also inside a node; pairs without traffic are left out."""
        node_of = dict(self.nodes)
        amounts: dict[tuple[int, int], int] = {}
        for family in self.families:
            for route, weight in family.moves():
                pair = node_of[route.sender], node_of[route.receiver]
                amounts[pair] = amounts.get(pair, 0) + route.numel * weight * self.element_bytes
        return dict(sorted(amounts.items()))

    def summary(self) -> str:
        """A table for people: bytes per rank, per link, and moved against the minimum."""
        traffic = self.bytes_by_rank()
        pairs = self.bytes_by_node_pair()
        inter = sum(amount for (sender, receiver), amount in pairs.items() if sender != receiver)
        moved = sum(pairs.values())
        lines = [
            f"{self.source.layout} -> {self.target.layout}, {len(self.source.model.params)} parameters, "
            f"{self.source.model.num_elements:,} elements of {self.element_bytes} bytes",
            f"moved {format_bytes(moved)}, minimum {format_bytes(self.bytes_minimum)}; "
            f"inside nodes {format_bytes(moved - inter)}, between nodes {format_bytes(inter)} "
            f"(minimum {format_bytes(self.inter_node_bytes_minimum)})",
            f"{'rank':>6}{'node':>6}{'sent':>12}{'received':>12}{'kept':>12}",
        ]
        node_of = dict(self.nodes)
        for rank, row in itertools.islice(traffic.items(), SUMMARY_RANKS):
            amounts = (row.sent_bytes, row.received_bytes, row.kept_bytes)
            lines.append(f"{rank:>6}{node_of[rank]:>6}" + "".join(f"{format_bytes(amount):>12}" for amount in amounts))
        if len(traffic) > SUMMARY_RANKS:
            lines.append(
                f"… and {len(traffic) - SUMMARY_RANKS} more; the most that one of all ranks sends is "
                f"{format_bytes(max(row.sent_bytes for row in traffic.values()))}, receives "
                f"{format_bytes(max(row.received_bytes for row in traffic.values()))}"
            )
        return "\n".join([*lines, f"digest {self.digest[:16]}"])


def list_transfers(families: tuple[RoutedFamily, ...], rank: int | None) -> tuple[Transfer, ...]:
    """The transfers of every parameter, or those that concern ``rank``, in the order that all ranks share."""
    routed = []
    for family in families:
        variants = [_concerning(family.kept + routes, rank) for routes in family.variants]
        routed.append([(name, variants[index % len(variants)]) for index, name in enumerate(family.names)])
    return tuple(Transfer(name, *route) for name, routes in interleave(routed) for route in routes)


def interleave(sequences: Sequence[Sequence[Item]]) -> list[Item]:
    """All items, every sequence advancing at the same pace from its first to its last.

    Families in turn would keep a single pipeline stage busy at a time.
    """
    paced = sorted(
        ((2 * index + 1) / len(sequence), number, index)
        for number, sequence in enumerate(sequences)
        for index in range(len(sequence))
    )
    return [sequences[number][index] for _, number, index in paced]


def _concerning(routes: tuple[Route, ...], rank: int | None) -> tuple[Route, ...]:
    if rank is None:
        return routes
    return tuple(route for route in routes if rank in (route.sender, route.receiver))


def format_bytes(amount: int) -> str:
    """Bytes with a decimal unit, as in "1.25 GB"."""
    value, unit = float(amount), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{amount} B" if unit == "B" else f"{value:.2f} {unit}"
