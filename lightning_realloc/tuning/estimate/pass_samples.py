"""Turn timed passes into the surfaces of a profile, with the time that shards and replicas add. Pure arithmetic.

A timing is the seconds of one pass at one size, split into the seconds of one block and of the rest of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_realloc.layout.dims import ParallelDims
from lightning_realloc.tuning.estimate.profile import Curve, PassKind, PassTimes, Surface


class Size(NamedTuple):
    """Size of a micro-batch of equal sequences."""

    sequences: int
    """Number of sequences."""
    prompt: int
    """Tokens of each prompt."""
    response: int
    """Tokens of each response."""

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * (self.prompt + self.response)


TINY, TINY_STEP = Size(1, 8, 8), Size(1, 8, 0)
"""Sizes of a pass and of a decoding step with almost no computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes at which passes are measured."""

    micro_batches: tuple[Size, ...]
    """Sizes of forward and training passes."""
    decoding: tuple[Size, ...] = ()
    """Sizes of decoding steps; the prompt is the context length."""
    probe: Size = TINY
    """Size of the pass that measures the time added by shards and replicas. A tiny pass shows it best; where
    communication overlaps with computation, it must be a usual size."""
    probe_step: Size = TINY_STEP
    """Size of the decoding step that measures the time added by shards and replicas."""


class Point(NamedTuple):
    """A pass to time: its kind and its size."""

    kind: PassKind
    size: Size


PassTimings = dict[Point, tuple[float, float]]
"""Pass -> seconds of one block, and seconds of the rest of the model."""


def without_tp(dims: ParallelDims) -> ParallelDims:
    """Return the degrees with tp=1."""
    return replace(dims, tp=1)


def without_reduction(kind: PassKind) -> PassKind:
    """Return the kind of the same pass without the reduction of gradients."""
    return "train" if kind == "train_last" else kind


def split_block_from_rest(shallow: int, few_s: float, deep: int, many_s: float) -> tuple[float, float]:
    """Return the seconds of one block and of the rest, from the seconds of a shallow and of a deep model.

    Args:
        shallow: Blocks of the shallow model.
        few_s: Seconds of a pass through it.
        deep: Blocks of the deep model.
        many_s: Seconds of a pass through it.
    """
    block = max(0.0, many_s - few_s) / (deep - shallow)
    return block, max(0.0, few_s - shallow * block)


def add_sharding_seconds(
    base: PassTimings, dims: ParallelDims, added: PassTimings, crowding: Mapping[int, Curve], outside: float
) -> PassTimings:
    """Return timings under ``dims``: those of ``base`` on busier nodes, plus the time that replicas and shards add.

    Args:
        base: Timings with tp only.
        added: Seconds that replicas and shards add to a pass; with tp each rank sends a part of the weights.
        crowding: See `ProfileTable`.
        outside: Elements outside of blocks, relative to those of the measured model.
    """
    factor = crowding[dims.tp](dims.size)
    share = crowding[1](dims.size) / crowding[1](without_tp(dims).size) / dims.tp
    timings: PassTimings = {}
    for (kind, size), (block, rest) in base.items():
        if kind != "train" and dims.dp > 1:
            continue  # replicas do not communicate, so that the timings of one of them hold
        for one in (kind, "train_last") if kind == "train" else (kind,):
            more_block, more_rest = _added_seconds(added, one)
            timings[Point(one, size)] = (
                factor * block + share * more_block,
                factor * rest + outside * share * more_rest,
            )
    return timings


def _added_seconds(additions: PassTimings, kind: str) -> tuple[float, float]:
    return next((times for point, times in additions.items() if point.kind == kind), (0.0, 0.0))


def surfaces(timings: PassTimings, grid: Grid) -> dict[PassKind, PassTimes]:
    """Fit surfaces to the timings at the sizes of a grid, by kind of pass."""
    samples: dict[PassKind, list[tuple[float, float, float, float]]] = {}
    for (kind, size), (block, rest) in timings.items():
        if size in (grid.decoding if kind == "decode" else grid.micro_batches):
            first, second = size.tokens, size.prompt + size.response
            if kind == "decode":
                first, second = size.sequences, size.prompt
            samples.setdefault(kind, []).append((first, second, block, rest))
    return {
        kind: PassTimes(
            Surface.from_samples((first, second, block) for first, second, block, _ in points),
            Surface.from_samples((first, second, rest) for first, second, _, rest in points),
        )
        for kind, points in samples.items()
    }
