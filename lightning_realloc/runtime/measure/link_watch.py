"""Decide when the links between nodes should be measured again, and which have become slow. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median

from lightning_realloc.runtime.measure.link_table import FAR_RATIO, LinkTable, few_of

MIN_USUAL = 4
"""Iterations whose seconds make the usual ones."""
MAX_USUAL = 20
"""Latest usual iterations that count. Raising it adapts more slowly to longer responses."""
SLOW_RATIO = 2.0
"""Seconds over the usual ones from which on an iteration is slow, as a link with half of its bandwidth makes it."""
MIN_LOST_S = 0.05
"""Least seconds above the usual ones of a slow iteration. Raising it hides changes of short moves."""
PATIENCE = 3
"""Slow iterations in a row after which links are measured."""
MAX_MEASUREMENTS = 3
"""Most measurements in a run; each takes seconds of all ranks, and slowness may have other causes."""
WATCHED = ("reallocation_s/", "seconds/")
"""Prefixes of the metrics that are watched: moves of weights, and calls. They are the same on all ranks."""


class LinkWatch:
    """Compares each iteration's moves and calls with earlier ones under the same plan."""

    def __init__(self) -> None:
        self.num_measurements = 0
        """How often links should have been measured so far."""
        self._usual: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_USUAL))
        self._num_slow: defaultdict[str, int] = defaultdict(int)

    def restart(self) -> None:
        """Forget the seconds of the plan before."""
        self._usual.clear()
        self._num_slow.clear()

    def record(self, metrics: Mapping[str, float]) -> bool:
        """Record an iteration's metrics; return whether links should be measured again."""
        if self.num_measurements == MAX_MEASUREMENTS:
            return False
        for name, seconds in metrics.items():
            if name.startswith(WATCHED):
                self._record(name, seconds)
        if max(self._num_slow.values(), default=0) < PATIENCE:
            return False
        self.num_measurements += 1
        self.restart()  # the new seconds become the usual ones
        return True

    def _record(self, name: str, seconds: float) -> None:
        usual = self._usual[name]
        expected = median(usual) if len(usual) >= MIN_USUAL else None
        if expected is not None and seconds > max(SLOW_RATIO * expected, expected + MIN_LOST_S):
            self._num_slow[name] += 1
        else:
            self._num_slow[name] = 0
            usual.append(seconds)


def fallen_links(before: LinkTable, after: LinkTable) -> tuple[tuple[int, int], ...]:
    """Return the links that lost more than `FAR_RATIO` of their bandwidth since ``before``, the slowest first."""
    fallen = (
        ends
        for ends, link in after.links.items()
        if ends in before.links and link.bytes_per_s * FAR_RATIO < before.links[ends].bytes_per_s
    )
    return tuple(sorted(fallen, key=lambda ends: (after.links[ends].bytes_per_s, ends)))


def describe_fall(before: LinkTable, after: LinkTable) -> str | None:
    """Return a line about links that became slow, with the host that all of them have, if one has; None without any."""
    fallen = fallen_links(before, after)
    if not fallen:
        return None
    common = set.intersection(*map(set, fallen))
    if len(common) == 2:  # both directions of one pair, or one of them
        where = f"the link between {' and '.join(before.hosts[node] for node in sorted(common))} has"
    elif common:
        where = f"links of {before.hosts[common.pop()]} have"
    else:
        where = f"{len(fallen)} links have"
    figures = [
        f"{after.text_of(ends)}, {before.links[ends].bytes_per_s / 1e9:.3g} GB/s at the start" for ends in fallen
    ]
    return f"{where} become slow since the start: {few_of(figures)}; check cables, adapters and other jobs there"
