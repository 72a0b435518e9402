"""Processes that answer requests, each within a deadline; one that does not is killed, and another takes its place."""

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
from lightning_realloc.rewards.sandbox.processes import died_of, kill_tree
from lightning_realloc.rewards.workers.worker import Broken, Ready

Request = Mapping[str, Any]
"""Arguments of the function: C completions and what belongs to them."""

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from lightning_realloc.rewards.workers.worker import main; main({fd}, {parent})"
)


class Worker:
    """One process, with at most one request at a time, so nothing piles up before it."""

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
                start_new_session=True,  # Ctrl+C is for the run, which ends its workers
            )
        self.connection.send_bytes(function)
        self.is_ready = False
        self.request: int | None = None
        self.give_up_at = time.monotonic() + start_s

    @property
    def is_idle(self) -> bool:
        """Whether it can be asked."""
        return self.is_ready and self.request is None

    def ask(self, number: int, request: Request, *, deadline_s: float) -> None:
        """Send a request.

        Raises:
            OSError: when the process has ended.
        """
        self.connection.send(dict(request))
        self.request = number
        self.give_up_at = time.monotonic() + deadline_s

    def end(self) -> None:
        """Kill the process and all that it started."""
        kill_tree(self.process.pid)
        self.process.wait()
        self.connection.close()


class WorkerPool:
    """Workers that judge with the same function.

    They end with :meth:`close`, when the pool is no longer used, and with the process.

    Args:
        function: See :func:`lightning_realloc.rewards.workers.worker.prepare_function`.
        workers: Processes.
        deadline_s: Seconds that a request may take.
        start_s: Seconds that loading the function may take.
    """

    def __init__(self, function: bytes, *, workers: int, deadline_s: float, start_s: float) -> None:
        self._deadline_s = deadline_s
        self._new_worker: Callable[[], Worker] = lambda: Worker(function, start_s=start_s)
        self._start_s = start_s
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, _end_all, self._workers, os.getpid())
        for _ in range(workers):
            self._workers.append(self._new_worker())

    def close(self) -> None:
        """End all workers."""
        self._finalizer()

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return tuple(worker.process.pid for worker in self._workers)

    def wait_until_ready(self) -> None:
        """Wait until the function is loaded by every worker.

        Raises:
            RewardError: when it cannot be.
        """
        while starting := [worker for worker in self._workers if not worker.is_ready]:
            self._take_answers(starting, {})

    def judge(self, requests: Sequence[Request], check: Callable[[Sequence[Outcome]], None]) -> list[list[Outcome]]:
        """Return the outcomes of every request; all of one's are failures where its worker gave none.

        ``check`` sees each request's outcomes as they come; what it raises leaves the others unanswered.

        Raises:
            RewardError: when workers cannot load the function.
        """
        answers: dict[int, list[Outcome]] = {}
        counts = [len(request["completions"]) for request in requests]
        ahead = deque(range(len(requests)))
        while len(answers) < len(requests):
            for worker in [worker for worker in self._workers if worker.is_idle][: len(ahead)]:
                try:
                    worker.ask(ahead[0], requests[ahead[0]], deadline_s=self._deadline_s)
                    ahead.popleft()
                except OSError:  # it ended while it had nothing to do
                    self._replace(worker)
            taken: dict[int, list[Outcome] | Failed] = {}
            self._take_answers([worker for worker in self._workers if not worker.is_idle], taken)
            for number, said in taken.items():
                answers[number] = [said] * counts[number] if isinstance(said, Failed) else said
                check(answers[number])
        return [answers[number] for number in range(len(requests))]

    def _take_answers(self, workers: Sequence[Worker], answers: dict[int, list[Outcome] | Failed]) -> None:
        """Wait for the next answers or the next deadline."""
        left = min(worker.give_up_at for worker in workers) - time.monotonic() if workers else 0.0
        spoke = wait([worker.connection for worker in workers], timeout=max(0.0, left))
        now = time.monotonic()
        for worker in workers:
            if worker.connection in spoke:
                self._take_answer(worker, answers)
            elif now >= worker.give_up_at:
                self._require_started(worker, f"it has not begun to work within start_s={self._start_s:g} seconds")
                self._lose(worker, answers, f"no answer within deadline_s={self._deadline_s:g} seconds")

    def _take_answer(self, worker: Worker, answers: dict[int, list[Outcome] | Failed]) -> None:
        try:
            said = worker.connection.recv()
        except (EOFError, OSError):
            worker.end()
            ending = died_of(worker.process.returncode)
            self._require_started(worker, f"it ended with {ending}")
            self._lose(worker, answers, f"its process ended with {ending}")
            return
        match said:
            case Ready():
                worker.is_ready = True
            case Broken(reason):
                self._require_started(worker, reason)
                answers[_number(worker)] = Failed(reason)
            case _:
                answers[_number(worker)] = said
        worker.request = None

    def _require_started(self, worker: Worker, reason: str) -> None:
        if not worker.is_ready:
            raise RewardError(
                f"a process that judges could not load its reward function: {reason}; it must be importable there, "
                f"without the work of a script, which belongs below `if __name__ == '__main__':`"
            )

    def _lose(self, worker: Worker, answers: dict[int, list[Outcome] | Failed], reason: str) -> None:
        if worker.request is not None:
            answers[worker.request] = Failed(reason)
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = self._new_worker()


def _number(worker: Worker) -> int:
    assert worker.request is not None, "a worker speaks when it is asked"
    return worker.request


def _end_all(workers: list[Worker], owner: int) -> None:
    if os.getpid() != owner:  # a copy by fork: they are not its own
        return
    while workers:
        with contextlib.suppress(OSError):
            workers.pop().end()
