"""What do shards and replicas add to a measured pass, and how do measured passes become surfaces? Arithmetic alone.

A reading is the seconds of one pass at one size, split into one block's part and the rest's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_realloc.layout.dims import ParallelDims
from lightning_realloc.tuning.estimate.profile import Curve, PassKind, PassTimes, Surface


class Size(NamedTuple):
    """A micro-batch of equal sequences."""

    sequences: int
    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.sequences * (self.prompt + self.response)


TINY, TINY_STEP = Size(1, 8, 8), Size(1, 8, 0)
"""A pass, and a decoding step, that compute next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where passes are measured."""

    micro_batches: tuple[Size, ...]
    decoding: tuple[Size, ...] = ()
    """Decoding steps of sequences with prompts as long as their context."""
    probe: Size = TINY
    """The pass with which it is measured what shards and replicas add. One that computes next to nothing shows it best;
    where communication hides behind computing it has to be a usual one."""
    probe_step: Size = TINY_STEP
    """The same of decoding."""


class Point(NamedTuple):
    """One pass to be timed."""

    kind: PassKind
    size: Size


Readings = dict[Point, tuple[float, float]]
"""Seconds of a block, and of the rest."""


def without_tp(dims: ParallelDims) -> ParallelDims:
    """Return the degrees of replicas and of shards alone."""
    return replace(dims, tp=1)


def without_reduction(kind: PassKind) -> PassKind:
    """Return the kind of pass that does the same but for reducing gradients."""
    return "train" if kind == "train_last" else kind


def split(shallow: int, few_s: float, deep: int, many_s: float) -> tuple[float, float]:
    """Return the seconds of a block and of the rest, from passes through two numbers of blocks."""
    block = max(0.0, many_s - few_s) / (deep - shallow)
    return block, max(0.0, few_s - shallow * block)


def put_on_top(
    base: Readings, dims: ParallelDims, added: Readings, crowding: Mapping[int, Curve], outside: float
) -> Readings:
    """Return the base's passes on more crowded ranks, with what replicas and shards add.

    Under ``tp`` each rank sends a part of the weights. ``outside`` is how many more elements than the measured model's
    travel outside of blocks.
    """
    factor = crowding[dims.tp](dims.size)
    share = crowding[1](dims.size) / crowding[1](without_tp(dims).size) / dims.tp
    readings: dict[Point, tuple[float, float]] = {}
    for (kind, size), (block, rest) in base.items():
        if kind != "train" and dims.dp > 1:
            continue  # replicas do not meet: what is read for one of them holds
        for one in (kind, "train_last") if kind == "train" else (kind,):
            more_block, more_rest = _addition_of(added, one)
            readings[Point(one, size)] = (
                factor * block + share * more_block,
                factor * rest + outside * share * more_rest,
            )
    return readings


def _addition_of(additions: Readings, kind: str) -> tuple[float, float]:
    return next((times for point, times in additions.items() if point.kind == kind), (0.0, 0.0))


def surfaces(readings: Readings, grid: Grid) -> dict[PassKind, PassTimes]:
    """Return the readings of the grid as surfaces, by kind of pass."""
    samples: dict[PassKind, list[tuple[float, float, float, float]]] = {}
    for (kind, size), (block, rest) in readings.items():
        if size in (grid.decoding if kind == "decode" else grid.micro_batches):
            sizes = (size.sequences, size.prompt) if kind == "decode" else (size.tokens, size.prompt + size.response)
            samples.setdefault(kind, []).append((*map(float, sizes), block, rest))  # type: ignore[arg-type]
    return {
        kind: PassTimes(
            Surface.through((first, second, block) for first, second, block, _ in points),
            Surface.through((first, second, rest) for first, second, _, rest in points),
        )
        for kind, points in samples.items()
    }
