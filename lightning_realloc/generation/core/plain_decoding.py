"""Plain decoding: one token per running sample and step, and the hooks that speculative decoding overrides."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.step import NO_DRAFT, Draft, DrawRule, Emitted

if TYPE_CHECKING:
    from lightning_realloc.generation.cache.kv_cache import KVCache


class SlotFollower:
    """Follows the target's cache and its slots, as a drafter's own cache does. This one does nothing."""

    def share_cache(self, cache: KVCache) -> None:
        """Use the cache of the target's keys and values in the next generation.

        A drafter with keys and values of its own keeps them in the pages of a paged cache. In this call it describes
        their shapes to the cache.
        """

    def admitted(self, slots: Sequence[int]) -> None:
        """Forget the content of these slots, which hold new samples."""

    def copied(self, source: int, targets: Sequence[int], length: int) -> None:
        """Follow a copy of the first ``length`` positions of slot ``source`` to other slots."""

    def kept(self, slot: int, length: int) -> None:
        """Keep ``length`` positions of a slot, from where another sample of the same prompt continues."""

    def swapped(self, first: int, second: int) -> None:
        """Follow an exchange of two slots' content."""


class Decoding:
    """Plain decoding. `Speculator` overrides it."""

    follower = SlotFollower()
    """Learns how slots change."""
    max_ahead = 0
    """Most drafted tokens that a step reads after a sample's last one."""
    adapts = False
    """Whether measured seconds decide how many tokens a step reads."""

    def for_other_samples(self) -> Decoding:
        """Return decoding in the same way for samples whose steps are under way at the same time."""
        return self

    def begin(self, samples: Sequence[Sample], params: SamplingParams, num_slots: int) -> DrawRule | None:
        """Start a generation of these samples, and return the rule that verifies drafts; None: there are none."""
        return None

    def end(self, *, has_failed: bool = False) -> None:
        """End the generation."""

    def propose(self, running: Sequence[Sample], being_read: Collection[int], *, is_tail: bool) -> Sequence[Draft]:
        """Return a draft for each running sample.

        Args:
            running: Samples by slot.
            being_read: Slots whose prompts this step reads.
            is_tail: Whether no sample waits for a slot.
        """
        return [NO_DRAFT] * len(running)

    def verified(self, emitted: Sequence[Emitted]) -> None:
        """Called with the tokens that each sample got, after the drafts of the last `propose` were verified."""

    def end_step(self, *, is_typical: bool) -> None:
        """End a step whose tokens were taken. ``is_typical``: later steps of its size will take about as long."""

    def finished(self, sample: Sample) -> None:
        """Take a sample that has its last token."""

    def counts(self) -> dict[str, float]:
        """Return the fields of `GenerationStats` that this class counts."""
        return {}
