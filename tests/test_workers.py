"""Worker pool: results by rank, failures, deadlines, and a fresh state for every run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.workers import WorkerFailure, WorkerPool

ROOT = Path(__file__).parent.parent
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
TASKS = Path("/proc/self/task")


def _sum_of_ranks(offset: int) -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the third rank has its own opinion")
    dist.barrier()


def _refuse(leaves_a_thread: bool) -> None:
    if leaves_a_thread:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    raise ValueError("no rank goes on")


def _sum_of_shards() -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.ones(4), mesh, [Shard(0)]).sum().full_tensor().item()


def _num_gloo_threads() -> int:
    return sum("gloo" in name.read_text() for name in TASKS.glob("*/comm"))


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("farewell", flush=True)
        os._exit(7)
    dist.barrier()


def _wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    else:
        time.sleep(60)


def _leave_traces() -> int:
    logger, text = logging.getLogger("lightning.fabric"), "left by a run"
    traces = os.environ.get("TRACE", "none"), torch.get_default_dtype(), len(logger.filters), logger.level
    os.environ["TRACE"] = "left"
    torch.set_default_dtype(torch.float64)
    logger.addFilter(lambda record: False)
    logger.setLevel(logging.FATAL)
    is_hidden = text in [pattern.pattern for _, pattern, *_ in warnings.filters if pattern is not None]
    warnings.filterwarnings("ignore", message=text)
    assert traces == ("none", torch.float32, 0, logging.INFO) and not is_hidden
    return os.getpid()


def _port() -> int:
    return int(os.environ["MASTER_PORT"])


def _environment() -> tuple[bool, str, str]:
    return dist.is_initialized(), os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_order_of_rank(workers: WorkerPool, world_size: int) -> None:
    expected_sum = sum(range(world_size)) + 10.0 * world_size

    answers = workers.run(_sum_of_ranks, 10, world_size=world_size)

    assert answers == [(rank, world_size, expected_sum) for rank in range(world_size)]


def test_a_run_reuses_the_processes_without_the_state_of_the_last_run(workers: WorkerPool) -> None:
    assert workers.run(_leave_traces) == workers.run(_leave_traces)


def test_a_function_may_start_its_own_process_group(workers: WorkerPool) -> None:
    answers = workers.run(_environment, world_size=2, init_process_group=False)

    assert answers == [(False, "0", "2"), (False, "1", "2")]


@pytest.mark.skipif(not EPHEMERAL.exists(), reason="only Linux tells which ports outgoing connections get")
def test_runs_use_ports_outside_the_ephemeral_range(workers: WorkerPool) -> None:
    first, last = map(int, EPHEMERAL.read_text().split())
    (port,) = set(workers.run(_port, world_size=2, init_process_group=False))
    assert not first <= port <= last


def test_an_exception_is_reported_with_its_rank_and_the_pool_recovers(workers: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="the third rank has its own opinion") as failure:
        workers.run(_fail_on, 2)

    assert list(failure.value.errors) == [2]
    assert len(workers.run(_sum_of_ranks, 0)) == 4


@pytest.mark.parametrize("leaves_a_thread", [False, True])
def test_processes_are_kept_if_every_rank_raises_and_leaves_no_thread(
    workers: WorkerPool, leaves_a_thread: bool
) -> None:
    before = workers.run(os.getpid, world_size=2)
    with pytest.raises(WorkerFailure, match=r"ranks \[0, 1\] of 2 failed"):
        workers.run(_refuse, leaves_a_thread, world_size=2)
    assert (workers.run(os.getpid, world_size=2) == before) != leaves_a_thread
    assert len(workers.run(_sum_of_ranks, 0, world_size=2)) == 2


def test_a_rank_that_dies_is_reported_with_its_exit_code_and_last_output(workers: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match=r"exit code 7.*\n.*farewell"):
        workers.run(_die_on, 1, world_size=2)


def test_a_missed_deadline_shows_the_stack_of_every_rank(workers: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="within 1 s") as failure:
        workers.run(_wait_for_nobody, world_size=2, deadline_s=1)

    assert "_wait_for_nobody" in failure.value.errors[0]
    assert "_wait_for_nobody" in failure.value.errors[1]


@pytest.mark.skipif(not TASKS.is_dir(), reason="threads are named in /proc")
def test_a_run_with_sharded_tensors_leaves_no_threads_of_its_groups(workers: WorkerPool) -> None:
    assert workers.run(_sum_of_shards, world_size=2) == [4.0, 4.0]
    assert workers.run(_num_gloo_threads, world_size=2, init_process_group=False) == [0, 0]


@pytest.mark.exhaustive  # imports everything twice
def test_no_worker_outlives_the_process_that_owns_the_pool() -> None:
    script = (
        "import os, signal; from tests import workers\n"
        "workers.PRELOADED = workers.NEEDED  # what else there is to import changes nothing here\n"
        "pids = workers.WorkerPool().run(os.getpid, world_size=2); print(*pids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    finished = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=90)

    pids = [int(pid) for pid in finished.stdout.split()]
    assert len(pids) == 2, finished.stderr
    until = time.monotonic() + 10
    while any(_is_running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(_is_running(pid) for pid in pids)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
