"""Start inference on a rank that has nothing left to generate, on its own finished samples, while others generate.

`generation.rebalance` calls it where samples may move between ranks and this rank has none left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import MicroBatch
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.generation import Completion
from lightning_realloc.generation.loop.streaming import PartialResults
from lightning_realloc.strategies.calls.infer_call import InferCalls
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.sample_table import ChunkResults, PositionedRows, check_unchanged
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.replica import Replica


@dataclass(slots=True)
class EarlyCall:
    """One call that may start early, on this rank."""

    call: ModelFunctionCall
    replica: Replica
    max_tokens: int
    """Most tokens of one forward pass."""
    results: ChunkResults = field(default_factory=ChunkResults)
    done: set[int] = field(default_factory=set)
    """Ids of samples that have results."""

    def todo(self, finished: Sequence[Completion]) -> list[Completion]:
        """Return finished samples without results. One that fits no pass is left to the call, which refuses it."""
        return [c for c in finished if c.sample_id not in self.done and _num_tokens(c) <= self.max_tokens]


class EarlyInference:
    """Works on finished samples, one forward pass at a time: a `generation.rebalance.protocol.WaitingCalls`.

    Args:
        calls: Calls that may start early, in running order.
        partial_results: The finished samples.
        inference: Runs the calls.
        num_chunks: About the number of passes in which a call works on the samples that are finished.
    """

    def __init__(
        self, calls: Sequence[EarlyCall], partial_results: PartialResults, inference: InferCalls, *, num_chunks: int
    ) -> None:
        self._calls, self._partial_results, self._inference = calls, partial_results, inference
        self._num_chunks = num_chunks
        self._rows: list[Samples] = []

    @classmethod
    def from_fusion(
        cls, source: ModelFunctionCall, data: IterationData, pool: ModelPool, inference: InferCalls,
        partial_results: PartialResults,
    ) -> EarlyInference | None:  # fmt: skip
        """Return the calls that may start while ``source`` generates; None if there are none on this rank."""
        fusion, calls = data.routes.fusion, []
        for call in fusion.calls:
            if fusion.early_sources.get(call.name) == source.name:
                place, replica = fusion.placements[call.name], pool.ready(call.name)
                if replica is not None and replica.layout == place.layout:
                    calls.append(EarlyCall(call, replica, place.micro_batch_tokens))
        return cls(calls, partial_results, inference, num_chunks=fusion.num_chunks) if calls else None

    def work(self) -> bool:
        """Make one forward pass; return whether there was anything to do."""
        finished = self._partial_results.finished
        for early in self._calls:
            todo = sorted(early.todo(finished), key=lambda c: c.sample_id)  # samples of a prompt next to each other
            if todo:
                chunk_tokens = ceil(sum(map(_num_tokens, finished)) / self._num_chunks)
                count = _first_pack(list(map(_num_tokens, todo)), min(chunk_tokens, early.max_tokens))
                self._run_pass(early, todo[:count])
                return True
        return False

    def _run_pass(self, early: EarlyCall, chosen: Sequence[Completion]) -> None:
        rows, positions = self._partial_results.rows(chosen), tuple(range(len(chosen)))
        micro_batches = [MicroBatch(positions, True)]
        self._inference.run_timed(
            early.call, early.replica, PositionedRows(rows, positions), micro_batches, early.results
        )
        assert len(early.results.chunks) == len(early.results.times), "a whole model gives every sample its values"
        early.done.update(c.sample_id for c in chosen)
        self._rows.append(rows)

    def results(self, source: ModelFunctionCall, made: Samples) -> Mapping[str, ChunkResults]:
        """Return the results by call.

        Raises:
            PlanError: for a generating call that returned other samples than those that were worked on.
        """
        for rows in self._rows:
            check_unchanged(source, made, rows)
        return {early.call.name: early.results for early in self._calls}


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
