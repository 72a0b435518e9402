"""Where all ranks are on one host, no other host reaches the store through which they meet."""

from __future__ import annotations

import atexit
import os
import resource
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.lightning.process_group import (
    allow_open_files,
    is_on_one_host,
    listen_at,
    open_store,
    start_on_loopback,
)
from lightning_realloc.strategies.lightning.script_launcher import ScriptLauncher
from tests.strategies.lightning.launched import listening_addresses
from tests.workers import WorkerPool


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


def test_processes_of_a_script_on_one_node_are_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_nodes in (1, 2):
        monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "host0"})
        launcher = ScriptLauncher(LightningEnvironment(), 1, num_nodes)
        launcher._call_children_scripts()
        atexit.unregister(launcher._end_last)
        for rank in ("0", "1"):  # the process that starts the others has a rank in its environment, too
            os.environ["LOCAL_RANK"] = rank
            assert is_on_one_host(LightningEnvironment(), num_nodes=num_nodes) == (num_nodes == 1)


def test_ranks_of_several_hosts_need_a_store_that_all_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert is_on_one_host(TorchElasticEnvironment(), num_nodes=1)
    assert is_on_one_host(LightningEnvironment(), num_nodes=1)
    assert not is_on_one_host(LightningEnvironment(), num_nodes=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # a container for each rank
    assert not is_on_one_host(TorchElasticEnvironment(), num_nodes=1)


def test_a_port_stays_taken_from_its_choice_until_the_store_serves_it() -> None:
    listener = listen_at("127.0.0.1")
    port = listener.getsockname()[1]
    with pytest.raises(OSError, match="Address already in use"):
        listen_at("127.0.0.1", port)
    early = socket.create_connection(("127.0.0.1", port), timeout=10.0)  # a rank that was faster than rank 0
    early.close()
    server = open_store("127.0.0.1", port, timedelta(seconds=10), listener=listener)
    assert server.port == port
    client = open_store("127.0.0.1", port, timedelta(seconds=10), listener=None)
    client.set("key", "value")
    assert server.get("key") == b"value"


@pytest.mark.parametrize(
    ("soft", "hard", "raised"), [(256, 1_000_000, 2176), (4096, 4096, None), (256, resource.RLIM_INFINITY, 2176)]
)
def test_the_limit_of_open_files_is_raised_for_many_ranks(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, given: limits.append(given))
    allow_open_files(512)
    assert limits == ([] if raised is None else [(raised, hard)])


def test_a_limit_of_open_files_that_cannot_be_raised_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    with pytest.raises(ConfigError, match=r"512 ranks need about 2,176 open files each, .* allows a process 1,024; .*"):
        allow_open_files(512)
