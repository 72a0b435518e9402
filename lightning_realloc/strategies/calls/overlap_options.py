"""Options of calls that run at the same time, of generation ahead of training, and of chunks of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from lightning_realloc.errors import ConfigError
from lightning_realloc.tuning.timeline.simulator import Overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapOptions:
    """Options of overlapping calls; `ReallocStrategy` documents each.

    Raises:
        ConfigError: for values out of range, and for options that would have no effect together.
    """

    overlap: Overlap = "iterations"
    """Calls that may run on disjoint ranks at the same time: of all iterations, of one, or none."""
    max_staleness: int = 0
    """Training steps by which the generating policy may be older than the one that is trained."""
    generation_chunks: int = 1
    """Chunks in which samples are sent to inference while others are generated."""

    def __post_init__(self) -> None:
        chunks, overlap, staleness = self.generation_chunks, self.overlap, self.max_staleness
        if overlap not in get_args(Overlap):
            raise ConfigError(f"overlap={overlap!r} must be one of {', '.join(get_args(Overlap))}")
        if staleness not in (0, 1):
            raise ConfigError(f"max_staleness={staleness!r}: generation runs at most one step ahead; use 0 or 1")
        if chunks < 1:
            raise ConfigError(f"generation_chunks={chunks} must be at least 1, which sends all samples at the end")
        if chunks > 1 and overlap == "none":
            raise ConfigError(
                f"generation_chunks={chunks} lets inference begin during generation, and overlap='none' runs one call "
                f"at a time; use overlap='calls', or generation_chunks=1"
            )
        if chunks > 1 and staleness:
            raise ConfigError(
                f"generation_chunks={chunks} lets inference begin during generation, and under "
                f"max_staleness={staleness} it reads samples of the iteration before; use max_staleness=0, or "
                f"generation_chunks=1"
            )
