"""What a rank does once it has nothing left to generate while others have: other calls, on its own finished samples.

Whether a rank is freed for that is decided where samples move between ranks (`generation.migration`), by how long it
would take. That is learnt here, from what these calls took before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import MicroBatch
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.generation import Completion
from lightning_realloc.generation.loop.streaming import PartialResults
from lightning_realloc.strategies.calls.infer_call import InferCalls
from lightning_realloc.strategies.exchange.chunk_results import ChunkResults
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.partial_samples import check_unchanged
from lightning_realloc.strategies.exchange.sample_table import Chosen
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.replica import Replica

_RATE = 0.5


class TokenPace:
    """Seconds per token of calls, of which the latest count most."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def take(self, call: str, *, num_tokens: int, seconds: float) -> None:
        """Take what some of a call took."""
        if num_tokens:
            latest = seconds / num_tokens
            self._seconds[call] = self._seconds.get(call, latest) * (1 - _RATE) + latest * _RATE

    def seconds(self, call: str, num_tokens: int) -> float:
        """Return what so many tokens are expected to take, 0 where nothing is known of the call."""
        return self._seconds.get(call, 0.0) * num_tokens


@dataclass(slots=True)
class EarlyCall:
    """One call that waits, as far as this rank is concerned."""

    call: ModelFunctionCall
    replica: Replica
    max_tokens: int
    """Of one forward pass."""
    work: ChunkResults = field(default_factory=ChunkResults)
    done: set[int] = field(default_factory=set)
    """Ids of samples that it has worked on."""

    def todo(self, finished: Sequence[Completion]) -> list[Completion]:
        """Return what it has not worked on yet; what fits no pass is left to the call itself, which refuses it."""
        return [c for c in finished if c.sample_id not in self.done and _num_tokens(c) <= self.max_tokens]


class EarlyResults:
    """Works on what is finished here, one forward pass at a time: `generation.migration.WaitingCalls`.

    Args:
        calls: Those that may begin early, in their order.
        partial_results: Where finished samples come out.
        inference: Runs them.
        pace: Learns what they take.
        num_parts: In how many portions, about, each call goes through what is finished.
    """

    def __init__(
        self,
        calls: Sequence[EarlyCall],
        partial_results: PartialResults,
        inference: InferCalls,
        pace: TokenPace,
        *,
        num_parts: int,
    ) -> None:
        self._calls, self._outlet, self._inference, self._pace = calls, partial_results, inference, pace
        self._num_parts = num_parts
        self._rows: list[Samples] = []

    def seconds(self) -> float:
        """Return how long the calls will take on what is finished here, 0 until they have been measured."""
        todo = {tail.call.name: tail.todo(self._outlet.finished) for tail in self._calls}
        return sum(self._pace.seconds(name, sum(map(_num_tokens, left))) for name, left in todo.items())

    def work(self) -> bool:
        """Make one forward pass; return whether there was anything to do."""
        for tail in self._calls:
            todo = sorted(tail.todo(self._outlet.finished), key=lambda c: c.sample_id)  # those of a prompt together
            if todo:
                part = ceil(sum(map(_num_tokens, self._outlet.finished)) / self._num_parts)
                self._pass(tail, todo[: _first_pack(list(map(_num_tokens, todo)), min(part, tail.max_tokens))])
                return True
        return False

    def _pass(self, tail: EarlyCall, chosen: Sequence[Completion]) -> None:
        rows, positions = self._outlet.rows(chosen), tuple(range(len(chosen)))
        begin = time.perf_counter()
        made = self._inference.share(tail.call, tail.replica, Chosen(rows, positions), [MicroBatch(positions, True)])
        end = time.perf_counter()
        assert made is not None, "a whole model gives every sample its values"
        self._pace.take(tail.call.name, num_tokens=sum(map(_num_tokens, chosen)), seconds=end - begin)
        tail.work.parts.append(made)
        tail.work.times.append((begin, end))
        tail.done.update(c.sample_id for c in chosen)
        self._rows.append(rows)

    def hand_in(self, source: ModelFunctionCall, made: Samples) -> Mapping[str, ChunkResults]:
        """Return what was done, by call.

        Raises:
            PlanError: where the generating call made other samples than those that were worked on.
        """
        for rows in self._rows:
            check_unchanged(source, made, rows)
        return {tail.call.name: tail.work for tail in self._calls}


class EarlyCalls:
    """Finds what the ranks of a generating call may be freed for.

    Args:
        pool: The models.
        inference: Runs micro-batches through them.
    """

    def __init__(self, pool: ModelPool, inference: InferCalls) -> None:
        self._pool, self._inference = pool, inference
        self.pace = TokenPace()

    def of(
        self, source: ModelFunctionCall, data: IterationData, partial_results: PartialResults
    ) -> EarlyResults | None:
        """Return what this rank may do of other calls while ``source`` is under way; None for nothing."""
        fusion, found = data.routes.fusion, []
        for call in fusion.calls:
            if fusion.tails.get(call.name) == source.name:
                place, replica = fusion.placements[call.name], self._pool.ready(call.name)
                if replica is not None and replica.layout == place.layout:
                    found.append(EarlyCall(call, replica, place.micro_batch_tokens))
        return (
            EarlyResults(found, partial_results, self._inference, self.pace, num_parts=fusion.num_parts)
            if found
            else None
        )


def _num_tokens(completion: Completion) -> int:
    return len(completion.prompt) + len(completion.token_ids)


def _first_pack(lengths: Sequence[int], max_tokens: int) -> int:
    """Return how many samples, in this order, one pass takes: at least one."""
    total = 0
    for count, length in enumerate(lengths):
        total += length
        if count and total > max_tokens:
            return count
    return len(lengths)
