"""A tree of hosts through which each rank gives a part of something, and every rank receives the merged whole.

The first rank of a host passes on what its host's other ranks give and receive, and is connected with the first ranks
of a few other hosts. So each rank sends and receives a few messages, however many ranks there are. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FAN_OUT = 4
"""Hosts below one host of the tree."""

WholeName = tuple[int, ...]
"""Numbers that identify a whole, the same on all ranks."""


class Mergeable(Protocol):
    """A part of a whole."""

    @classmethod
    def merge(cls, parts: Sequence[Any]) -> Any:
        """Return the whole of some parts, or a larger part."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A rank's place in the tree."""

    rank: int
    parent: int | None
    """Rank that receives this one's parts, and from which wholes come; None for the root."""
    children: Mapping[int, tuple[int, ...]]
    """Child -> the ranks at and below it, in the order of ranks if hosts have consecutive ones."""

    @classmethod
    def find(cls, rank: int, hosts: Sequence[Sequence[int]], *, fan_out: int = FAN_OUT) -> TreeNode:
        """Return the place of a rank.

        Args:
            rank: The rank.
            hosts: Ranks of each host.
            fan_out: Largest number of hosts below one.
        """
        own = next(index for index, host in enumerate(hosts) if rank in host)
        if rank != hosts[own][0]:
            return cls(rank, hosts[own][0], {})
        begin, end, parent = 0, len(hosts), None
        while begin != own:
            parent = hosts[begin][0]
            begin, end = next(part for part in _divided(begin + 1, end, fan_out) if part[0] <= own < part[1])
        children: dict[int, tuple[int, ...]] = {member: (member,) for member in hosts[own][1:]}
        for first, last in _divided(begin + 1, end, fan_out):
            children[hosts[first][0]] = tuple(itertools.chain(*hosts[first:last]))
        return cls(rank, parent, children)


def _divided(begin: int, end: int, num_parts: int) -> Iterator[tuple[int, int]]:
    """Yield at most ``num_parts`` ranges of about equal size that cover ``range(begin, end)``, none empty."""
    num_parts = min(num_parts, end - begin)
    edges = [begin + (end - begin) * part // num_parts for part in range(num_parts + 1)] if num_parts else []
    yield from itertools.pairwise(edges)


class PartCollector:
    """Merges the parts that one rank receives: its own, and those of the ranks below it.

    Args:
        node: The rank's place.
    """

    def __init__(self, node: TreeNode) -> None:
        self._below = {node.rank: (node.rank,), **node.children}
        self._parts: dict[WholeName, dict[int, Any]] = {}
        """Whole -> the part of each child that will send one; None until it comes."""

    def add(self, whole: WholeName, source: int, contributors: NDArray[np.bool_], part: Any) -> Any | None:
        """Add a part; return the parts of all contributors at and below this rank, merged, once the last one is here.

        Args:
            whole: What it is a part of.
            source: Child that sent it, or this rank.
            contributors: (ranks,) whether each rank gives a part, the same for all parts of a whole.
            part: The part, with all parts below it.
        """
        if whole not in self._parts:
            expected = [child for child, ranks in self._below.items() if contributors[list(ranks)].any()]
            self._parts[whole] = dict.fromkeys(expected)
        parts = self._parts[whole]
        parts[source] = part
        if any(one is None for one in parts.values()):
            return None
        del self._parts[whole]
        found = list(parts.values())
        return found[0] if len(found) == 1 else type(found[0]).merge(found)
