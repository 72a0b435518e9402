"""Which calls may run at the same time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.tuning.timeline.iteration_schedule import Overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapOptions:
    """Options of overlapping calls; `ReallocStrategy` documents each.

    Raises:
        ConfigError: for values out of range, and for options that would have no effect together.
    """

    overlap: Overlap = "iterations"
    max_staleness: int = 0
    replay_versions: str | Path | None = None
    generation_chunks: int = 1

    @property
    def pushes_weights(self) -> bool:
        """Whether trained weights travel in the background to ranks that only generate."""
        return self.max_staleness > 1 and self.overlap == "iterations"

    def __post_init__(self) -> None:
        chunks, overlap, staleness = self.generation_chunks, self.overlap, self.max_staleness
        require_choice("overlap", overlap, get_args(Overlap))
        if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
            raise ConfigError(
                f"max_staleness={staleness!r} must be a whole number of training steps, 0 or more; 0 generates with "
                f"the weights as they are, k up to k steps ahead"
            )
        if not isinstance(self.replay_versions, str | Path | None) or self.replay_versions == "":
            raise ConfigError(f"replay_versions={self.replay_versions!r} must be the folder weight_versions of a run")
        if self.replay_versions is not None and not self.pushes_weights:
            raise ConfigError(
                f"replay_versions repeats when weights arrived during generation, and with max_staleness={staleness} "
                f"and overlap={overlap!r} they arrive between calls; use max_staleness of 2 or more and "
                f"overlap='iterations', or leave replay_versions out"
            )
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
