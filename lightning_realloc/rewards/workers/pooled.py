"""Reward function in worker processes: a slow, hanging or crashing call affects its own samples only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.failure_rule import GIVE_UP_AFTER, FailureRule, OnFailure, Outcome
from lightning_realloc.rewards.named import reward_function
from lightning_realloc.rewards.signatures import (
    RewardFunction,
    accepted,
    function_name,
    mentioned,
    required_columns,
    without_services,
)
from lightning_realloc.rewards.workers.worker import prepare_function
from lightning_realloc.rewards.workers.worker_pool import WorkerPool


class PooledReward:
    """Reward function that runs in worker processes.

    A process that misses its deadline or ends is killed with all its descendants, and replaced. Processes start and end
    with the run.

    Args:
        function: A module-level function, an instance of a module-level class, or the import path of one.
        workers: Number of processes, on every rank that computes rewards.
        deadline_s: Seconds for one request.
        chunk_size: Completions per request; they fail together.
        on_failure: ``"fail"`` ends the run if a completion could not be judged, ``"mask"`` leaves its sample out.
        give_up_after: Number of consecutive batches without any result after which ``"mask"`` also ends the run.
        start_s: Seconds for a process to load the function.

    Example:
        >>> from lightning_realloc.rewards import exact_match
        >>> reward = PooledReward(exact_match, workers=1, on_failure="mask")
        >>> reward(prompts=["2 + 2 ="], completions=["4"], completion_ids=[[19]], answer=["4"])
        [1.0]
        >>> reward.close()
    """

    def __init__(
        self,
        function: RewardFunction | str,
        *,
        workers: int = 2,
        deadline_s: float = 30.0,
        chunk_size: int = 1,
        on_failure: OnFailure = "fail",
        give_up_after: int = GIVE_UP_AFTER,
        start_s: float = 120.0,
    ) -> None:
        for name, value in {"workers": workers, "chunk_size": chunk_size}.items():
            if value < 1:
                raise RewardError(f"{name}={value} must be at least 1")
        for name, seconds in {"deadline_s": deadline_s, "start_s": start_s}.items():
            if not seconds > 0:
                raise RewardError(f"{name}={seconds} must be above 0")
        self.function = reward_function(function)
        self.__name__ = function_name(self.function)
        self.workers = workers
        self.deadline_s = deadline_s
        self.chunk_size = chunk_size
        self.on_failure = on_failure
        self.give_up_after = give_up_after
        self.start_s = start_s
        self._rule = FailureRule(self.__name__, on_failure, give_up_after)
        self._prepared = prepare_function(self.function)
        self._pool: WorkerPool | None = None

    def required_columns(self) -> set[str]:
        """Return the columns that the function requires."""
        return required_columns(self.function)

    def mentioned(self, texts: Collection[str]) -> list[str]:
        """Return those of ``texts`` that the function looks for."""
        return mentioned(self.function, texts)

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the current processes."""
        return self._pool.pids if self._pool is not None else ()

    def start(self) -> None:
        """Start the processes and wait until they are ready.

        Raises:
            RewardError: if one cannot load the function.
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
        """Kill the processes and all their descendants."""
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
        """Return the results of B completions.

        Raises:
            RewardError: for a completion that could not be judged, if that ends the run.
        """
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        given = accepted(self.function, given | without_services(columns)) | {
            "prompts": prompts,
            "completions": completions,
        }
        bounds = range(0, len(completions), self.chunk_size)
        requests = [{name: v[b : b + self.chunk_size] for name, v in given.items()} for b in bounds]
        try:
            self.start()
            assert self._pool is not None, "it was just started"
            answers = self._pool.judge(requests, partial(self._rule.raise_on_failure, num_completions=len(completions)))
            return self._rule.apply([outcome for answer in answers for outcome in answer])
        except BaseException:  # after an interrupt, pending answers would be read by the next batch
            self.close()
            raise
