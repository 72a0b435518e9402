"""Pool of worker processes with a deadline per request; a late or dead worker is replaced."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.failure_rule import Failed, Outcome
from lightning_realloc.rewards.sandbox.processes import describe_exit, kill_tree
from lightning_realloc.rewards.workers.worker import WorkerError, WorkerReady

Request = Mapping[str, Any]
"""Arguments of the function for C completions."""

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from lightning_realloc.rewards.workers.worker import serve; serve({fd}, {parent})"
)


class Worker:
    """Worker process with at most one request at a time, so that no request waits in its pipe."""

    def __init__(self, function: bytes, *, start_s: float) -> None:
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
        with theirs:
            program = _PROGRAM.format(path=sys.path, fd=theirs.fileno(), parent=os.getpid())
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # Ctrl+C goes to the main process, which ends its workers
            )
        self.connection.send_bytes(function)
        self.is_ready = False
        self.request: int | None = None
        self.deadline = time.monotonic() + start_s

    @property
    def is_idle(self) -> bool:
        """Whether the worker is ready and has no request."""
        return self.is_ready and self.request is None

    def send_request(self, number: int, request: Request, *, deadline_s: float) -> None:
        """Send a request.

        Raises:
            OSError: if the process has ended.
        """
        self.connection.send(dict(request))
        self.request = number
        self.deadline = time.monotonic() + deadline_s

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        kill_tree(self.process.pid)
        self.process.wait()
        self.connection.close()


class WorkerPool:
    """Worker processes with the same reward function.

    They end with :meth:`close`, with the pool object, and with the main process.

    Args:
        function: Serialized function, see :func:`lightning_realloc.rewards.workers.worker.prepare_function`.
        workers: Number of processes.
        deadline_s: Seconds for one request.
        start_s: Seconds for loading the function.
    """

    def __init__(self, function: bytes, *, workers: int, deadline_s: float, start_s: float) -> None:
        self._deadline_s = deadline_s
        self._new_worker: Callable[[], Worker] = lambda: Worker(function, start_s=start_s)
        self._start_s = start_s
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid())
        for _ in range(workers):
            self._workers.append(self._new_worker())

    def close(self) -> None:
        """Kill all workers."""
        self._finalizer()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.process.pid for worker in self._workers)

    def wait_until_ready(self) -> None:
        """Wait until every worker has loaded the function.

        Raises:
            RewardError: if a worker cannot load it.
        """
        while starting := [worker for worker in self._workers if not worker.is_ready]:
            self._receive_answers(starting, {})

    def judge(self, requests: Sequence[Request], check: Callable[[Sequence[Outcome]], None]) -> list[list[Outcome]]:
        """Return the results of every request; a request without an answer fails for all its completions.

        ``check`` sees the results of each request as they arrive. Its exception leaves the other requests unanswered.

        Raises:
            RewardError: if workers cannot load the function.
        """
        answers: dict[int, list[Outcome]] = {}
        counts = [len(request["completions"]) for request in requests]
        pending = deque(range(len(requests)))
        while len(answers) < len(requests):
            for worker in [worker for worker in self._workers if worker.is_idle][: len(pending)]:
                try:
                    worker.send_request(pending[0], requests[pending[0]], deadline_s=self._deadline_s)
                    pending.popleft()
                except OSError:  # it ended while idle
                    self._replace(worker)
            received: dict[int, list[Outcome] | Failed] = {}
            self._receive_answers([worker for worker in self._workers if not worker.is_idle], received)
            for number, answer in received.items():
                answers[number] = [answer] * counts[number] if isinstance(answer, Failed) else answer
                check(answers[number])
        return [answers[number] for number in range(len(requests))]

    def _receive_answers(self, workers: Sequence[Worker], answers: dict[int, list[Outcome] | Failed]) -> None:
        """Wait for the next answers or the next deadline."""
        left = min(worker.deadline for worker in workers) - time.monotonic() if workers else 0.0
        readable = wait([worker.connection for worker in workers], timeout=max(0.0, left))
        now = time.monotonic()
        for worker in workers:
            if worker.connection in readable:
                self._receive_answer(worker, answers)
            elif now >= worker.deadline:
                self._require_started(worker, f"it has not begun to work within start_s={self._start_s:g} seconds")
                self._fail_request(worker, answers, f"no answer within deadline_s={self._deadline_s:g} seconds")

    def _receive_answer(self, worker: Worker, answers: dict[int, list[Outcome] | Failed]) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            worker.kill()
            ending = describe_exit(worker.process.returncode)
            self._require_started(worker, f"it ended with {ending}")
            self._fail_request(worker, answers, f"its process ended with {ending}")
            return
        match message:
            case WorkerReady():
                worker.is_ready = True
            case WorkerError(reason):
                self._require_started(worker, reason)
                answers[_number(worker)] = Failed(reason)
            case _:
                answers[_number(worker)] = message
        worker.request = None

    def _require_started(self, worker: Worker, reason: str) -> None:
        if not worker.is_ready:
            raise RewardError(
                f"a worker process could not load its reward function: {reason}; it must be importable there, "
                f"without running a script, whose work belongs below `if __name__ == '__main__':`"
            )

    def _fail_request(self, worker: Worker, answers: dict[int, list[Outcome] | Failed], reason: str) -> None:
        if worker.request is not None:
            answers[worker.request] = Failed(reason)
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = self._new_worker()


def _number(worker: Worker) -> int:
    assert worker.request is not None, "a worker sends an answer only after a request"
    return worker.request


def _kill_all(workers: list[Worker], owner: int) -> None:
    if os.getpid() != owner:  # a forked copy does not own the workers
        return
    while workers:
        with contextlib.suppress(OSError):
            workers.pop().kill()
