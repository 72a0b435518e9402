"""Ranks that are spread over hosts otherwise than the Trainer assumes, or run other versions, are named."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch

from lightning_realloc.errors import ConfigError
from lightning_realloc.layout import ClusterSpec
from lightning_realloc.runtime.measure import nodes
from lightning_realloc.runtime.measure.links import measure_links
from lightning_realloc.runtime.measure.nodes import RankHost, check_nodes, find_problem, warn_of_other_processes
from tests.workers import WorkerPool

VERSIONS = {"Python": "3.11", "torch": "2.13.0"}


def places(hosts: str, **versions_of_last: str) -> list[RankHost]:
    """Return a place per letter, which names its host; the last rank may have other versions."""
    found = [RankHost(f"{host}/boot-of-{host}", VERSIONS) for host in hosts]
    return [*found[:-1], RankHost(found[-1].host, VERSIONS | versions_of_last)]


@pytest.mark.parametrize(("hosts", "per_node"), [("aabb", 2), ("aaaa", 4), ("aaaa", 2), ("abcd", 1)])
def test_nodes_of_consecutive_ranks_are_fine(hosts: str, per_node: int) -> None:
    assert find_problem(places(hosts), per_node) is None


@pytest.mark.parametrize(
    ("hosts", "per_node", "message"),
    [
        (
            "aabb",
            4,
            "ranks 0-3 are one node of Trainer(devices=4, num_nodes=1), but run on a (rank 0-1), b (rank 2-3); set "
            "devices=2 and num_nodes=2",
        ),
        (
            "aaab",
            2,
            "ranks 2-3 are one node of Trainer(devices=2, num_nodes=2), but run on a (rank 0-2), b (rank 3); start "
            "the same number of processes on every node",
        ),
        (
            "abab",
            2,
            "ranks 0-1 are one node of Trainer(devices=2, num_nodes=2), but run on a (rank 0,2), b (rank 1,3); "
            "number the ranks node by node (srun --distribution=block)",
        ),
    ],
)
def test_other_nodes_are_named_with_the_way_out(hosts: str, per_node: int, message: str) -> None:
    assert find_problem(places(hosts), per_node) == message


def test_differing_versions_are_named_together() -> None:
    assert find_problem(places("aabb", torch="2.12.0", peft="0.18"), 2) == (
        "rank 3 on b has peft 0.18, torch 2.12.0, rank 0 on a has peft not installed, torch 2.13.0; install the same "
        "versions on every node"
    )


def error_of_other_versions() -> str:
    """Return the error of a check in which every rank reads another version of every package."""
    check_nodes(2)
    version = f"{torch.distributed.get_rank()}.0"
    with mock.patch.object(nodes, "_installed_versions", lambda: {"lightning-realloc": version, "torch": version}):
        try:
            check_nodes(2)
        except ConfigError as error:
            return str(error)
    return ""


def test_all_ranks_raise_the_same_error(workers: WorkerPool) -> None:
    errors = workers.run(error_of_other_versions, world_size=2)
    assert errors[0] == errors[1]
    assert "lightning-realloc 1.0" in errors[0] and "lightning-realloc 0.0" in errors[0]


def measured_rates() -> tuple[float, float, float, float]:
    cluster = ClusterSpec.parse("cpu:2x2")
    measured, _ = measure_links(cluster, torch.device("cpu"), ["a", "b"])
    return (
        measured.inter_node_bytes_per_s, measured.inter_node_latency_s, measured.intra_node_bytes_per_s,
        measured.intra_node_latency_s,
    )  # fmt: skip


def test_links_are_measured_alike_on_all_ranks(workers: WorkerPool) -> None:
    rates = workers.run(measured_rates, world_size=4)
    assert len(set(rates)) == 1
    between, between_s, inside, inside_s = rates[0]
    nominal = ClusterSpec.parse("cpu:2x2")
    assert (between, inside) != (nominal.inter_node_bytes_per_s, nominal.intra_node_bytes_per_s)
    assert 1e6 < between < 1e12 and 1e6 < inside < 1e12
    assert 0 < between_s < 1 and 0 < inside_s < 1


def test_a_cluster_of_one_device_per_node_keeps_its_nominal_links_inside(workers: WorkerPool) -> None:
    nominal = ClusterSpec.parse("cpu:2x1")
    (measured, _) = workers.run(measured_two_nodes, world_size=2)
    assert measured.intra_node_bytes_per_s == nominal.intra_node_bytes_per_s
    assert measured.inter_node_bytes_per_s != nominal.inter_node_bytes_per_s


def measured_two_nodes() -> ClusterSpec:
    measured, table = measure_links(ClusterSpec.parse("cpu:2x1"), torch.device("cpu"), ["a", "b"])
    assert table is not None and set(table.links) == {(0, 1), (1, 0)}
    return measured


@pytest.mark.parametrize(("free", "reserved", "is_filled"), [(79, 0, False), (60, 15, False), (40, 10, True)])
def test_a_device_that_other_processes_fill_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, is_filled: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved << 30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_other_processes(torch.device("cuda", 0))
    expected = "other processes hold 30.0 of 80.0 GiB on cuda:0, and plans count on all of it; end them (nvidia-smi "
    assert [str(each.message).startswith(expected) for each in caught] == [True] * is_filled
    assert all("memory_per_device='50GiB'" in str(each.message) for each in caught)
