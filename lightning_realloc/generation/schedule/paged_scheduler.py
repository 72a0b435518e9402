"""Schedule samples into slots that share a bounded number of cache pages.

Sequences get pages as they grow. If none is left, the sample that was admitted last is preempted: it returns its pages
and waits at the head of the queue, to be read again. The sample that was admitted first always gets its pages, so every
sample finishes. A sample is not admitted if it would take pages that running samples need within their next steps;
otherwise samples would preempt each other in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_realloc.generation.cache.page_table import PageTables, PrefixIndex
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.schedule.scheduler import Admission, Prompt, Scheduler, Step, Unread
from lightning_realloc.limits import MAX_PREFILL_TOKENS


class _PrefixIds:
    """Prefix ids of samples' whole pages, by the samples' indices."""

    def __init__(self, samples: Sequence[Sample], page_size: int) -> None:
        self._samples = samples
        self._index = PrefixIndex(page_size)
        self._known: dict[int, list[int]] = {}

    def up_to(self, index: int, length: int) -> Sequence[int]:
        """Return the ids of the whole pages among a sample's first ``length`` positions.

        Pages of samples with further inputs have none: their tokens do not tell the keys and values.
        """
        if self._samples[index].input.extras:
            return ()
        size, known = self._index.page_size, self._known.setdefault(index, [])
        if length // size > len(known):
            self._index.extend(known, self._samples[index].tokens(len(known) * size, length))
        return known[: length // size]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Parts of a prompt that need not be read before its samples run."""

    source: int | None
    """Slot of another sample of the prompt; None if there is none."""
    pages: Sequence[int]
    """Full pages that hold the beginning of the prompt."""
    num_held: int
    """Number of positions that need not be read."""


class PagedScheduler(Scheduler):
    """Continuous batching over slots that get pages as they grow.

    All pages together must hold the longest sample.

    Args:
        prompts, num_slots, max_prefill_tokens: See `Scheduler`.
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
        num_ahead: int = 0,
        num_spare: int = 32,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
    ) -> None:
        super().__init__(prompts, num_slots=num_slots, max_prefill_tokens=max_prefill_tokens)
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
        return min(free, tables.num_free * (self.num_slots - free) // used) if used else free

    def seat(self, sample: int, prompt: int) -> int | None:
        """Give another rank's sample a slot and its pages, parked; return None if it has to wait in the queue."""
        position = self._samples[sample].position
        if not self._num_affordable(Prompt.of(self._samples, (sample,), prompt), _Entry(None, (), 0)):
            return None
        slot = super().seat(sample, prompt)
        if slot is not None:
            self._tables.grow(slot, self._needed(position, sample))
        return slot

    def next_step(self) -> Step:
        """Give running samples the pages they need, preempt others for that, and then schedule as `Scheduler` does."""
        preempted = self._give_pages()
        step = super().next_step()
        return replace(step, preempted=preempted) if preempted else step

    # ---- samples with a slot
    def _give_pages(self) -> tuple[int, ...]:
        """Give each sample the pages for its next tokens; return the samples that were preempted for that."""
        tables, reading = self._tables, {sample for unread in self._unread for sample in unread.samples}
        lacking = [
            (self._ages[sample], slot)
            for slot, sample in enumerate(self._slots)
            if sample is not None and tables.missing(slot, self._needed(self._samples[sample].position, sample))
            and not self._waits(sample, reading)
        ]  # fmt: skip
        preempted = []
        for _, slot in sorted(lacking):
            while (sample := self._slots[slot]) is not None:
                needed = self._needed(self._samples[sample].position, sample)
                if tables.missing(slot, needed) <= tables.num_free:
                    tables.grow(slot, needed)
                    break
                preempted.append(self._preempt(self._last_admitted(slot, reading), reading))
        return tuple(preempted)

    def _needed(self, position: int, sample: int) -> int:
        """Return the positions that a sample's slot holds after a forward from ``position`` on."""
        return min(position + 1 + self._num_ahead, self._samples[sample].max_length)

    def _waits(self, sample: int, reading: Collection[int]) -> bool:
        """Return whether a sample is parked and nothing of it is read."""
        return sample in self._parked and sample not in reading

    def _last_admitted(self, slot: int, reading: Collection[int]) -> int:
        """Return the slot to preempt for ``slot``; a waiting sample comes before the slot's own."""
        ages = {self._ages[sample]: other for other, sample in enumerate(self._slots) if sample is not None}
        last = ages[max(ages)]
        if last == slot:
            waiting = [age for age, other in ages.items() if self._waits(self._slots[other], reading)]  # type: ignore[arg-type]
            last = ages[max(waiting)] if waiting else slot
        return last

    def _preempt(self, slot: int, reading: set[int]) -> int:
        """Free a sample's slot and pages; it waits at the head of the queue, or, if parked, for `read`."""
        sample = self._slots[slot]
        assert sample is not None, f"slot {slot} has no sample to preempt"
        self._tables.publish(slot, self._prefix_ids.up_to(sample, self._samples[sample].num_read))
        if not self._waits(sample, reading):
            self._queue.appendleft(Prompt.of(self._samples, (sample,), self._resident[slot]))
        self.finish(slot)
        reading.discard(sample)
        rest = [replace(unread, samples=tuple(other for other in unread.samples if other != sample))
                for unread in self._unread]  # fmt: skip
        self._unread = deque(unread for unread in rest if unread.samples)
        return sample

    # ---- samples that wait
    def _read_some(self, unread: Unread, budget: int) -> Unread:
        part = super()._read_some(unread, budget)
        sample = part.samples[0]
        self._tables.publish(self._slots.index(sample), self._prefix_ids.up_to(sample, part.end))
        return part

    def _admit(self, budget: int, being_read: Collection[int]) -> tuple[list[Admission], list[Unread]]:
        """Return the admissions, and the parts of their prompts that this step reads."""
        admissions, parts = [], []
        holes = deque(slot for slot, sample in enumerate(self._slots) if sample is None)
        while self._queue and not self._defers:
            prompt = self._queue[0]
            entry = self._entry(prompt)
            if entry is None or not self._may_read(prompt.num_tokens - entry.num_held, budget):
                break
            count = min(len(holes) + self.num_slots - len(self._slots), self._num_affordable(prompt, entry))
            if not count:
                break
            samples = self._dequeue(count)
            slots = tuple(self._take_slot(holes, sample, prompt.index) for sample in samples)
            self._begin(prompt, entry, samples, slots)
            admissions.append(Admission(prompt.index, samples, slots, entry.source, entry.num_held))
            unread = Unread(samples, entry.num_held, prompt.num_tokens, prompt.is_whole)
            parts.append(self._read_some(unread, budget))
            budget -= parts[-1].end - parts[-1].begin
        return admissions, parts

    def _take_slot(self, holes: deque[int], sample: int, prompt: int) -> int:
        self._ages[sample] = self._num_admitted
        self._num_admitted += 1
        return super()._take_slot(holes, sample, prompt)

    def _entry(self, prompt: Prompt) -> _Entry | None:
        """Return the parts of a prompt that are held already; None while another of its samples is reading it."""
        tables = self._tables
        if prompt.num_tokens == len(self._samples[prompt.samples[0]].prompt) - 1:  # no response yet
            for slot, sample in enumerate(self._slots):
                if sample is not None and self._resident[slot] == prompt.index:
                    if self._samples[sample].num_read < prompt.num_tokens:
                        return None
                    full = tables.tables[slot][: prompt.num_tokens // tables.page_size]
                    return _Entry(slot, full, prompt.num_tokens)
        pages = tables.find(self._prefix_ids.up_to(prompt.samples[0], prompt.num_tokens))
        return _Entry(None, pages, len(pages) * tables.page_size)

    def _num_affordable(self, prompt: Prompt, entry: _Entry) -> int:
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

    def _begin(self, prompt: Prompt, entry: _Entry, samples: Sequence[int], slots: Sequence[int]) -> None:
        """Give admitted samples their pages: they share the prompt's full pages and own those that they write to."""
        tables, pages = self._tables, entry.pages
        for sample, slot in zip(samples, slots, strict=True):
            tables.share(slot, pages)
            tables.grow(slot, self._needed(prompt.num_tokens, sample))
            pages = tables.tables[slot][: prompt.num_tokens // tables.page_size]
