"""Which calls take in samples while others are still generated, in which portions, and in which order. Pure arithmetic.

A unit is what one generating rank hands on at once. Its lengths say how it is divided into micro-batches, whatever else
there will be: so whoever knows a unit knows who works on what of it. Source: RLHFuse, arXiv:2409.13221, there called
inter-stage fusion.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_realloc.batch.training import MicroBatch, micro_batch_plan
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.exchange.call_placement import CallPlacement
from lightning_realloc.tuning.timeline.fusion import fused_first, fused_groups, fused_sources, tail_sources
from lightning_realloc.tuning.timeline.simulator import Overlap

UnitShares = tuple[tuple[MicroBatch, ...], ...]
"""Of every data-parallel rank the micro-batches of one unit; positions count from the unit's beginning."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """The fused calls of one iteration: those that begin with what is finished of a generating call."""

    calls: tuple[ModelFunctionCall, ...]
    """In the order in which they run: a fused call comes before computations that would wait for all samples."""
    placements: Mapping[str, CallPlacement]
    num_parts: int
    """In how many portions a generating rank hands on its samples where somebody waits for them."""
    sources: Mapping[str, str]
    """Fused call -> the generating call that it takes samples of."""
    tails: Mapping[str, str]
    """Call on the generating ranks that may begin where nothing is left to generate -> the generating call."""

    @classmethod
    def of(cls, calls: Sequence[ModelFunctionCall], placements: Mapping[str, CallPlacement], num_parts: int) -> Fusion:
        """Return which calls are fused: none with ``num_parts=1``."""
        layouts = {name: place.layout for name, place in placements.items()}
        if num_parts == 1:
            return cls(tuple(calls), placements, num_parts, {}, {})
        sources = fused_sources(calls, {name: layout.ranks for name, layout in layouts.items()})
        ordered = fused_first(calls, sources)
        return cls(ordered, placements, num_parts, sources, tail_sources(ordered, layouts))

    def parts(self, source: ModelFunctionCall) -> int:
        """Return in how many portions each generating rank hands on its samples."""
        return self.num_parts if source.name in self.sources.values() else 1

    def users(self, source: ModelFunctionCall, rank: int) -> list[ModelFunctionCall]:
        """Return the fused calls of a generating call in which ``rank`` takes part."""
        return [
            call
            for call in self.calls
            if self.sources.get(call.name) == source.name and rank in self.placements[call.name].layout
        ]

    def unit_shares(self, call: ModelFunctionCall, lengths: Sequence[int]) -> UnitShares:
        """Return who runs which micro-batches of a unit of samples with these ``lengths`` (tokens), none if empty.

        Repetitions that keep collective passes in step stay in the unit; ranks that need none may have nothing to do.
        """
        place = self.placements[call.name]
        is_sharded = place.layout.dims.fsdp > 1
        plans = micro_batch_plan(
            lengths, place.layout.data_parallel_size, max_tokens=place.micro_batch_tokens, equal_counts=is_sharded
        )
        return tuple(tuple(micro for micro in plan if micro.counts or is_sharded) for plan in plans)

    def worked_on(self, source: ModelFunctionCall, rank: int, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the positions of a unit that ``rank`` works on in any fused call, ascending."""
        positions: set[int] = set()
        for call in self.users(source, rank):
            share = self.unit_shares(call, lengths)[self.placements[call.name].layout.data_parallel_index(rank)]
            positions.update(position for micro in share for position in micro.positions)
        return tuple(sorted(positions))

    def groups(
        self, calls: Sequence[ModelFunctionCall], *, alone: Collection[str] = ()
    ) -> list[tuple[ModelFunctionCall, ...]]:
        """Return some of the calls in groups that are worked on together; see `fused_groups`."""
        return fused_groups(calls, self.sources, alone=alone)


def check_parts(generation_parts: int, *, overlap: Overlap, max_staleness: int) -> None:
    """Raise ConfigError for no portions, and for several that nobody would begin with early."""
    if generation_parts < 1:
        raise ConfigError(
            f"generation_parts={generation_parts} must be at least 1, which hands on all samples at the end"
        )
    if generation_parts > 1 and overlap == "none":
        raise ConfigError(
            f"generation_parts={generation_parts} lets inference begin beside generation, and overlap='none' runs one "
            f"call at a time; use overlap='calls', or generation_parts=1"
        )
    if generation_parts > 1 and max_staleness:
        raise ConfigError(
            f"generation_parts={generation_parts} lets inference begin beside generation, and under "
            f"max_staleness={max_staleness} it reads what was generated an iteration before; use max_staleness=0, or "
            f"generation_parts=1"
        )
