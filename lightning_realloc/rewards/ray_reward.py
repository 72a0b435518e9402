"""Reward from actors or remote functions of a Ray cluster. Ray is imported on use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.failure_rule import GIVE_UP_AFTER, Failed, FailureRule, OnFailure, Outcome
from lightning_realloc.rewards.invoke import validated
from lightning_realloc.rewards.signatures import without_services


class RayReward:
    """Reward that actors or remote functions of a Ray cluster compute, several chunks at a time.

    Args:
        judges: Actor handle, remote function, name of a named actor, or a sequence of these, which take turns.
        method: Method of an actor; it is called with ``prompts``, ``completions`` and the columns.
        name: Name in metrics and messages.
        columns: Columns of the data to send; None sends all.
        chunk_size: Completions per call; they fail together.
        timeout_s: Seconds for all calls of a batch.
        on_failure: ``"fail"`` ends the run if a completion could not be judged, ``"mask"`` leaves its sample out.
        give_up_after: Number of consecutive batches without any result after which ``"mask"`` also ends the run.

    Example:
        >>> reward = RayReward("judge", method="score", columns=["answer"], on_failure="mask")
        >>> reward.required_columns()
        {'answer'}
    """

    def __init__(
        self,
        judges: Any,
        *,
        method: str = "score",
        name: str = "ray",
        columns: Sequence[str] | None = None,
        chunk_size: int = 16,
        timeout_s: float = 60.0,
        on_failure: OnFailure = "fail",
        give_up_after: int = GIVE_UP_AFTER,
    ) -> None:
        given = list(judges) if isinstance(judges, Sequence) and not isinstance(judges, str) else [judges]
        for judge in given:
            if not isinstance(judge, str) and not hasattr(judge, "remote") and not hasattr(judge, method):
                raise RewardError(
                    f"judges: {judge!r} is neither a remote function nor an actor with a method {method!r}; give "
                    f"handles of Ray, or names of named actors"
                )
        if not given:
            raise RewardError("judges is empty; give at least one actor or remote function")
        if chunk_size < 1:
            raise RewardError(f"chunk_size={chunk_size} must be at least 1")
        if not timeout_s > 0:
            raise RewardError(f"timeout_s={timeout_s} must be above 0")
        self.judges = tuple(given)
        self.method = method
        self.__name__ = name
        self.columns = None if columns is None else tuple(columns)
        self.chunk_size = chunk_size
        self.timeout_s = timeout_s
        self.on_failure = on_failure
        self.give_up_after = give_up_after
        self._rule = FailureRule(name, on_failure, give_up_after)

    def required_columns(self) -> set[str]:
        """Return the columns that are sent by name."""
        return set(self.columns or ())

    def start(self) -> None:
        """Connect to the cluster, unless this process is part of it, and look up named actors.

        Raises:
            RewardError: without Ray, a cluster, or an actor of that name.
        """
        self._calls()

    def __call__(
        self, /, prompts: Sequence[object], completions: Sequence[object], **columns: Sequence[object]
    ) -> list[Outcome]:
        """Return the results of B completions.

        Raises:
            RewardError: for a completion that could not be judged, if that ends the run, and for an answer that is no
                list of rewards.
        """
        import ray

        calls = self._calls()
        columns = without_services(columns)
        columns.pop("completion_ids", None)
        sent = columns if self.columns is None else {name: columns[name] for name in self.columns}
        batch = {"prompts": prompts, "completions": completions, **sent}
        chunks = [
            {name: list(values[begin : begin + self.chunk_size]) for name, values in batch.items()}
            for begin in range(0, len(completions), self.chunk_size)
        ]
        give_up_at = time.monotonic() + self.timeout_s
        references = [calls[index % len(calls)](**chunk) for index, chunk in enumerate(chunks)]
        outcomes: list[Outcome] = []
        for reference, chunk in zip(references, chunks, strict=True):
            outcomes += self._result(ray, reference, chunk, give_up_at)
        return self._rule.apply(outcomes)

    def _result(self, ray: Any, reference: Any, chunk: Mapping[str, Any], give_up_at: float) -> list[Outcome]:
        """Return the results of a chunk; failures if the call raised, its actor was lost, or it took too long."""
        try:
            returned = ray.get(reference, timeout=max(0.0, give_up_at - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            ray.cancel(reference, recursive=False)
            problem = f"no answer within timeout_s={self.timeout_s:g} seconds"
        except ray.exceptions.RayTaskError as error:
            problem = f"{type(error.cause).__name__}: {error.cause}"
        except ray.exceptions.RayError as error:
            problem = " ".join(str(error).split())[:300]
        else:
            return validated(self.__name__, returned, chunk)
        return [Failed(f"{self.__name__}: {problem}")] * len(chunk["completions"])

    def _calls(self) -> list[Callable[..., Any]]:
        """Return the functions that start a call, one for each judge."""
        if find_spec("ray") is None:
            raise RewardError("RayReward needs Ray, which is not installed: pip install 'lightning-realloc[ray]'")
        import ray

        if not ray.is_initialized():
            try:
                ray.init(address="auto")
            except ConnectionError:
                raise RewardError(
                    f"{self.__name__}: no Ray cluster was found; start one, set RAY_ADDRESS, or use launcher='ray'"
                ) from None
        return [self._call(judge) for judge in self.judges]

    def _call(self, judge: Any) -> Callable[..., Any]:
        if isinstance(judge, str):
            import ray

            try:
                judge = ray.get_actor(judge)
            except ValueError as error:
                raise RewardError(
                    f"{self.__name__}: Ray has no actor named {judge!r}; create it with "
                    f".options(name={judge!r}) in the run's namespace before fit"
                ) from error
        # Ray 2.40 keeps no reference from a method to its actor: hold the handle while calls are made.
        return lambda **chunk: getattr(judge, self.method, judge).remote(**chunk)


__all__ = ["RayReward"]
