"""Schedule samples into slots that share a bounded number of cache pages. Pure, like `Scheduler`, which it extends.

Sequences get pages as they grow. If none is left, the sample that was admitted last is preempted: it returns its pages
and waits at the head of the queue, to be read again. The sample that was admitted first always gets its pages, so every
sample finishes. A sample is not admitted if it would take pages that running samples need within their next steps;
otherwise samples would preempt each other in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_realloc.generation.cache.page_table import PageTables
from lightning_realloc.generation.schedule.scheduler import Admission, Prompt, Scheduler, Step, Unread
from lightning_realloc.limits import MAX_PREFILL_TOKENS


class RunningLengths(Protocol):
    """What is asked of samples, by their places in the call."""

    def position(self, index: int) -> int:
        """Return where the token stands that the sample reads next."""
        ...

    def num_read(self, index: int) -> int:
        """Return from how many positions on its slot holds nothing."""
        ...

    def longest(self, index: int) -> int:
        """Return the most positions that it may come to."""
        ...

    def num_common(self, index: int) -> int:
        """Return how many first positions are read alike by all samples of its prompt."""
        ...

    def names(self, index: int, length: int) -> Sequence[int]:
        """Return the names of the whole pages among its first ``length`` positions."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    """How samples of a prompt may begin."""

    source: int | None
    """Slot of another sample of the prompt."""
    pages: Sequence[int]
    """Full pages that hold its beginning already."""
    num_held: int
    """Positions that need not be read."""


class PagedScheduler(Scheduler):
    """Continuous batching over slots whose pages may run out."""

    def __init__(
        self,
        prompts: Iterable[Prompt],
        *,
        lengths: RunningLengths,
        tables: PageTables,
        num_slots: int,
        num_ahead: int = 0,
        num_spare: int = 32,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
    ) -> None:
        """Begin as `Scheduler` does; ``num_ahead`` tokens at most are drafted to follow a sample's last one.
        Another is admitted where that leaves pages for ``num_spare`` positions more of everyone.

        All pages together must hold the longest sample.
        """
        super().__init__(prompts, num_slots=num_slots, max_prefill_tokens=max_prefill_tokens)
        self._lengths = lengths
        self._tables = tables
        self._num_ahead = num_ahead
        self._num_spare = num_spare
        self._ages: dict[int, int] = {}
        """When each sample was admitted last, as a number of admissions."""
        self._num_admitted = 0

    def finish(self, slot: int) -> None:
        """Take the sample out of ``slot``, and its pages."""
        super().finish(slot)
        self._tables.clear(slot)

    def clear(self) -> None:
        """Drop all samples."""
        for slot in range(len(self._slots)):
            self._tables.clear(slot)
        super().clear()

    @property
    def num_free(self) -> int:
        """Slots that nobody holds, as far as there are pages for samples as large as those that run."""
        tables, free = self._tables, super().num_free
        used = tables.num_pages - tables.num_free
        return min(free, tables.num_free * (self._num_slots - free) // used) if used else free

    def seat(self, sample: int, prompt: int) -> int | None:
        """Give a sample of another rank a slot and its pages, parked; None where it has to wait like others."""
        position = self._lengths.position(sample)
        if not self._num_affordable(Prompt(prompt, position, (sample,)), _Entry(None, (), 0)):
            return None
        slot = super().seat(sample, prompt)
        if slot is not None:
            self._tables.grow(slot, self._needed(position, sample))
        return slot

    def next_step(self) -> Step:
        """Give those who run the pages they need, at the expense of who was admitted last; then go on as usual."""
        preempted = self._give_pages()
        step = super().next_step()
        return replace(step, preempted=preempted) if preempted else step

    # ---- those who hold a slot
    def _give_pages(self) -> tuple[int, ...]:
        """Let every sample take its next tokens; return who had to give its pages back for that."""
        tables, reading = self._tables, self._reading()
        lacking = [
            (self._ages[sample], slot)
            for slot, sample in enumerate(self._slots)
            if sample is not None and tables.missing(slot, self._needed(self._lengths.position(sample), sample))
            and not self._waits(sample, reading)
        ]  # fmt: skip
        preempted = []
        for _, slot in sorted(lacking):
            while (sample := self._slots[slot]) is not None:
                needed = self._needed(self._lengths.position(sample), sample)
                if tables.missing(slot, needed) <= tables.num_free:
                    tables.grow(slot, needed)
                    break
                preempted.append(self._preempt(self._last_admitted(slot, reading), reading))
        return tuple(preempted)

    def _needed(self, position: int, sample: int) -> int:
        """Return the positions that a forward from ``position`` on may write."""
        return min(position + 1 + self._num_ahead, self._lengths.longest(sample))

    def _reading(self) -> set[int]:
        return {sample for unread in self._unread for sample in unread.samples}

    def _waits(self, sample: int, reading: Collection[int]) -> bool:
        """Return whether a sample is parked until its owner says what to read."""
        return sample in self._parked and sample not in reading

    def _last_admitted(self, slot: int, reading: Collection[int]) -> int:
        """Return the slot that is to give its pages for ``slot``; before a sample gives way itself, one that waits."""
        ages = {self._ages[sample]: other for other, sample in enumerate(self._slots) if sample is not None}
        last = ages[max(ages)]
        if last == slot:
            waiting = [age for age, other in ages.items() if self._waits(self._slots[other], reading)]  # type: ignore[arg-type]
            last = ages[max(waiting)] if waiting else slot
        return last

    def _preempt(self, slot: int, reading: set[int]) -> int:
        """Take the slot and the pages of a sample; it waits at the head, or, if parked, for its owner."""
        sample, lengths = self._slots[slot], self._lengths
        assert sample is not None, f"slot {slot} has no sample to preempt"
        self._tables.publish(slot, lengths.names(sample, lengths.num_read(sample)))
        if not self._waits(sample, reading):
            self._queue.appendleft(Prompt(self._resident[slot], lengths.position(sample), (sample,)))
        self.finish(slot)
        reading.discard(sample)
        rest = [replace(unread, samples=tuple(other for other in unread.samples if other != sample))
                for unread in self._unread]  # fmt: skip
        self._unread = deque(unread for unread in rest if unread.samples)
        return sample

    # ---- those who wait
    def _read_some(self, unread: Unread, budget: int) -> Unread:
        part = super()._read_some(unread, budget)
        sample = part.samples[0]
        self._tables.publish(self._slots.index(sample), self._lengths.names(sample, part.end))
        return part

    def _admit(self, budget: int, being_read: Collection[int]) -> tuple[list[Admission], list[Unread]]:
        """Return who gets slots and pages, and what of their prompts is read at once."""
        admissions, parts = [], []
        holes = deque(slot for slot, sample in enumerate(self._slots) if sample is None)
        while self._queue and not self._waits_on:
            prompt = self._queue[0]
            entry = self._entry(prompt)
            if entry is None or not self._may_read(
                replace(prompt, num_tokens=prompt.num_tokens - entry.num_held), budget
            ):
                break
            count = min(len(holes) + self._num_slots - len(self._slots), self._num_affordable(prompt, entry))
            if not count:
                break
            samples = prompt.samples[:count]
            slots = tuple(self._take_slot(holes, sample, prompt.index) for sample in samples)
            self._begin(prompt, entry, samples, slots)
            admissions.append(Admission(prompt.index, samples, slots, entry.source, entry.num_held))
            parts.append(self._read_some(Unread(samples, entry.num_held, prompt.num_tokens), budget))
            budget -= parts[-1].end - parts[-1].begin
            if count < len(prompt.samples):
                self._queue[0] = replace(prompt, samples=prompt.samples[count:])
            else:
                self._queue.popleft()
        return admissions, parts

    def _take_slot(self, holes: deque[int], sample: int, prompt: int) -> int:
        self._ages[sample] = self._num_admitted
        self._num_admitted += 1
        return super()._take_slot(holes, sample, prompt)

    def _entry(self, prompt: Prompt) -> _Entry | None:
        """Return how a prompt's samples may begin; None while another sample of the prompt is reading it."""
        lengths, tables = self._lengths, self._tables
        if prompt.num_tokens == lengths.num_common(prompt.samples[0]):
            for slot, sample in enumerate(self._slots):
                if sample is not None and self._resident[slot] == prompt.index:
                    if lengths.num_read(sample) < prompt.num_tokens:
                        return None
                    full = tables.tables[slot][: prompt.num_tokens // tables.page_size]
                    return _Entry(slot, full, prompt.num_tokens)
        pages = tables.find(lengths.names(prompt.samples[0], prompt.num_tokens))
        return _Entry(None, pages, len(pages) * tables.page_size)

    def _num_affordable(self, prompt: Prompt, entry: _Entry) -> int:
        """Return how many samples of a prompt there are pages for, now and for a few steps of all."""
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
            length = self._needed(self._lengths.position(other), other)
            common += max(0, self._spare(length, other) - len(tables.tables[slot]))
        count = (tables.num_free - common) // (own + spare)
        return min(len(prompt.samples), max(count, 0 if held else 1))

    def _spare(self, length: int, sample: int) -> int:
        """Return the pages that a sample of this length takes after a few more steps."""
        return self._tables.pages_for(min(length + self._num_spare, self._lengths.longest(sample)))

    def _begin(self, prompt: Prompt, entry: _Entry, samples: Sequence[int], slots: Sequence[int]) -> None:
        """Give samples their pages: full ones of the prompt are theirs together, what they write into is their own."""
        tables, pages = self._tables, entry.pages
        for sample, slot in zip(samples, slots, strict=True):
            tables.share(slot, pages)
            tables.grow(slot, self._needed(prompt.num_tokens, sample))
            pages = tables.tables[slot][: prompt.num_tokens // tables.page_size]
