"""Choose when Python looks for circular garbage: before models are built, and seldom while they train.

Iterations leave none. But samples and indices of texts live for a while, which to the collector looks like a heap that
grows: now and then it goes through all objects that Lightning and Transformers made, hundreds of thousands. That takes
a quarter of a second, in which every other rank waits.
"""

from __future__ import annotations

import gc

from lightning_realloc.runtime.measure.host_memory import give_back_freed_memory

YOUNG_OBJECTS = 10_000
"""New objects after which the collector looks at them; Python's own 700 are fewer than one batch of samples has."""


def collect_garbage() -> None:
    """Free circular garbage now, and give its memory back to the operating system.

    A Trainer, its strategy and its module refer to each other. Once nobody else does, they and all models stay in
    memory until the collector's next full pass, which may be several fits later.
    """
    gc.collect()
    give_back_freed_memory()


class InfrequentCollection:
    """Makes the collector look at new objects less often, until it is told to stop."""

    def __init__(self) -> None:
        self._before: tuple[int, int, int] | None = None

    def start(self) -> None:
        """Let it look less often, unless somebody turned it off or down already."""
        before = gc.get_threshold()
        if self._before is None and 0 < before[0] < YOUNG_OBJECTS:
            self._before = before
            gc.set_threshold(YOUNG_OBJECTS, *before[1:])

    def stop(self) -> None:
        """Let it look as often as before, unless somebody else decided on that meanwhile."""
        if self._before is not None and gc.get_threshold() == (YOUNG_OBJECTS, *self._before[1:]):
            gc.set_threshold(*self._before)
        self._before = None
