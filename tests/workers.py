"""Pool of processes that run a test's function on several ranks, without new imports for every run.

Processes are forked from a template that has imported torch, transformers and Lightning once. Every run gives the first
``world_size`` of them a fresh environment, as torchrun would, and a fresh gloo process group. A run that hangs, or in
which a rank dies or leaves threads behind, ends all processes; the next run forks new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

# Imported once, by the template. Every worker imports other modules itself.
NEEDED = (
    "torch",
    "lightning_realloc.strategies.lightning.process_group",
    "tests.dry_runs",
    "lightning_realloc.runtime.forward.attention.packed_attention",
    "lightning_realloc.runtime.parallel.model_spec",
)
"""Modules of every run."""
PRELOADED = (
    *NEEDED,
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch._dynamo",
    "lightning.pytorch",
    "lightning.pytorch.strategies.model_parallel",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_fast",
    "datasets",
    "peft",
    "lightning_realloc.cli",
    "tests.models",
    "pytest",  # every test module imports these two
    "hypothesis",
)
PORTS = range(20_000, 32_000)
"""Below the ephemeral range: another process could get such a port before rank 0 listens on it."""
PORT_SHARES = 8
GRACE_S = 2.0
"""Seconds for the other ranks to end after one has failed, so that all failures are reported together."""
STACKS_S = 3.0
"""Seconds for workers to write their stacks; on a busy machine each has to be scheduled first."""


class WorkerFailure(Exception):
    """A run in which at least one rank raised, died or missed the deadline.

    ``errors`` maps each such rank to its traceback, or to its last output.
    """

    def __init__(self, summary: str, errors: Mapping[int, str]) -> None:
        self.errors = dict(errors)
        parts = [summary, *(f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(errors.items()))]
        super().__init__("\n".join(parts))


class Request(NamedTuple):
    """A function to run; ranks differ only in ``environment``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    environment: dict[str, str]
    init_process_group: bool
    timeout_s: float


class Answer(NamedTuple):
    """End of a run on one rank."""

    succeeded: bool
    value: Any
    """The function's result, or a traceback."""
    is_orderly: bool = True
    """Whether the process can run another function: the run has left no thread behind."""


class Worker(NamedTuple):
    process: BaseProcess
    connection: Connection
    log: Path  # stdout and stderr of the current run, tracebacks on request


class WorkerPool:
    """Processes that run module-level functions on 1 to 8 ranks; started on first use."""

    def __init__(self, max_workers: int = 8) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._max_workers = max_workers
        self._workers: list[Worker] = []
        self._directory = tempfile.TemporaryDirectory(prefix="workers-")

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 4,
        deadline_s: float = 60.0,
        init_process_group: bool = True,
    ) -> list[Any]:
        """Return ``function(*args)`` of every rank, in order of rank.

        ``function`` is defined at the top of an importable module; its arguments and results can be pickled. It reads
        its rank from ``torch.distributed`` or ``os.environ["RANK"]``. With ``init_process_group=False`` only the
        environment is set, for functions that start their own Trainer.

        Raises WorkerFailure with the tracebacks of the ranks that raised, or with all stacks after the deadline.
        """
        if not 1 <= world_size <= self._max_workers:
            raise ValueError(f"world_size={world_size} must be between 1 and {self._max_workers}")
        self._start(world_size)
        team = self._workers[:world_size]
        try:
            for environment, worker in zip(rank_environments(world_size), team, strict=True):
                request = Request(function, args, environment, init_process_group, deadline_s)
                worker.connection.send_bytes(pickle.dumps(request))
            answers = _collect(team, deadline_s)
        except BaseException:
            self._kill()
            raise
        errors = {rank: answer.value for rank, answer in answers.items() if not answer.succeeded}
        if errors and not (len(answers) == world_size and all(answer.is_orderly for answer in answers.values())):
            self._kill()
        if errors:
            raise WorkerFailure(f"ranks {sorted(errors)} of {world_size} failed", errors)
        return [answers[rank].value for rank in range(world_size)]

    def close(self) -> None:
        """Let idle workers exit, then kill the others."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(timeout=2.0)
        self._kill()
        self._directory.cleanup()

    def _start(self, count: int) -> None:
        if any(not worker.process.is_alive() for worker in self._workers):
            self._kill()
        for index in range(len(self._workers), count):
            ours, theirs = self._context.Pipe()
            log = Path(self._directory.name) / f"rank{index}.log"
            process = self._context.Process(target=_serve, args=(theirs, log), name=f"worker-{index}")
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours, log))

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.process.is_alive():
                _kill_tree(worker.process)
            worker.process.join()
            worker.connection.close()
        self._workers.clear()


def _collect(team: list[Worker], deadline_s: float) -> dict[int, Answer]:
    """Return the answers of all ranks; a failure shortens the wait for the others to ``GRACE_S``."""
    answers: dict[int, Answer] = {}
    give_up_at = time.monotonic() + deadline_s
    while len(answers) < len(team):
        pending = {worker.connection: rank for rank, worker in enumerate(team) if rank not in answers}
        ready = wait(list(pending), timeout=max(0.0, give_up_at - time.monotonic()))
        has_failed = not all(answer.succeeded for answer in answers.values())
        if not ready and has_failed:
            break
        if not ready:
            raise WorkerFailure(
                f"no answer from ranks {sorted(pending.values())} within {deadline_s:g} s", _stacks(team)
            )
        for connection in ready:
            rank = pending[connection]
            try:
                answers[rank] = pickle.loads(team[rank].connection.recv_bytes())
            except (EOFError, ConnectionError):
                answers[rank] = Answer(False, _obituary(team[rank]), is_orderly=False)
            if not answers[rank].succeeded:
                give_up_at = min(give_up_at, time.monotonic() + GRACE_S)
    return answers


def _stacks(team: list[Worker]) -> dict[int, str]:
    """Return each worker's output so far, followed by its current stacks."""
    for worker in team:
        if worker.process.pid is not None and worker.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGUSR2)
    time.sleep(STACKS_S)
    return {rank: _tail(worker.log, 6000) for rank, worker in enumerate(team)}


def _obituary(worker: Worker) -> str:
    worker.process.join(timeout=GRACE_S)
    return f"the process ended with exit code {worker.process.exitcode}; its last words:\n{_tail(worker.log, 3000)}"


def _tail(log: Path, num_characters: int) -> str:
    return log.read_text(errors="replace")[-num_characters:] if log.exists() else ""


def _kill_tree(process: BaseProcess) -> None:
    """Kill a worker and the processes that it started; each worker leads its own process group."""
    assert process.pid is not None, "only started workers are killed"
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has not called setsid yet
        process.kill()


def rank_environments(world_size: int) -> list[dict[str, str]]:
    """Return the variables that torchrun would set on one node, for every rank."""
    common = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        common["GLOO_SOCKET_IFNAME"] = loopback
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def _free_port() -> int:
    """Return a free port for rank 0 from the share of this pytest-xdist worker."""
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PORT_SHARES
    for port in random.SystemRandom().sample(PORTS[mine::PORT_SHARES], 50):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"none of 50 ports from {PORTS[0]} to {PORTS[-1]} is free")


# --- the worker's side ------------------------------------------------------------------------------------------------


def _serve(connection: Connection, log: Path) -> None:
    """Answer requests until the pool closes the connection; never outlive the process that owns the pool."""
    os.setsid()
    stream = log.open("w", buffering=1)
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    faulthandler.enable(stream)
    gc.freeze()  # collecting imported objects takes half a second at the end of every run
    from tests.dry_runs import leave_logged_values, remember_dry_runs, remember_entry_points, remember_shardings

    remember_dry_runs()
    remember_entry_points()
    remember_shardings()
    leave_logged_values()
    threading.Thread(target=_leave_with_parent, daemon=True, name="leave-with-parent").start()
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        stream.seek(0)
        stream.truncate()
        # Repeated for every run: a Trainer restores the handlers that it believes were set before it.
        faulthandler.unregister(signal.SIGUSR2)
        faulthandler.register(signal.SIGUSR2, file=stream, all_threads=True)
        connection.send_bytes(_answer(message))
        gc.collect()
        gc.freeze()  # also what the run has imported


def _leave_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a worker is always someone's child"
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _answer(message: bytes) -> bytes:
    threads = set(threading.enumerate())
    try:
        request: Request = pickle.loads(message)
        with _process_state(request.environment):
            result = _call(request)
        return pickle.dumps(Answer(True, result))
    except BaseException:  # SystemExit and pytest's outcomes are failures of the rank too
        is_orderly = threads.issuperset(threading.enumerate())
        return pickle.dumps(Answer(False, traceback.format_exc(), is_orderly))


def _call(request: Request) -> Any:
    import torch.distributed as dist

    _end_groups()  # of a run that failed: its other ranks may have waited in them until all had answered
    if request.init_process_group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=request.timeout_s))
    result = request.function(*request.args)
    if dist.is_initialized():
        dist.barrier()
        _end_groups()
    return result


def _end_groups() -> None:
    """Destroy all process groups, and what refers to them: two threads of each would wake 100 times a second.

    A Trainer's groups are in cycles. DTensor's caches keep the meshes of a run, and these its groups.
    """
    import torch.distributed as dist

    from lightning_realloc.strategies.lightning.process_group import end_process_group

    if not dist.is_initialized():
        return
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    end_process_group()


@contextlib.contextmanager
def _process_state(environment: Mapping[str, str]) -> Iterator[None]:
    """Run with this environment, fixed seeds and one thread; restore the process's state afterwards."""
    import numpy
    import torch

    saved, directory = dict(os.environ), Path.cwd()
    os.environ.update(environment)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), _loggers():
            yield
    finally:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(saved)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _loggers() -> Iterator[None]:
    """Give loggers their levels, filters and handlers back: a run may have hidden lines that the next one looks for."""
    loggers = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    saved = [(one, one.level, one.disabled, one.filters[:], one.handlers[:]) for one in (logging.root, *loggers)]
    try:
        yield
    finally:
        for one, level, is_disabled, filters, handlers in saved:
            if one.level != level:  # setLevel empties the caches of all loggers
                one.setLevel(level)
            one.disabled, one.filters[:], one.handlers[:] = is_disabled, filters, handlers
