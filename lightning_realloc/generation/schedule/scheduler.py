"""Assign slots to samples, step by step. Pure: it handles lengths and indices, no tokens or tensors.

A property test holds these invariants. After every step running samples fill the first slots without holes, and parked
ones keep slots after them. At most ``num_slots`` samples run or are read, and at most ``num_kept`` more keep a slot.
Every sample is admitted once, and again after each time that it gave its slot away. A prompt is read once; its other
samples copy it from a slot that still holds it, and read it again only if waiting samples that ended held it alone. A
sample's tokens are read in order, and it runs once all are read. A copy or a move never reads a slot that an earlier
one of the step has overwritten.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from lightning_realloc.generation.schedule.slot_plan import (
    Admission,
    Entry,
    Move,
    Prompt,
    Read,
    Step,
    Swap,
    Unread,
)
from lightning_realloc.generation.schedule.waiting import PrefillBatching, WaitingSamples
from lightning_realloc.limits import MAX_PREFILL_TOKENS


class Scheduler:
    """Continuous batching over a fixed number of slots, with refill and compaction.

    Queued samples get the slots of finished ones. Only when none is queued, the last running sample moves into the
    hole, so a forward always works on the first slots. Samples that do not run are parked in slots after them: they
    wait for their environment, or after its answer until fewer samples run, or their tokens are not all read yet.

    A sample that waits for its environment lets another one run. It keeps its slot while there are enough of them;
    otherwise `WaitingSamples` chooses those that give it away, and they are read again.

    Args:
        prompts: Admitted by length hint, longest first; equal hints keep the order given.
        num_slots: Most samples that run or are read at a time.
        num_kept: Most further samples that keep a slot.
        max_prefill_tokens: Most tokens that a step reads besides those of running samples; the rest follows in later
            steps.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        *,
        num_slots: int,
        num_kept: int = 0,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
    ) -> None:
        self._queue = deque(sorted(prompts, key=lambda prompt: -prompt.length_hint))
        self.num_slots = num_slots
        self.num_kept = num_kept
        self._max_prefill_tokens = max_prefill_tokens
        self._is_begun = False
        """Whether slots hold the prompt at the head of the queue, whose other samples were admitted."""
        self._slots: list[int | None] = []
        """Sample in each slot; None: unused."""
        self._resident: list[int] = []
        """Prompt whose keys and values each slot holds."""
        self._num_running = 0
        self._parked: set[int] = set()
        self._waits = WaitingSamples()
        self._answered: deque[Unread] = deque()
        """Parked samples that are to be read and run on as soon as fewer than ``num_slots`` do."""
        self._unread: deque[Unread] = deque()
        self._reading: set[int] = set()
        """Samples of which the next step reads tokens."""
        self._preempted: list[int] = []
        """Samples that lose their slot before the next step."""
        self._batching = PrefillBatching()
        self.should_defer = False
        """Whether prompts and answers keep waiting although samples could be read. A prompt with running samples does
        not: the others copy it from their slots."""

    @property
    def running(self) -> Sequence[int | None]:
        """Sample in each of the first slots; None if it has finished since the last step."""
        return self._slots[: self._num_running]

    @property
    def slots(self) -> Sequence[int | None]:
        """Sample in each slot, running or parked; None if the slot is unused."""
        return self._slots

    @property
    def most_slots(self) -> int:
        """Most slots that samples hold."""
        return self.num_slots + self.num_kept

    @property
    def num_active(self) -> int:
        """Number of samples that run or are read."""
        return self._num_held - len(self._waits) - len(self._answered)

    @property
    def num_waiting(self) -> int:
        """Number of prompts and of answered samples that wait until others leave."""
        return len(self._queue) + len(self._answered)

    @property
    def waiting(self) -> list[int]:
        """Samples that have no slot yet, in the order in which they will get one."""
        return [sample for prompt in self._queue for sample in prompt.samples]

    @property
    def num_free(self) -> int:
        """Number of further samples that could be admitted."""
        return max(0, min(self._num_open - len(self._answered), self._num_unused))

    @property
    def reads_to_admit(self) -> bool:
        """Whether the next step reads only if it admits prompts or lets answered samples go on."""
        return not self._unread and (bool(self._answered) or (bool(self._queue) and not self._is_begun))

    @property
    def has_work(self) -> bool:
        """Whether any sample holds a slot or waits for one."""
        return bool(self._queue) or any(sample is not None for sample in self._slots)

    @property
    def _num_held(self) -> int:
        """Number of samples with a slot."""
        return sum(sample is not None for sample in self._slots)

    @property
    def _num_unused(self) -> int:
        """Number of slots without a sample."""
        return self.most_slots - self._num_held

    @property
    def _num_open(self) -> int:
        """Number of further samples that may run or be read."""
        return self.num_slots - self.num_active

    @property
    def _defers(self) -> bool:
        return self.should_defer and not self._is_begun

    def finish(self, slot: int) -> None:
        """Free a slot. Its content stays usable until the next step's moves."""
        sample = self._slots[slot]
        assert sample is not None, f"slot {slot} has no sample to finish"
        self._parked.discard(sample)
        self._waits.give_away(sample)
        self._slots[slot] = None

    def park(self, slot: int, num_tokens: int) -> None:
        """Let the sample in ``slot``, which holds ``num_tokens``, wait for its environment.

        Afterwards call :meth:`drop`, or, if the sample is parked then, :meth:`read`, and :meth:`add` otherwise.
        """
        sample = self._slots[slot]
        assert sample is not None, f"slot {slot} has no sample to park"
        self._parked.add(sample)
        self._waits.begin(sample, num_tokens)

    def is_parked(self, sample: int) -> bool:
        """Return whether the sample holds a slot and does not run."""
        return sample in self._parked

    def read(self, sample: int, begin: int, end: int, *, is_whole: bool = False) -> None:
        """Let a parked sample run after these positions, if any, are read; in one step if ``is_whole``."""
        assert sample in self._parked, f"sample {sample} is not parked"
        self._waits.end(sample)
        waiting = self._unread if begin == end and self._num_open >= 0 else self._answered
        waiting.append(Unread((sample,), begin, end, is_whole))

    def drop(self, sample: int) -> None:
        """End the wait of a sample, and free its slot if it has kept it."""
        self._waits.end(sample)
        if sample in self._parked:
            self.finish(self._slots.index(sample))

    def add(self, prompt: Prompt) -> None:
        """Add a prompt at the end of the queue."""
        for sample in prompt.samples:
            self._waits.end(sample)
        self._queue.append(prompt)

    def withdraw(self, samples: Collection[int]) -> None:
        """Remove waiting samples from the queue."""
        left = [tuple(sample for sample in prompt.samples if sample not in samples) for prompt in self._queue]
        self._is_begun = self._is_begun and bool(left[0])
        self._queue = deque(replace(p, samples=own) for p, own in zip(self._queue, left, strict=True) if own)

    def seat(self, sample: int, prompt: int) -> int | None:
        """Give another rank's sample a slot, parked for :meth:`read`; return None if it has to wait in the queue."""
        if self._queue or not self.num_free:
            return None
        self._parked.add(sample)
        return self._take_slot(sample, prompt)

    def clear(self) -> None:
        """Drop all samples."""
        for held in (self._queue, self._slots, self._resident, self._parked, self._waits, self._answered, self._unread):
            held.clear()
        self._num_running, self._is_begun = 0, False

    def batch_prefills(self, *, is_worthwhile: bool) -> None:
        """Decide whether the next step defers reads; ``is_worthwhile``: reading few takes as long as reading many."""
        self.should_defer = False
        num_free = self.num_free + min(self._num_open, len(self._answered))
        if is_worthwhile and self.reads_to_admit and num_free:
            num_running = sum(sample is not None and sample not in self._parked for sample in self.running)
            self.should_defer = self._batching.should_defer(num_running=num_running, num_free=num_free)

    def next_step(self) -> Step:
        """Continue reads, let answered samples go on, admit others, and move running ones into the first slots."""
        if self._num_running:
            self._waits.count_step()
        self._preempted = []
        self._resume_answered()
        may_admit = self._queue and len(self._slots) < self.num_slots and not self._defers
        if not (may_admit or self._parked or None in self._slots):
            return Step()
        unread = tuple(self._unread)
        self._unread.clear()
        self._reading = {sample for waiting in unread for sample in waiting.samples}
        budget = self._max_prefill_tokens
        parts = []
        for waiting in unread:
            parts.append(self._read_some(waiting, budget))
            budget -= parts[-1].end - parts[-1].begin
        admissions, begun = self._admit(budget)
        parts.extend(begun)
        moves = self._arrange()
        slot_of = {sample: slot for slot, sample in enumerate(self._slots)}
        reads = (Read(part.samples, tuple(slot_of[sample] for sample in part.samples), part.begin, part.end)
                 for part in parts if part.end > part.begin)  # fmt: skip
        return Step(tuple(admissions), moves, tuple(reads), tuple(self._preempted))

    def _resume_answered(self) -> None:
        """Let answered samples be read, in the order of their answers."""
        if not self._answered or self.should_defer:
            return
        reserved = self._num_reserved()
        while self._answered and self._num_open > reserved:
            self._unread.append(self._answered.popleft())

    def _num_reserved(self) -> int:
        """Return how many samples at the head of the queue run before answered ones, because unused slots hold them.

        The sooner all have begun, the sooner the last one ends: its waits then pass while others run.
        """
        if not self._queue or self._entry(self._queue[0]) is None:
            return 0
        return min(self._num_unused, len(self._queue[0].samples))

    def _read_some(self, unread: Unread, budget: int) -> Unread:
        """Return the part that this step reads. Its samples run if nothing is left, and are parked otherwise."""
        end = min(unread.end, unread.begin + max(budget, 0))
        if unread.is_whole:
            end = unread.end if self._may_read(unread.end - unread.begin, budget) else unread.begin
        if end == unread.end:
            self._parked.difference_update(unread.samples)
        else:
            self._parked.update(unread.samples)
            self._unread.append(replace(unread, begin=end))
        return Unread(unread.samples, unread.begin, end)

    def _admit(self, budget: int) -> tuple[list[Admission], list[Unread]]:
        """Return the admissions, and the parts of their prompts that this step reads."""
        admissions, parts = [], []
        while self._queue and self._num_open > 0 and not self._defers:
            prompt = self._queue[0]
            entry = self._entry(prompt)
            if entry is None or not self._may_read(prompt.num_tokens - entry.num_held, budget):
                break
            entry, count = self._make_way(prompt, entry)
            if entry is None or not count:
                break
            samples = self._dequeue(count)
            slots = tuple(self._take_slot(sample, prompt.index) for sample in samples)
            self._begin(prompt, entry, samples, slots)
            num_shared = entry.num_held if entry.source is None else 0
            admissions.append(Admission(prompt.index, samples, slots, entry.source, num_shared))
            if entry.num_held < prompt.num_tokens:
                self._reading.update(samples)
            unread = Unread(samples, entry.num_held, prompt.num_tokens, prompt.is_whole)
            parts.append(self._read_some(unread, budget))
            budget -= parts[-1].end - parts[-1].begin
        return admissions, parts

    def _make_way(self, prompt: Prompt, entry: Entry | None) -> tuple[Entry | None, int]:
        """Let waiting samples give their slots to the prompt's samples where that pays, and always if nothing runs.

        Return the parts of the prompt that are then held, and the number of its samples for which there is room.
        """
        wanted, count = min(self._num_open, len(prompt.samples)), 0
        most = self._waits.worthwhile_tokens
        while entry is not None:
            before, count = count, min(wanted, self._num_unused, self._num_affordable(prompt, entry))
            most = self._waits.worthwhile_tokens if count > before else most
            is_idle = not (self.num_active or count)
            cheapest = self._waits.cheapest(math.inf if is_idle else most) if count < wanted else None
            if cheapest is None:
                break
            sample, num_tokens = cheapest
            self._preempt(self._slots.index(sample))
            most -= num_tokens
            entry = self._entry(prompt)
        return entry, count

    def _entry(self, prompt: Prompt) -> Entry | None:
        """Return the parts of a prompt that are held already; None while another of its samples is reading it."""
        holding = [slot for slot, resident in enumerate(self._resident) if resident == prompt.index]
        if not self._is_begun or not holding:
            return Entry()
        source = next((slot for slot in holding if self._slots[slot] not in self._reading), None)
        return None if source is None else Entry(source, num_held=prompt.num_tokens)

    def _num_affordable(self, prompt: Prompt, entry: Entry) -> int:
        """Return how many samples of a prompt there is memory for, given enough slots."""
        return len(prompt.samples)

    def _begin(self, prompt: Prompt, entry: Entry, samples: Sequence[int], slots: Sequence[int]) -> None:
        """Give admitted samples memory."""

    def _preempt(self, slot: int) -> None:
        """Free a waiting sample's slot before the next step."""
        sample = self._slots[slot]
        assert sample is not None, f"slot {slot} has no sample to preempt"
        self._preempted.append(sample)
        self.finish(slot)

    def _dequeue(self, most: int) -> tuple[int, ...]:
        """Remove up to ``most`` samples of the prompt at the head of the queue, and return them."""
        prompt = self._queue.popleft()
        self._is_begun = most < len(prompt.samples)
        if self._is_begun:
            self._queue.appendleft(replace(prompt, samples=prompt.samples[most:]))
        return prompt.samples[:most]

    def _may_read(self, num_tokens: int, budget: int) -> bool:
        """Return whether the rest of the budget is enough to begin a prompt of ``num_tokens``.

        Only a prompt longer than a whole budget is split, or exceeds it as a whole, and only if half a budget is left.
        """
        whole = self._max_prefill_tokens
        return num_tokens <= budget or (num_tokens > whole and 2 * budget >= whole)

    def _take_slot(self, sample: int, prompt: int) -> int:
        """Give a sample the first slot without one, and return it."""
        slot = next((slot for slot, owner in enumerate(self._slots) if owner is None), len(self._slots))
        self._slots[slot : slot + 1] = [sample]
        self._resident[slot : slot + 1] = [prompt]
        return slot

    def _arrange(self) -> tuple[Move | Swap, ...]:
        """Move running samples that are after the first slots into holes there, the last one first."""
        runs = [sample is not None and sample not in self._parked for sample in self._slots]
        self._num_running = sum(runs)
        behind = [slot for slot in range(self._num_running, len(runs)) if runs[slot]]
        moves: list[Move | Swap] = []
        for slot in (slot for slot in range(self._num_running) if not runs[slot]):
            source = behind.pop()
            gone, left = self._slots[slot], self._resident[slot]
            self._slots[slot], self._resident[slot] = self._slots[source], self._resident[source]
            self._slots[source] = gone
            if gone is None:
                moves.append(Move(source, slot))  # a copy: `source` keeps its content
            else:
                moves.append(Swap(source, slot))
                self._resident[source] = left
        while self._slots and self._slots[-1] is None:
            self._slots.pop()
            self._resident.pop()
        return tuple(moves)
