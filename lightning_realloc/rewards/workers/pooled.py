"""A reward function in processes of its own, where what is slow, hangs or crashes costs its sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.failure_rule import FailureRule, OnFailure, Outcome
from lightning_realloc.rewards.signatures import (
    RewardFunction,
    accepted,
    columns_alone,
    function_name,
    required_columns,
    resolved,
)
from lightning_realloc.rewards.workers.worker import prepare_function
from lightning_realloc.rewards.workers.worker_pool import WorkerPool


class PooledReward:
    """Judges with a function in other processes.

    A process that does not answer in time, or ends, is killed with all that it started and replaced. Processes begin
    with the run and end with it.

    Args:
        function: A function at the top of a module, an object of a class there, or the import path of one.
        workers: Processes, on every rank that judges.
        deadline_s: Seconds in which a request must be answered.
        chunk_size: Completions of one request; they fail together.
        on_failure: ``"fail"`` ends the run where a completion could not be judged, ``"mask"`` leaves its sample out.
        give_up_after: Batches in a row of which nothing could be judged, after which ``"mask"`` ends the run.
        start_s: Seconds in which a process must have loaded the function.
    """

    def __init__(
        self,
        function: RewardFunction | str,
        *,
        workers: int = 2,
        deadline_s: float = 30.0,
        chunk_size: int = 1,
        on_failure: OnFailure = "fail",
        give_up_after: int = 3,
        start_s: float = 120.0,
    ) -> None:
        for name, value in {"workers": workers, "chunk_size": chunk_size}.items():
            if value < 1:
                raise RewardError(f"{name}={value} must be at least 1")
        for name, seconds in {"deadline_s": deadline_s, "start_s": start_s}.items():
            if not seconds > 0:
                raise RewardError(f"{name}={seconds} must be above 0")
        self.function = resolved(function)
        self.__name__ = function_name(self.function)
        self.workers = workers
        self.deadline_s = deadline_s
        self.chunk_size = chunk_size
        self.on_failure = on_failure
        self.start_s = start_s
        self._rule = FailureRule(self.__name__, on_failure, give_up_after)
        self._prepared = prepare_function(self.function)
        self._pool: WorkerPool | None = None

    def required_columns(self) -> set[str]:
        """Return the columns that the function asks for."""
        return required_columns(self.function)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that there are now."""
        return self._pool.pids if self._pool is not None else ()

    def start(self) -> None:
        """Start the processes and wait until they are ready.

        Raises:
            RewardError: when one cannot load the function.
        """
        if self._pool is None:
            self._pool = WorkerPool(
                self._prepared, workers=self.workers, deadline_s=self.deadline_s, start_s=self.start_s
            )
        try:
            self._pool.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes, and all that they started."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __call__(
        self,
        /,
        prompts: Sequence[object],
        completions: Sequence[object],
        completion_ids: Sequence[Sequence[int]],
        **columns: Sequence[object],
    ) -> list[Outcome]:
        """Return the outcome of every completion.

        Raises:
            RewardError: for a completion that could not be judged, where that ends the run.
        """
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        given = accepted(self.function, given | columns_alone(columns)) | {
            "prompts": prompts,
            "completions": completions,
        }
        bounds = range(0, len(completions), self.chunk_size)
        requests = [{name: v[b : b + self.chunk_size] for name, v in given.items()} for b in bounds]
        try:
            self.start()
            assert self._pool is not None, "it was just started"
            answers = self._pool.judge(requests, partial(self._rule.refuse, num_completions=len(completions)))
            return self._rule.settle([outcome for answer in answers for outcome in answer])
        except BaseException:  # an interrupt leaves answers behind that nobody waits for
            self.close()
            raise
