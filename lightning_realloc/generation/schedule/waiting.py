"""Choose the samples that give their slot away while they wait for their environment, and when prompts wait to be read.

Pure: it counts steps. A waiting sample keeps its keys and values while slots last. Where they are short, two costs are
compared in row-steps, one row in one step. Waiting in a slot costs as many as the wait takes, because another sample
could run there. Reading a sequence again costs half a row-step for each token, because nothing is drawn after it; a GPU
reads faster still. Steps and tokens are the same on all ranks of a tensor-parallel group, seconds are not.
"""

from __future__ import annotations

import math

_READING_IN_STEPS = 3.0
"""Duration of a step that reads prompts, in steps of one that is a CUDA graph: 2.5 to 4 on an H200, with one and eight
billion weights. A constant, because a measured value would differ between runs, and rounding with it."""


class WaitingSamples:
    """The waiting samples of one call, with the slots that some of them keep, and the expected length of a wait."""

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}
        """Waiting sample with a slot -> tokens to read if it gives the slot away."""
        self._begun: dict[int, int] = {}
        """Waiting sample, with or without a slot -> step in which its wait began."""
        self._num_steps = 0
        self._num_ended = 0
        self._mean_steps = 0.0
        """Exponentially weighted mean length of the waits that have ended."""

    def __len__(self) -> int:
        """Return the number of waiting samples that keep a slot."""
        return len(self._kept)

    def __contains__(self, sample: int) -> bool:
        """Return whether a sample waits and keeps its slot."""
        return sample in self._kept

    @property
    def worthwhile_tokens(self) -> float:
        """Most tokens that it costs less to read again than to let their sample wait in a slot."""
        return 2 * self._expected_steps

    @property
    def _expected_steps(self) -> float:
        """Expected steps of a wait; before the first answer, those that the oldest wait has taken so far."""
        if self._num_ended:
            return self._mean_steps
        return float(max((self._num_steps - begun for begun in self._begun.values()), default=0))

    def count_step(self) -> None:
        """Count a step in which samples run."""
        self._num_steps += 1

    def begin(self, sample: int, num_tokens: int) -> None:
        """Begin the wait of a sample whose slot holds ``num_tokens``."""
        self._kept[sample] = num_tokens
        self._begun[sample] = self._num_steps

    def give_away(self, sample: int) -> None:
        """Record that a sample has no slot any more; if it waits, its wait goes on."""
        self._kept.pop(sample, None)

    def end(self, sample: int) -> None:
        """End a sample's wait; does nothing if it does not wait."""
        self._kept.pop(sample, None)
        begun = self._begun.pop(sample, None)
        if begun is not None:
            self._num_ended += 1
            self._mean_steps += (self._num_steps - begun - self._mean_steps) / min(self._num_ended, 32)

    def cheapest(self, most_tokens: float = math.inf) -> tuple[int, int] | None:
        """Return the sample with a slot that has the fewest tokens to read again, and their number.

        None if there is no sample with at most ``most_tokens``.
        """
        sample = min(self._kept, key=self._kept.__getitem__, default=None)
        if sample is None or self._kept[sample] > most_tokens:
            return None
        return sample, self._kept[sample]

    def clear(self) -> None:
        """Forget all waits."""
        self._kept.clear()
        self._begun.clear()


class PrefillBatching:
    """Defers prefills until several slots are free, where a step that reads prompts is much slower than another.

    Such a step takes about as long however few prompts it reads. So slots stay free until their unused steps add up to
    the extra time of one such step. As in ski rental, that costs at most twice the optimum. Source: Karlin, Manasse,
    Rudolph, Sleator, "Competitive snoopy caching", Algorithmica 3, 1988.
    """

    def __init__(self) -> None:
        self._idle_steps = 0.0
        """Unused steps of free slots since prompts were last read, in steps of all slots."""

    def should_defer(self, *, num_running: int, num_free: int) -> bool:
        """Return whether waiting samples keep waiting although slots are free. Called once per step."""
        self._idle_steps += num_free / (num_running + num_free)
        waits = num_running > 0 and self._idle_steps < _READING_IN_STEPS
        if not waits:
            self._idle_steps = 0.0
        return waits
