"""Rates and collectives, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.tuning.estimate.hardware import Device, Efficiency, Group, LinkRates, Links

ROUND = replace(
    ClusterSpec.parse("h100:2x4"),
    device_flops=1e12,
    device_memory_bytes_per_s=1e11,
    intra_node_bytes_per_s=1e9,
    inter_node_bytes_per_s=1e8,
    intra_node_latency_s=1e-6,
    inter_node_latency_s=1e-5,
)
IDEAL = Efficiency(
    matmul_share=1,
    tile=1,
    thin_tile=1,
    tiles_at_once=1,
    depth_overhead=0,
    attention_share=1,
    memory_share=1,
    cache_share=1,
    link_share=1,
    layer_launch_s=0,
    decode_launch_s=0,
    captures_steps=False,
    collective_launch_s=0,
    step_s=0,
    row_s=0,
    call_s=0,
)
LINKS = Links(ROUND, IDEAL)


def test_large_products_are_bound_by_arithmetic_and_thin_ones_by_weights() -> None:
    device = Device(ROUND, IDEAL)
    assert device.matmul(1000, 1000, 1000, 2) == pytest.approx(2e9 / 1e12)  # 6 MB of traffic would take 0.06 ms
    assert device.matmul(1, 1000, 1000, 2) == pytest.approx((2e6 + 2e3 + 2e3) / 1e11)  # 2 Mflop would take 2 us


def test_partial_tiles_waves_and_shallow_products_cost_extra() -> None:
    tiled = Device(ROUND, replace(IDEAL, tile=100, thin_tile=20, tiles_at_once=5))
    whole = 2 * 100 * 100 * 1000 / 1e12  # one tile
    assert tiled.matmul(200, 1000, 100, 2) == pytest.approx(whole * (2 + 2))  # on average half of 4 others idle
    assert tiled.matmul(201, 1000, 100, 2) == pytest.approx(whole * (3 + 2))
    assert tiled.matmul(81, 1000, 100, 2) == pytest.approx(whole)  # thin: no multiprocessor is idle
    assert tiled.matmul(80, 1000, 100, 2) == pytest.approx(whole * 0.8)
    shallow = Device(ROUND, replace(IDEAL, depth_overhead=100))
    assert shallow.matmul(1000, 100, 1000, 2) == pytest.approx(2 * 2e8 / 1e12)


def test_collectives_move_the_bytes_of_a_ring() -> None:
    # 4 ranks of one node: each receives 3 of 4 parts of 4 MB at 1 GB/s, after two hops of a tree.
    assert LINKS.gather(4e6, Group(4, 1)) == pytest.approx(3e-3 + 2e-6)
    assert LINKS.all_reduce(4e6, Group(4, 1)) == pytest.approx(2 * (3e-3 + 2e-6))
    # One rank on each of 2 nodes: half of the result comes at 0.1 GB/s.
    assert LINKS.gather(4e6, Group(2, 2)) == pytest.approx(20e-3 + 1e-5)
    # 4 ranks on each of 2 nodes: every rank's adapter receives a quarter of the other node's half.
    assert LINKS.gather(4e6, Group(8, 2)) == pytest.approx(5e-3 + 2e-6 + 1e-5)
    # Of eight ranks on two nodes, three are near and four far; each has an adapter of its own.
    assert LINKS.all_to_all(4e6, Group(4, 1)) == pytest.approx(3e-3 + 2e-6)
    assert LINKS.all_to_all(4e6, Group(8, 2)) == pytest.approx(20e-3 + 2e-6 + 1e-5)
    assert LINKS.all_to_all(4e6, Group(1, 1)) == 0
    assert LINKS.gather(4e6, Group(1, 1)) == LINKS.all_reduce(0, Group(4, 1)) == 0


def test_a_message_uses_the_link_between_its_ranks() -> None:
    assert LINKS.send(1e6, Group(4, 1)) == pytest.approx(1e-3 + 1e-6)
    assert LINKS.send(1e6, Group(4, 2)) == pytest.approx(1e-2 + 1e-5)


def test_a_slow_link_sets_the_pace_of_its_group() -> None:
    slow = LinkRates(1e7, 1e-3)
    assert LINKS.send(1e6, Group(4, 2, slow)) == pytest.approx(0.1 + 1e-3)
    assert LINKS.send(1e6, Group(4, 1, slow)) == pytest.approx(1e-3 + 1e-6)  # inside a node
    assert LINKS.gather(4e6, Group(2, 2, slow)) == pytest.approx(0.2 + 1e-3)
    assert LINKS.all_to_all(4e6, Group(8, 2, slow)) == pytest.approx(0.2 + 2e-6 + 1e-3)


def test_impossible_constants_are_refused() -> None:
    with pytest.raises(PlanError, match=r"matmul_share=1.5 is a share of a nominal rate; use one in \(0, 1\]"):
        Efficiency(matmul_share=1.5)
    with pytest.raises(PlanError, match="decode_launch_s=-1 may not be negative"):
        Efficiency(decode_launch_s=-1)
    with pytest.raises(PlanError, match="tile=0 must be at least 1"):
        Efficiency(tile=0)
