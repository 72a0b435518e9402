"""Parts of all ranks reach the root of the tree once, in the order of ranks, whatever the hosts are."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.runtime.messages.host_tree import FAN_OUT, PartCollector, TreeNode


@dataclass(frozen=True)
class _Ranks:
    ranks: tuple[int, ...]

    @classmethod
    def merge(cls, parts: list[_Ranks]) -> _Ranks:
        """Return the ranks of all parts."""
        return cls(tuple(rank for part in parts for rank in part.ranks))


def _hosts(sizes: list[int]) -> list[range]:
    edges = np.cumsum([0, *sizes]).tolist()
    return [range(a, b) for a, b in itertools.pairwise(edges)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.data())
def test_all_parts_come_to_the_root_once_in_the_order_of_ranks(sizes: list[int], data: st.DataObject) -> None:
    hosts = _hosts(sizes)
    ranks = [rank for host in hosts for rank in host]
    giving = sorted(data.draw(st.sets(st.sampled_from(ranks), min_size=1)))
    gives = np.isin(ranks, giving)
    nodes = {rank: TreeNode.find(rank, hosts) for rank in ranks}
    collectors = {rank: PartCollector(node) for rank, node in nodes.items()}
    under_way = [(rank, rank, _Ranks((rank,))) for rank in giving]
    order, num_sent, whole = random.Random(data.draw(st.integers(0, 9))), 0, None
    while under_way:
        to, source, part = under_way.pop(order.randrange(len(under_way)))
        merged = collectors[to].add((1,), source, gives, part)
        if merged is None:
            continue
        parent = nodes[to].parent
        if parent is None:
            assert whole is None
            whole = merged
        else:
            under_way.append((parent, to, merged))
            num_sent += 1
    assert whole == _Ranks(tuple(giving))
    assert num_sent < len(ranks)


@pytest.mark.parametrize(("num_hosts", "per_host"), [(1, 8), (8, 8), (64, 8), (512, 8), (57, 72)])
def test_a_rank_has_few_neighbours_and_the_root_is_near(num_hosts: int, per_host: int) -> None:
    hosts = _hosts([per_host] * num_hosts)
    parents: dict[int, int | None] = {}
    for rank in range(num_hosts * per_host):
        node = TreeNode.find(rank, hosts)
        parents[rank] = node.parent
        assert len(node.children) <= per_host - 1 + FAN_OUT
        assert all(child in below for child, below in node.children.items())
    for rank in (0, 1, num_hosts * per_host - 1, num_hosts * per_host // 2):
        depth, parent = 0, parents[rank]
        while parent is not None:
            depth, parent = depth + 1, parents[parent]
        assert depth <= 1 + math.ceil(math.log(max(2, num_hosts), FAN_OUT))
