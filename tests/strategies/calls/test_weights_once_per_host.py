"""Newer weights enter each host once for all of its generating ranks, and the run keeps its bits."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_realloc.runtime.transfer import shared_memory
from lightning_realloc.runtime.transfer.version_stream import VersionSender
from lightning_realloc.strategies.pool import weight_streams
from lightning_realloc.strategies.pool.weight_streams import ReplicaStream
from tests.strategies.calls.test_weight_updates import Result, lines, train
from tests.workers import PRELOADED, WorkerPool, rank_environments

pytestmark = pytest.mark.skipif(shared_memory.shared_memory_obstacle() is not None, reason="needs Linux on x86")

SMALL = (4, "cpu:2x2", {"actor.generate": "dp2@2-3", "reference.infer": "dp1@1", "actor.train": "dp1@0"})
"""Number of ranks, hosts, and the plan."""
EIGHT = {
    layout: (12, "cpu:3x4", {"actor.generate": layout, "reference.infer": "dp2@2-3", "actor.train": "dp2@0-1"})
    for layout in ("dp8@4-11", "dp4.tp2@4-11")
}


def counted(
    plan: dict[str, str], hosts: str, folder: str, is_shared: bool, options: dict[str, Any]
) -> tuple[Result, list[tuple[int, int]]]:
    """Train; return the result, and (receiver, bytes) of each message with weights that this rank sent."""
    sent: list[tuple[int, int]] = []
    send = VersionSender._isend

    def recorded(sender: VersionSender, frame: Tensor, receiver: int) -> None:
        if frame.dtype == torch.uint8:  # no header
            sent.append((receiver, frame.numel()))
        send(sender, frame, receiver)

    share = shared_memory.share_segment if is_shared else lambda *_, **__: (None, "the test says so")
    with patch.object(VersionSender, "_isend", recorded), patch(f"{weight_streams.__name__}.share_segment", share):
        return train(plan, folder, cluster=hosts, **options), sent


def run(
    workers: WorkerPool, case: tuple[int, str, dict[str, str]], folder: Path, *, is_shared: bool = True, **options: Any
) -> tuple[list[Result], Counter[int]]:
    """Return the results of all ranks, and the bytes of a version into each host, by its number."""
    num_ranks, hosts, plan = case
    answers = workers.run(
        counted, plan, hosts, str(folder), is_shared, options,
        world_size=num_ranks, init_process_group=False, deadline_s=300,
    )  # fmt: skip
    per_host, entered = int(hosts.rpartition("x")[2]), Counter[int]()
    for _, sent in answers:
        for receiver, num_bytes in sent:
            entered[receiver // per_host] += num_bytes
    num_versions = Counter(answers[0][1]).most_common(1)[0][1]
    return [result for result, _ in answers], Counter({host: total // num_versions for host, total in entered.items()})


def check(workers: WorkerPool, case: tuple[int, str, dict[str, str]], folder: Path, staleness: int) -> None:
    """Train while weights arrive at any step; repeat the run from its log, with and without shared memory."""
    settings: dict[str, Any] = {"staleness": staleness, "batch_size": 8}
    first, once = run(workers, case, folder / "first", sleep_s=0.02, **settings)
    log = str(folder / "first" / "weight_versions")
    again, _ = run(workers, case, folder / "again", replay_versions=log, **settings)
    apart, often = run(workers, case, folder / "apart", is_shared=False, replay_versions=log, **settings)
    for repeated in (again, apart):
        assert [result.tokens for result in repeated] == [result.tokens for result in first]
        assert [result.versions for result in repeated] == [result.versions for result in first]
        assert all(torch.equal(repeated[0].weights[name], tensor) for name, tensor in first[0].weights.items())
    generating = [rank for rank, result in enumerate(first) if any(result.versions)]
    assert any(line["updates"] for rank in generating for line in lines(folder / "first", rank)), "between two tokens"
    whole = sum(tensor.nbytes for tensor in first[0].weights.values())
    per_host = int(case[1].rpartition("x")[2])
    replicas = Counter(rank // per_host for rank in generating if ".tp2" not in case[2]["actor.generate"] or rank % 2)
    for host, count in replicas.items():
        assert whole <= once[host] < 1.2 * whole, "the weights once, and their checksums"
        assert count * whole <= often[host]


@pytest.mark.parametrize("staleness", [2])
def test_two_ranks_of_a_host_share_what_enters_it(workers: WorkerPool, tmp_path: Path, staleness: int) -> None:
    check(workers, SMALL, tmp_path, staleness)


@pytest.fixture
def twelve() -> Iterator[WorkerPool]:
    pool = WorkerPool(max_workers=12)
    yield pool
    pool.close()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("staleness", [2, 4])
@pytest.mark.parametrize("layout", EIGHT)
def test_weights_enter_two_hosts_once_for_eight_generating_ranks(
    twelve: WorkerPool, tmp_path: Path, layout: str, staleness: int
) -> None:
    check(twelve, EIGHT[layout], tmp_path, staleness)


def train_until(killed: int, variables: dict[str, str], folder: Path) -> None:
    """Train; be killed once newer weights have been taken twice, or write down the error that ends the run."""
    os.environ.update(variables)
    rank, take = int(variables["RANK"]), ReplicaStream.take

    def taken(stream: ReplicaStream) -> int:
        version = take(stream)
        if rank == killed and version == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return version

    with patch.object(ReplicaStream, "take", taken):
        try:
            train(SMALL[2], str(folder), cluster=SMALL[1], sleep_s=0.02, staleness=2, batch_size=8)
        except Exception as error:
            (folder / f"rank{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    os._exit(1)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [2, 3])
def test_a_killed_rank_of_a_host_ends_the_others(tmp_path: Path, killed: int) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    processes = [
        context.Process(target=train_until, args=(killed, each, tmp_path)) for each in rank_environments(SMALL[0])
    ]
    for process in processes:
        process.start()
    begin = time.monotonic()
    try:
        for process in processes:
            process.join(max(0.0, begin + 120.0 - time.monotonic()))
        assert not any(process.is_alive() for process in processes), "nobody waits for the lost rank for ever"
    finally:
        for process in processes:
            process.kill()
    errors = {rank: (tmp_path / f"rank{rank}.txt") for rank in range(SMALL[0]) if rank != killed}
    texts = {rank: file.read_text() for rank, file in errors.items()}
    assert all(text.startswith("RankLost") and f"rank {killed} was lost" in text for text in texts.values()), texts
