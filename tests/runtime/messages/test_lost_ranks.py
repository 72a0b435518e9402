"""Ranks that no launcher ends notice within seconds that another one was killed, and name it with its call."""

from __future__ import annotations

import json
import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_realloc.runtime.messages import watchdog as watchdog_module
from lightning_realloc.runtime.messages.failure_store import is_lost
from lightning_realloc.runtime.messages.flight_record import FlightRecord
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.runtime.messages.watchdog import Watchdog
from tests.workers import PRELOADED, rank_environments

WAITS_FOR = {1: {0: 1, 2: 0}, 0: {1: 2, 2: 0}}
"""Killed rank -> each other rank -> the rank that it waits for: one of them waits for the other."""
NOTICED_S = 30.0
"""Seconds within which all ranks end; 5 on two idle cores. Without probes they wait half an hour."""


def run_rank(killed: int, variables: dict[str, str], folder: Path) -> None:
    """Wait for a frame that never comes, or be killed in a call; write down the error that ends the wait."""
    os.environ.update(variables)
    watchdog_module.POLL_S = 0.2
    rank = int(variables["RANK"])
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    watchdog = _watchdog(rank, folder)
    mailbox = Mailbox(rank, 3, group, watchdog)
    dist.barrier()
    watchdog.start()
    if rank == killed:
        with watchdog.record.during("actor.generate"):
            time.sleep(2.0)  # until the others know its call
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        try:
            mailbox.receive(FrameKind.ROWS, 0, 0, WAITS_FOR[killed][rank])
        except Exception as error:
            mailbox.fail(error)
    except Exception as error:
        is_known = killed != 0 and is_lost(killed)
        (folder / f"rank{rank}.json").write_text(json.dumps([str(error), time.time(), is_known]))
    others = [folder / f"rank{other}.json" for other in WAITS_FOR[killed]]
    while not all(other.exists() for other in others):
        time.sleep(0.1)  # rank 0 hosts the store
    os._exit(1)


def _watchdog(rank: int, folder: Path) -> Watchdog:
    return Watchdog(FlightRecord(), rank=rank, world_size=3, timeout_s=3600, action="warn", folder=folder)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Killed rank -> folder with what the others wrote down; the runs wait at the same time."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    folders = {killed: tmp_path_factory.mktemp(f"killed{killed}") for killed in WAITS_FOR}
    processes = [
        context.Process(target=run_rank, args=(killed, each, folder))
        for killed, folder in folders.items()
        for each in rank_environments(3)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60 + NOTICED_S)
    finally:
        for process in processes:
            process.kill()
    return folders


@pytest.mark.parametrize("killed", [0, 1])
def test_ranks_that_wait_for_a_killed_one_end_and_name_its_call(ended: dict[int, Path], killed: int) -> None:
    folder = ended[killed]
    killed_at = float((folder / "killed").read_text())
    for rank in WAITS_FOR[killed]:
        error, noticed_at, is_known = json.loads((folder / f"rank{rank}.json").read_text())
        assert noticed_at - killed_at < NOTICED_S
        if killed:  # rank 0 hosts the store, which names the lost rank to others, such as one that saves a checkpoint
            assert "rank 1 was lost in actor.generate" in error and is_known
        else:
            assert "the process that hosts the process group's store, mostly rank 0, was lost" in error
            assert "rank 0 was last seen in actor.generate" in error
        assert (folder / f"rank{rank}.log").read_text(errors="replace").count("TCPStore.cpp") <= 2
