"""Nodes meet as in a tournament, slow hosts and links are named, and plans get the real figures."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.layout import ClusterSpec
from lightning_realloc.runtime.measure.link_table import (
    Link,
    LinkTable,
    num_rounds,
    partner_of,
)
from lightning_realloc.runtime.measure.link_watch import describe_fall
from lightning_realloc.runtime.measure.links import PAIRS_S, measure_links
from tests.workers import WorkerPool

FAST = 1e9


def meetings(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of every round, and check that both sides agree on them."""
    rounds = []
    for number in range(num_rounds(num_nodes)):
        partners = [partner_of(node, number, num_nodes) for node in range(num_nodes)]
        pairs = {(node, other) for node, other in enumerate(partners) if other is not None}
        assert pairs == {(other, node) for node, other in pairs}  # each is the partner of its partner
        assert all(node != other for node, other in pairs)
        assert partners.count(None) == num_nodes % 2
        rounds.append([pair for pair in pairs if pair[0] < pair[1]])
    return rounds


@given(st.integers(2, 300))
def test_no_pair_meets_twice_and_the_rounds_stay_few(num_nodes: int) -> None:
    rounds = meetings(num_nodes)
    pairs = Counter(itertools.chain.from_iterable(rounds))
    assert set(pairs.values()) == {1}
    assert len(rounds) <= 4 * (num_nodes - 1).bit_length()  # 4 log2 n
    if num_nodes <= 20:
        assert len(pairs) == num_nodes * (num_nodes - 1) // 2
    meets = Counter(itertools.chain.from_iterable(pairs))
    assert len(meets) == num_nodes and max(meets.values()) - min(meets.values()) <= num_nodes % 2


def table(num_hosts: int, slow: dict[tuple[int, int], float], *, latency_s: float = 1e-4) -> LinkTable:
    """Return a table of all pairs, with the given bandwidths for some directions and `FAST` for the others."""
    ends = itertools.permutations(range(num_hosts), 2)
    hosts = tuple(f"n{number}" for number in range(num_hosts))
    return LinkTable(hosts, {one: Link(slow.get(one, FAST), latency_s) for one in ends})


def sending_of(node: int, num_hosts: int, rate: float) -> dict[tuple[int, int], float]:
    return {(node, other): rate for other in range(num_hosts) if other != node}


def receiving_of(node: int, num_hosts: int, rate: float) -> dict[tuple[int, int], float]:
    return {(other, node): rate for other in range(num_hosts) if other != node}


@pytest.mark.parametrize("num_hosts", [3, 4, 7])
def test_a_host_that_sends_slowly_is_named_as_the_host(num_hosts: int) -> None:
    found = table(num_hosts, sending_of(2, num_hosts, 1e8))
    (line,) = found.warnings()
    assert line.startswith(
        "slow host: n2 sends at 0.1 GB/s on all of its links, and hosts usually at 1 GB/s; check its cable"
    )
    assert found.text_of(found.slowest) == "n2 -> n0 at 0.1 GB/s and 100 us"
    assert f"of all {num_hosts * (num_hosts - 1) // 2} pairs: n2 -> n0" in found.describe()


@pytest.mark.parametrize("num_hosts", [3, 4, 7])
def test_a_host_that_is_slow_both_ways_is_named_once(num_hosts: int) -> None:
    slow = sending_of(1, num_hosts, 1e8) | receiving_of(1, num_hosts, 3e8)
    (line,) = table(num_hosts, slow).warnings()
    assert line.startswith("slow host: n1 sends and receives at 0.1 GB/s")


def test_a_single_slow_pair_is_named_as_the_pair() -> None:
    (line,) = table(5, {(3, 1): 1e8}).warnings()
    assert line.startswith("slow link: n3 -> n1 at 0.1 GB/s and 100 us, and hosts usually send at 1 GB/s")


def test_a_slow_host_does_not_hide_another_slow_pair() -> None:
    host, link = table(6, sending_of(2, 6, 1e8) | {(4, 5): 2e8}).warnings()
    assert "n2 sends" in host and "n4 -> n5" in link


def test_equal_links_and_two_hosts_are_no_fault() -> None:
    assert not list(table(6, {(0, 1): 0.6 * FAST}).warnings())
    assert not list(table(2, {(0, 1): 1e6}).warnings())  # nothing to compare it with
    assert table(2, {(0, 1): 1e6}).node_links() == ()


def test_plans_get_slow_pairs_with_nearly_equal_figures_merged() -> None:
    slow = {(2, 0): 1.0e8, (2, 1): 1.1e8, (2, 3): 1.2e8, (0, 1): 0.9 * FAST, (3, 1): 4e8}
    links = {(link.first, link.second): link.bytes_per_s for link in table(4, slow).node_links()}
    assert links == {(0, 2): 1.1e8, (1, 2): 1.1e8, (2, 3): 1.1e8, (1, 3): 4e8}


def test_a_pair_that_did_not_meet_is_as_slow_as_its_slower_node() -> None:
    hosts = tuple(map(str, range(40)))
    pairs = [pair for pairs in meetings(40) for pair in pairs]
    links = {ends: Link(1e8 if 7 in ends else FAST, 1e-4) for a, b in pairs for ends in ((a, b), (b, a))}
    found = LinkTable(hosts, links)
    assert f"of {len(pairs)} of 780 pairs" in found.describe() and len(pairs) < 780
    assert {(link.first, link.second) for link in found.node_links()} == {
        tuple(sorted((7, other))) for other in range(40) if other != 7
    }


def test_a_fall_names_the_host_that_all_fallen_links_have() -> None:
    before = table(4, {(3, 0): 1e8})
    after = table(4, {(3, 0): 1e8} | sending_of(1, 4, 2e8))
    assert describe_fall(before, before) is None
    assert (describe_fall(before, after) or "").startswith(
        "links of n1 have become slow since the start: n1 -> n0 at 0.2 GB/s and 100 us, 1 GB/s at the start; n1 -> n2"
    )
    pair = describe_fall(before, table(4, {(3, 0): 1e8, (2, 3): 1e7})) or ""
    assert pair.startswith("the link between n2 and n3 has become slow since the start: n2 -> n3 at 0.01 GB/s")
    assert (describe_fall(before, table(4, {(0, 1): 1e7, (2, 3): 1e7})) or "").startswith("2 links have become slow")


def measured_pairs() -> tuple[LinkTable, ClusterSpec, float]:
    began_at = time.perf_counter()
    cluster, found = measure_links(ClusterSpec.parse("cpu:3x1"), torch.device("cpu"), ["a", "b", "c"])
    assert found is not None
    return found, cluster, time.perf_counter() - began_at


def test_all_pairs_are_measured_in_both_directions_alike_on_all_ranks(workers: WorkerPool) -> None:
    results = workers.run(measured_pairs, world_size=3)
    first, cluster, seconds = results[0]
    assert all(found.links == first.links and other == cluster for found, other, _ in results)
    assert set(first.links) == set(itertools.permutations(range(3), 2))
    assert all(1e6 < link.bytes_per_s < 1e12 and 0 < link.latency_s < 1 for link in first.links.values())
    assert cluster.inter_node_bytes_per_s == first.usual.bytes_per_s
    assert cluster.node_links == first.node_links()
    assert seconds < 3 * PAIRS_S
