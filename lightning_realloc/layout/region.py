"""Half-open boxes of global tensor indices, and their intersections.

Every layout builds on this interval algebra. Which rank holds which region is in ``sharding``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_realloc.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Region:
    """A half-open box of global indices, one interval for each tensor dim."""

    starts: tuple[int, ...]
    """First index along every dim."""
    stops: tuple[int, ...]
    """One past the last index, along every dim."""

    def __post_init__(self) -> None:
        ordered = all(0 <= start <= stop for start, stop in zip(self.starts, self.stops, strict=False))
        if len(self.starts) != len(self.stops) or not ordered:
            raise LayoutError(
                f"a region needs 0 <= start <= stop along every dim, got starts={self.starts}, stops={self.stops}; "
                "use equal starts and stops for an empty one"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region of a whole tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along every dim."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the region of a scalar."""
        return math.prod(self.shape)

    def intersect(self, other: Region) -> Region | None:
        """Return the common region, or None when it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Region(starts, stops)

    def contains(self, other: Region) -> bool:
        """Return whether every element of ``other`` is in this region; every region contains an empty one."""
        return other.numel == 0 or self.intersect(other) == other


def tiles(regions: Iterable[Region], shape: Sequence[int]) -> bool:
    """Return whether ``regions`` cover every element of a tensor of ``shape`` once; empty regions are ignored."""
    whole = Region.whole(shape)
    present = sorted((region for region in regions if region.numel), key=lambda region: region.starts)
    if any(not whole.contains(region) for region in present) or sum(region.numel for region in present) != whole.numel:
        return False
    active: list[Region] = []
    for region in present:  # a sweep along dim 0: only regions that extend beyond this one's start can overlap it
        active = [other for other in active if not region.starts or other.stops[0] > region.starts[0]]
        if any(other.intersect(region) is not None for other in active):
            return False
        active.append(region)
    return True
