"""Ranks that do not come, closed ports and wrong clocks are found, and the check ends in time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from lightning_realloc.strategies.cluster_check import check
from lightning_realloc.strategies.cluster_check.check import clock_offsets, run_cluster_check
from lightning_realloc.strategies.cluster_check.meeting import Doorway, failed_connections
from tests.workers import WorkerPool


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def be_rank(patch: pytest.MonkeyPatch, rank: int, world_size: int, port: int) -> None:
    """Set the variables of a rank that nothing has started."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_"))]:
        patch.delenv(name)
    values = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in values.items():
        patch.setenv(name, str(value))


def test_a_rank_that_does_not_come_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(monkeypatch, 0, 3, free_port())
    monkeypatch.setattr(check, "MEET_S", 1.0)
    lines: list[str] = []
    began_at = time.monotonic()
    assert run_cluster_check(lines.append) == 1
    assert time.monotonic() - began_at < 15
    text = "".join(lines)
    assert f"failed: ranks: 1-2 of 3 have not come in 1 s, and those of {socket.gethostname()} (rank 0) have" in text
    assert "1 fault found in" in text


def test_a_rank_that_does_not_find_rank_0_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    be_rank(monkeypatch, 1, 2, port)
    monkeypatch.setattr(check, "MEET_S", 1.0)
    lines: list[str] = []
    assert run_cluster_check(lines.append) == 1
    assert f"has not reached rank 0 at 127.0.0.1:{port} in 1 s" in "".join(lines)
    assert "its port is open" in "".join(lines)


def test_a_single_rank_has_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(monkeypatch, 0, 1, free_port())
    monkeypatch.setattr("lightning_realloc.strategies.cluster_check.faults.MIN_DISK_BYTES", 0)
    monkeypatch.setattr("lightning_realloc.strategies.cluster_check.faults.MIN_SHARED_BYTES", 0)
    lines: list[str] = []
    assert run_cluster_check(lines.append) == 0
    assert "no fault found" in "".join(lines) and "clock" in "".join(lines)


def test_closed_ports_are_found() -> None:
    doorway = Doorway("127.0.0.1")
    assert doorway.place is not None
    closed = ("127.0.0.1", free_port())
    found = failed_connections({"open": doorway.place, "closed": closed})
    doorway.close()
    assert list(found) == ["closed"] and f"127.0.0.1:{closed[1]}" in found["closed"]


def shifted_offsets() -> dict[int, float]:
    rank = int(os.environ["RANK"])
    return clock_offsets([0, 1, 2], lambda: time.time() + 40.0 * (rank - 1))


def test_clocks_are_compared_with_that_of_rank_0(workers: WorkerPool) -> None:
    first, *others = workers.run(shifted_offsets, world_size=3)
    assert first == {0: 0.0, 1: pytest.approx(40.0, abs=0.2), 2: pytest.approx(80.0, abs=0.2)}
    assert all(set(one.values()) == {0.0} for one in others)


@pytest.mark.exhaustive
def test_two_ranks_of_this_machine_have_no_fault() -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "lightning_realloc", "doctor", "--cluster"]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            command, env=os.environ | given | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    assert "0-1" in texts[0] and "no fault found" in texts[0] and not texts[1]
