"""Fuse inference with generation: calls that start on chunks of samples while others are still generated. Pure.

A chunk is the samples that one generating rank sends at once. Its lengths alone decide how it is divided into
micro-batches. So every rank that knows a chunk knows which rank works on which part of it.

Source: RLHFuse, arXiv:2409.13221, there called inter-stage fusion.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_realloc.batch.training import MicroBatch, micro_batch_plan
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.strategies.exchange.call_placement import CallPlacement
from lightning_realloc.tuning.timeline.fusion import fused_first, fused_groups, fused_sources, tail_sources

ChunkShares = tuple[tuple[MicroBatch, ...], ...]
"""The micro-batches of one chunk for each data-parallel rank; positions count from the chunk's first sample."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """The calls of one iteration that start before a generating call has finished."""

    calls: tuple[ModelFunctionCall, ...]
    """All calls in running order: a fused call comes before computations that wait for all samples."""
    placements: Mapping[str, CallPlacement]
    """Call -> its placement, for calls with a model."""
    num_chunks: int
    """Chunks in which a generating rank sends its samples, where a fused call waits for them."""
    sources: Mapping[str, str]
    """Fused call on other ranks -> the generating call whose chunks it works on."""
    early_sources: Mapping[str, str]
    """Call on the generating ranks that may start on a rank with nothing left to generate -> the generating call."""

    @classmethod
    def from_calls(
        cls, calls: Sequence[ModelFunctionCall], placements: Mapping[str, CallPlacement], num_chunks: int
    ) -> Fusion:
        """Find the calls that can be fused; there are none with ``num_chunks=1``."""
        if num_chunks == 1:
            return cls(tuple(calls), placements, num_chunks, {}, {})
        layouts = {name: place.layout for name, place in placements.items()}
        sources = fused_sources(calls, {name: layout.ranks for name, layout in layouts.items()})
        ordered = fused_first(calls, sources)
        return cls(ordered, placements, num_chunks, sources, tail_sources(ordered, layouts))

    def num_chunks_of(self, source: ModelFunctionCall) -> int:
        """Return how many chunks each rank of a generating call sends, empty ones included."""
        return self.num_chunks if source.name in self.sources.values() else 1

    def source(self, call: ModelFunctionCall) -> ModelFunctionCall:
        """Return the generating call whose chunks a fused call works on."""
        return next(source for source in self.calls if source.name == self.sources[call.name])

    def users(self, source: ModelFunctionCall, rank: int) -> list[ModelFunctionCall]:
        """Return the fused calls of a generating call in which ``rank`` takes part."""
        return [
            call
            for call in self.calls
            if self.sources.get(call.name) == source.name and rank in self.placements[call.name].layout
        ]

    def chunk_shares(self, call: ModelFunctionCall, lengths: Sequence[int]) -> ChunkShares:
        """Return the micro-batches of a chunk for each data-parallel rank of ``call``; a rank may have none.

        Repetitions that keep collective passes in step stay within the chunk.

        Args:
            call: The fused call.
            lengths: Tokens of each sample in the chunk.
        """
        place = self.placements[call.name]
        is_sharded = place.layout.dims.fsdp > 1
        plans = micro_batch_plan(
            lengths, place.layout.data_parallel_size, max_tokens=place.micro_batch_tokens, equal_counts=is_sharded
        )
        return tuple(tuple(micro for micro in plan if micro.counts or is_sharded) for plan in plans)

    def chunk_positions(self, source: ModelFunctionCall, rank: int, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the positions of a chunk that ``rank`` works on in any fused call, ascending."""
        positions: set[int] = set()
        for call in self.users(source, rank):
            share = self.chunk_shares(call, lengths)[self.placements[call.name].layout.data_parallel_index(rank)]
            positions.update(position for micro in share for position in micro.positions)
        return tuple(sorted(positions))

    def groups(
        self, calls: Sequence[ModelFunctionCall], *, alone: Collection[str] = ()
    ) -> list[tuple[ModelFunctionCall, ...]]:
        """Return ``calls`` in groups that run together; see `fused_groups`."""
        return fused_groups(calls, self.sources, alone=alone)
