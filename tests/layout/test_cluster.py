"""Clusters: parsing, the node of a rank, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import PRESETS, ClusterSpec, NodeLink
from lightning_realloc.layout.cluster import data_sheet_of


def test_ranks_fill_node_after_node() -> None:
    cluster = ClusterSpec.parse("h100:16x8")
    assert cluster.num_devices == 128
    assert [cluster.node_of(rank) for rank in (0, 7, 8, 127)] == [0, 0, 1, 15]


def test_every_preset_is_parsed_from_its_name() -> None:
    names = "cpu a100-80g a800-80g h100 h200 b200 gb200 mi300x v100 l40s l4 a10g t4 rtx4090 rtx3090"
    assert set(names.split()) == set(PRESETS)
    for name, preset in PRESETS.items():
        assert ClusterSpec.parse(name) == preset
        assert ClusterSpec.local(3, name).num_devices == 3


def test_the_data_sheet_of_a_device_is_found_by_its_drivers_name() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA A100-SXM4-40GB": "a100-80g",
        "Tesla V100-SXM2-32GB": "v100", "NVIDIA L4": "l4", "NVIDIA L40S": "l40s", "NVIDIA L40": None,
        "NVIDIA GeForce RTX 3090": "rtx3090", "NVIDIA GeForce GTX 1080": None, "AMD Instinct MI300X": "mi300x",
        "cpu": None,
    }  # fmt: skip
    assert {name: data_sheet_of(name) for name in names} == names


def test_an_unknown_cluster_is_refused() -> None:
    with pytest.raises(LayoutError, match=r'"PRESET:NODESxDEVICES"; write "h100:1x8" for one node of 8 devices'):
        ClusterSpec.parse("h100:8")
    for text in ("h900:1x8", "h100:0x8", ""):
        with pytest.raises(LayoutError, match=r'write "PRESET" or "PRESET:NODESxDEVICES".*a100-80g'):
            ClusterSpec.parse(text)


def test_a_rank_outside_the_cluster_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"rank 4 is outside .* 1x4 devices; use ranks 0-3"):
        ClusterSpec.local(4).node_of(4)


def test_a_cluster_without_memory_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"device_memory_bytes=0 .* positive"):
        replace(PRESETS["cpu"], device_memory_bytes=0)


def test_slow_links_are_those_among_the_nodes() -> None:
    links = NodeLink(0, 1, 1e9, 1e-4), NodeLink(1, 3, 1e8, 1e-4)
    cluster = replace(ClusterSpec.parse("h100:4x8"), node_links=links)
    assert cluster.slow_links((0, 1, 2)) == [links[0]]
    assert cluster.slow_links((0, 2, 3)) == []
    assert replace(cluster, num_nodes=1).slow_links((0,)) == []
    for wrong in (NodeLink(1, 0, 1e9, 1e-4), NodeLink(0, 1, 0.0, 1e-4), NodeLink(2, 2, 1e9, 1e-4)):
        with pytest.raises(LayoutError, match="must have its lower node first, and positive rates"):
            replace(cluster, node_links=(wrong,))
