"""Delay prefills until several slots are free, where a step that reads prompts is much slower than a plain one."""

from __future__ import annotations

_READING_IN_STEPS = 3.0
"""How many steps longer than one without prompts one with prompts takes, where the former are CUDA graphs. Measured on
an H200, models of one and of eight billion weights: 2.5 to 4. A clock's word would differ from run to run, and with it
the rounding of what is computed."""


class PrefillBatching:
    """Lets samples wait until it pays to read their prompts.

    Where steps are CUDA graphs, one that reads prompts takes several times as long as another, however few they are, so
    it pays to read several at once. Slots are left free until what they would have brought comes to what such a step
    takes longer: as with skis that are rented until the rent has come to their price, that costs at most twice as much
    as the best there is. Source: Karlin, Manasse, Rudolph, Sleator, "Competitive snoopy caching", Algorithmica 3, 1988.
    """

    def __init__(self) -> None:
        """Begin with slots that were never free."""
        self._idle_steps = 0.0
        """What slots that were left free would have brought since prompts were last read, in steps of all slots."""

    def should_defer(self, *, num_running: int, num_free: int) -> bool:
        """Return whether samples that wait go on waiting, though slots are free. Asked once before every step."""
        self._idle_steps += num_free / (num_running + num_free)
        waits = num_running > 0 and self._idle_steps < _READING_IN_STEPS
        if not waits:
            self._idle_steps = 0.0
        return waits
