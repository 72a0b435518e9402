"""Schedule samples into slots that share a bounded number of cache pages.

Sequences get pages as they grow. If none is left, a sample is preempted: it returns its pages, to be read again later.
Samples that wait for their environment come first, then those that it has answered, then the others; among them the one
that was admitted last. So of the samples that run or are read, the one that was admitted first always gets its pages,
and every sample finishes. A sample is not admitted if it would take pages that running samples need within their next
steps; otherwise samples would preempt each other in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_realloc.generation.cache.page_table import PageTables, PrefixIndex
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.schedule.scheduler import Scheduler
from lightning_realloc.generation.schedule.slot_plan import Entry, Prompt, Unread
from lightning_realloc.limits import MAX_PREFILL_TOKENS


class _PrefixIds:
    """Prefix ids of samples' whole pages, by the samples' indices."""

    def __init__(self, samples: Sequence[Sample], page_size: int) -> None:
        self._samples = samples
        self._index = PrefixIndex(page_size)
        self._known: dict[int, list[int]] = {}

    def up_to(self, index: int, length: int) -> Sequence[int]:
        """Return the ids of the whole pages among a sample's first ``length`` positions.

        Pages from the first further inputs on have none: their tokens do not tell the keys and values.
        """
        shown = (place for place, part in self._samples[index].inputs if part.extras)
        length = min(length, next(shown, length))
        size, known = self._index.page_size, self._known.setdefault(index, [])
        if length // size > len(known):
            self._index.extend(known, self._samples[index].tokens(len(known) * size, length))
        return known[: length // size]


class PagedScheduler(Scheduler):
    """Continuous batching over slots that get pages as they grow.

    All pages together must hold the longest sample.

    Args:
        prompts, num_slots, num_kept, max_prefill_tokens: See `Scheduler`.
        samples: Samples of the call by index; those of other ranks are appended later.
        tables: Pages of the slots.
        num_ahead: Most drafted tokens after a sample's last one.
        num_spare: Positions that every sample can grow by after an admission.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        *,
        samples: Sequence[Sample],
        tables: PageTables,
        num_slots: int,
        num_kept: int = 0,
        num_ahead: int = 0,
        num_spare: int = 32,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
    ) -> None:
        super().__init__(prompts, num_slots=num_slots, num_kept=num_kept, max_prefill_tokens=max_prefill_tokens)
        self._samples = samples
        self._prefix_ids = _PrefixIds(samples, tables.page_size)
        self._tables = tables
        self._num_ahead = num_ahead
        self._num_spare = num_spare
        self._ages: dict[int, int] = {}
        """Number of the last admission of each sample."""
        self._num_admitted = 0

    def finish(self, slot: int) -> None:
        super().finish(slot)
        self._tables.clear(slot)

    def clear(self) -> None:
        for slot in range(len(self._slots)):
            self._tables.clear(slot)
        super().clear()

    @property
    def num_free(self) -> int:
        """Number of free slots for which there are pages, if new samples are as large as the running ones."""
        tables, free = self._tables, super().num_free
        used = tables.num_pages - tables.num_free
        return min(free, tables.num_free * self._num_held // used) if used else free

    def seat(self, sample: int, prompt: int) -> int | None:
        """Give another rank's sample a slot and its pages, parked; return None if it has to wait in the queue."""
        position = self._samples[sample].position
        if not self._num_affordable(Prompt.of(self._samples, (sample,), prompt), Entry()):
            return None
        slot = super().seat(sample, prompt)
        if slot is not None:
            self._tables.grow(slot, self._needed(position, sample))
        return slot

    # ---- samples with a slot
    def _resume_answered(self) -> None:
        """Let answered samples be read, and give all that run or are read the pages for their next tokens."""
        super()._resume_answered()
        tables, answered = self._tables, self._samples_answered()
        lacking = [
            (self._ages[sample], slot)
            for slot, sample in enumerate(self._slots)
            if sample is not None and sample not in self._waits and sample not in answered
            and tables.missing(slot, self._needed(self._samples[sample].position, sample))
        ]  # fmt: skip
        for _, slot in sorted(lacking):
            while (sample := self._slots[slot]) is not None:
                needed = self._needed(self._samples[sample].position, sample)
                if tables.missing(slot, needed) <= tables.num_free:
                    tables.grow(slot, needed)
                    break
                self._preempt(self._next_victim())

    def _needed(self, position: int, sample: int) -> int:
        """Return the positions that a sample's slot holds after a forward from ``position`` on."""
        return min(position + 1 + self._num_ahead, self._samples[sample].max_length)

    def _num_reserved(self) -> int:
        """Return how many samples at the head of the queue run before answered ones: none unless half of the pages are
        free, because those in use double as responses grow, and samples without pages are read again."""
        tables, reserved = self._tables, super()._num_reserved()
        if not reserved or 2 * tables.num_free < tables.num_pages:
            return 0
        entry = self._entry(self._queue[0])
        return 0 if entry is None else min(reserved, self._num_affordable(self._queue[0], entry))

    def _samples_answered(self) -> set[int]:
        return {sample for unread in self._answered for sample in unread.samples}

    def _next_victim(self) -> int:
        """Return the slot to preempt where pages are short: of waiting samples if there are some, else of answered or
        of other ones, that of the sample admitted last."""
        answered = self._samples_answered()
        held = [(slot, sample) for slot, sample in enumerate(self._slots) if sample is not None]
        return max(held, key=lambda one: (one[1] in self._waits, one[1] in answered, self._ages[one[1]]))[0]

    def _preempt(self, slot: int) -> None:
        """Free a sample's slot and pages; it goes to the head of the queue, unless it waits for its environment."""
        sample = self._slots[slot]
        assert sample is not None, f"slot {slot} has no sample to preempt"
        self._tables.publish(slot, self._prefix_ids.up_to(sample, self._samples[sample].num_read))
        if sample not in self._waits:
            self._queue.appendleft(Prompt.of(self._samples, (sample,), self._resident[slot]))
        self._answered, self._unread = _without(self._answered, sample), _without(self._unread, sample)
        super()._preempt(slot)

    # ---- samples that wait
    def _read_some(self, unread: Unread, budget: int) -> Unread:
        part = super()._read_some(unread, budget)
        sample = part.samples[0]
        self._tables.publish(self._slots.index(sample), self._prefix_ids.up_to(sample, part.end))
        return part

    def _take_slot(self, sample: int, prompt: int) -> int:
        self._ages[sample] = self._num_admitted
        self._num_admitted += 1
        return super()._take_slot(sample, prompt)

    def _entry(self, prompt: Prompt) -> Entry | None:
        """Return the parts of a prompt that are held already; None while another of its samples is reading it."""
        tables = self._tables
        if prompt.num_tokens == len(self._samples[prompt.samples[0]].prompt) - 1:  # no response yet
            for slot, sample in enumerate(self._slots):
                if sample is not None and self._resident[slot] == prompt.index:
                    if self._samples[sample].num_read < prompt.num_tokens:
                        return None
                    full = tables.tables[slot][: prompt.num_tokens // tables.page_size]
                    return Entry(slot, full, prompt.num_tokens)
        pages = tables.find(self._prefix_ids.up_to(prompt.samples[0], prompt.num_tokens))
        return Entry(None, pages, len(pages) * tables.page_size)

    def _num_affordable(self, prompt: Prompt, entry: Entry) -> int:
        """Return how many samples of a prompt have pages, now and for the next steps of all samples."""
        tables, sample = self._tables, prompt.samples[0]
        full = prompt.num_tokens // tables.page_size
        needed = self._needed(prompt.num_tokens, sample)
        common = full - len(entry.pages) + tables.num_idle(entry.pages)
        own = tables.pages_for(needed) - full
        held = [(slot, other) for slot, other in enumerate(self._slots) if other is not None]
        if not held:
            assert common + own <= tables.num_free, "the pages do not hold one sample"
        spare = self._spare(needed, sample) - tables.pages_for(needed)
        for slot, other in held:
            length = self._needed(self._samples[other].position, other)
            common += max(0, self._spare(length, other) - len(tables.tables[slot]))
        count = (tables.num_free - common) // (own + spare)
        return min(len(prompt.samples), max(count, 0 if held else 1))

    def _spare(self, length: int, sample: int) -> int:
        """Return the pages that a sample of this length needs after a few more steps."""
        return self._tables.pages_for(min(length + self._num_spare, self._samples[sample].max_length))

    def _begin(self, prompt: Prompt, entry: Entry, samples: Sequence[int], slots: Sequence[int]) -> None:
        """Give admitted samples their pages: they share the prompt's full pages and own those that they write to."""
        tables, pages = self._tables, entry.pages
        for sample, slot in zip(samples, slots, strict=True):
            tables.share(slot, pages)
            tables.grow(slot, self._needed(prompt.num_tokens, sample))
            pages = tables.tables[slot][: prompt.num_tokens // tables.page_size]


def _without(unread: Iterable[Unread], sample: int) -> deque[Unread]:
    """Return the positions to read of other samples."""
    rest = (replace(one, samples=tuple(other for other in one.samples if other != sample)) for one in unread)
    return deque(one for one in rest if one.samples)
