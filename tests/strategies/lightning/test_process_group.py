"""Where all ranks are on one host, no other host reaches the store through which they meet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_realloc.strategies.lightning.process_group import is_on_one_host, start_on_loopback
from tests.workers import WorkerPool


def listening_addresses(port: int) -> set[str]:
    """Return the addresses, in hexadecimal digits, at which any process of this host listens on a port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    places = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


def _meet() -> tuple[list[int], set[str]]:
    start_on_loopback(TorchElasticEnvironment(), "gloo", torch.device("cpu"), None)
    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(ranks, torch.tensor([dist.get_rank()]))
    addresses = listening_addresses(int(os.environ["MASTER_PORT"]))
    dist.barrier()
    return [int(rank) for rank in ranks], addresses


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux' table of sockets")
def test_ranks_of_one_host_meet_at_a_store_on_loopback_alone(workers: WorkerPool) -> None:
    for ranks, addresses in workers.run(_meet, world_size=2, init_process_group=False):
        assert ranks == [0, 1]
        assert addresses == {"0100007F"}  # 127.0.0.1


def test_ranks_of_several_hosts_need_a_store_that_all_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert is_on_one_host(TorchElasticEnvironment(), num_nodes=1)
    assert is_on_one_host(LightningEnvironment(), num_nodes=1)
    assert not is_on_one_host(LightningEnvironment(), num_nodes=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # a container for each rank
    assert not is_on_one_host(TorchElasticEnvironment(), num_nodes=1)
