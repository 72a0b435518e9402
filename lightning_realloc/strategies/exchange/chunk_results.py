"""What a call made of samples, portion by portion, and when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_realloc.batch.samples import Samples


@dataclass(slots=True)
class ChunkResults:
    """What one rank did of a call before all samples were generated."""

    parts: list[Samples] = field(default_factory=list)
    """What it made of each portion, where it counts."""
    times: list[tuple[float, float]] = field(default_factory=list)
    """When it worked on each, by ``time.perf_counter()``."""

    @property
    def made(self) -> Samples | None:
        """All that it made; None where other ranks have it."""
        return Samples.concatenate(self.parts) if self.parts else None

    @property
    def seconds(self) -> float:
        """How long it worked."""
        return self.seconds_before(math.inf)

    def seconds_before(self, moment: float) -> float:
        """Return how long it had worked by then."""
        return sum((max(0.0, min(end, moment) - begin) for begin, end in self.times), start=0.0)
