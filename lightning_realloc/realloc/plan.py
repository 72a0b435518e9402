"""Reallocation plans: the transfers between ranks, and the bytes that they move.

A plan is a value: it can be printed, compared, priced and hashed. ``planner`` makes plans, ``schedule`` puts them
into rounds, and ``lightning_realloc.runtime.transfer`` executes them without further decisions.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from lightning_realloc.layout import ModelLayout
from lightning_realloc.tables import html_table

Item = TypeVar("Item")

SUMMARY_RANKS = 32
"""Largest number of ranks that a summary lists individually."""


class Route(NamedTuple):
    """A transfer without its parameter's name, shared by all parameters of a family's variant.

    The fields are those of `Transfer`.
    """

    shape: tuple[int, ...]
    sender: int
    receiver: int
    sender_offset: tuple[int, ...]
    receiver_offset: tuple[int, ...]
    hop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of one box of a parameter from a rank's local tensor into another rank's."""

    param: str
    shape: tuple[int, ...]
    sender: int
    receiver: int
    """Receiving rank. It equals the sender for a local copy, which shared storage makes unnecessary."""
    sender_offset: tuple[int, ...]
    """First index of the box in the sender's source tensor (hop 0) or target tensor (hop 1)."""
    receiver_offset: tuple[int, ...]
    """First index of the box in the receiver's target tensor."""
    hop: int
    """0: sent from a source tensor. 1: sent on inside a node, from the target tensor that hop 0 filled."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RoutedFamily:
    """Routes of every parameter of a family. Parameter k uses variant ``k % len(variants)``."""

    names: tuple[str, ...]
    kept: tuple[Route, ...]
    """Local copies, the same for all variants."""
    variants: tuple[tuple[Route, ...], ...]
    """Routes between ranks. Variants differ in the senders only, so that all replicas take turns."""

    def weight(self, variant: int) -> int:
        """Return the number of parameters that use a variant."""
        return len(range(variant, len(self.names), len(self.variants)))

    def moves(self) -> Iterator[tuple[Route, int]]:
        """Yield every route between ranks with the number of parameters that use it."""
        for index, routes in enumerate(self.variants):
            weight = self.weight(index)
            for route in routes:
                yield route, weight


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """Bytes that one rank sends, receives and keeps when a plan runs."""

    sent_bytes: int
    received_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class ReallocationPlan:
    """Transfers that bring the parameters from one layout to another, of all ranks or of one rank.

    Totals and digest always describe the whole plan, even if only one rank's transfers are listed.

    >>> from lightning_realloc import Layout, ModelLayout, ModelSpec, plan_reallocation
    >>> from lightning_realloc.layout import ParamSpec
    >>> model = ModelSpec((ParamSpec("weight", (8, 4), block=0),), num_blocks=1)
    >>> source, target = (ModelLayout(model, Layout.parse(text)) for text in ("fsdp2", "dp2"))
    >>> plan_reallocation(source, target).bytes_by_rank()[0]
    RankTraffic(sent_bytes=32, received_bytes=32, kept_bytes=32)
    """

    source: ModelLayout
    target: ModelLayout
    element_bytes: int
    """Bytes of one element in transit."""
    rank: int | None
    """Rank whose transfers are listed: those that it sends or receives. None lists those of all ranks."""
    transfers: tuple[Transfer, ...] = field(repr=False)
    digest: str
    """SHA-256 of all inputs and of the planner's version. Ranks with equal digests agree on every message."""
    bytes_minimum: int
    """Bytes that the target's ranks need and do not hold. No plan can move less."""
    inter_node_bytes_minimum: int
    """Bytes that the target's nodes need and do not hold. No plan can move less between nodes."""
    nodes: tuple[tuple[int, int], ...] = field(repr=False)
    """(rank, node) of every rank of the source or the target, in ascending order."""
    families: tuple[RoutedFamily, ...] = field(repr=False, compare=False)

    def share(self, rank: int) -> ReallocationPlan:
        """Return the same plan with the transfers of one rank only."""
        return replace(self, rank=rank, transfers=list_transfers(self.families, rank))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of the source or the target, in ascending order."""
        return tuple(rank for rank, _ in self.nodes)

    @property
    def bytes_moved(self) -> int:
        """Bytes sent from one rank to another, over all ranks."""
        return self.element_bytes * sum(
            route.numel * weight for family in self.families for route, weight in family.moves()
        )

    def ranks_by_node(self) -> dict[int, tuple[int, ...]]:
        """Return node -> its ranks of the source or the target, in ascending order."""
        found = defaultdict[int, tuple[int, ...]](tuple)
        for rank, node in self.nodes:
            found[node] += (rank,)
        return dict(found)

    @property
    def inter_node_bytes(self) -> int:
        """Bytes sent from one node to another, over all ranks."""
        return sum(amount for (sender, receiver), amount in self.bytes_by_node_pair().items() if sender != receiver)

    def bytes_by_rank(self) -> dict[int, RankTraffic]:
        """Return the bytes that every rank sends, receives and keeps."""
        sent, received, kept = (Counter[int]() for _ in range(3))
        for family in self.families:
            for route, weight in family.moves():
                sent[route.sender] += route.numel * weight
                received[route.receiver] += route.numel * weight
            for route in family.kept:
                kept[route.receiver] += route.numel * len(family.names)
        size = self.element_bytes
        return {rank: RankTraffic(sent[rank] * size, received[rank] * size, kept[rank] * size) for rank in self.ranks}

    def bytes_by_node_pair(self) -> dict[tuple[int, int], int]:
        """Return (sending node, receiving node) -> bytes, also inside a node; pairs without traffic are left out."""
        node_of = dict(self.nodes)
        amounts = Counter[tuple[int, int]]()
        for family in self.families:
            for route, weight in family.moves():
                pair = node_of[route.sender], node_of[route.receiver]
                amounts[pair] += route.numel * weight * self.element_bytes
        return dict(sorted(amounts.items()))

    def summary(self) -> str:
        """Return a readable table: bytes by rank, inside and between nodes, and the minimum."""
        traffic, moved, inter = self.bytes_by_rank(), self.bytes_moved, self.inter_node_bytes
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

    def _repr_html_(self) -> str:
        """Return the bytes of every rank as a table, which notebooks show."""
        node_of = dict(self.nodes)
        rows = [
            [rank, node_of[rank], *map(format_bytes, (row.sent_bytes, row.received_bytes, row.kept_bytes))]
            for rank, row in itertools.islice(self.bytes_by_rank().items(), SUMMARY_RANKS)
        ]
        more = len(self.nodes) - len(rows)
        caption = (
            f"{self.source.layout} → {self.target.layout}: {format_bytes(self.bytes_moved)} move, at least "
            f"{format_bytes(self.bytes_minimum)} must" + (f"; {more} more ranks" if more else "")
        )
        return html_table(("rank", "node", "sends", "receives", "keeps"), rows, caption=caption)


def list_transfers(families: tuple[RoutedFamily, ...], rank: int | None) -> tuple[Transfer, ...]:
    """Return the transfers of all ranks, or those of ``rank``, in the order that all ranks share."""
    routed = []
    for family in families:
        variants = [_concerning(family.kept + routes, rank) for routes in family.variants]
        routed.append([(name, variants[index % len(variants)]) for index, name in enumerate(family.names)])
    return tuple(Transfer(name, *route) for name, routes in interleave(routed) for route in routes)


def interleave(sequences: Sequence[Sequence[Item]]) -> list[Item]:
    """Merge the sequences so that each advances at the same pace from its first to its last item.

    One family after the other would keep a single pipeline stage busy at a time.
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
    """Return a number of bytes with a decimal unit, as in "1.25 GB"."""
    value, unit = float(amount), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{amount} B" if unit == "B" else f"{value:.2f} {unit}"
