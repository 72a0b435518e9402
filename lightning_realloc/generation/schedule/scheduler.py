"""Assign slots to samples, step by step. Pure: it handles lengths and indices, no tokens or tensors.

A property test holds these invariants. After every step running samples fill the first slots without holes, and parked
ones keep slots after them. Every sample is admitted once. A prompt is read once; its other samples copy it from a slot
that still holds it. A sample's tokens are read in order, and it runs once all are read. A copy or a move never reads a
slot that an earlier one of the step has overwritten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.limits import MAX_PREFILL_TOKENS


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt whose samples wait for slots."""

    index: int
    num_tokens: int
    """Tokens to read before its samples can run."""
    samples: tuple[int, ...]
    length_hint: int = 0
    """Expected response length. Longer ones are admitted first, so that they do not run alone at the end."""
    is_whole: bool = False
    """Whether one step reads all its tokens, because the model's further inputs belong to them together."""

    @classmethod
    def of(cls, samples: Sequence[Sample], places: tuple[int, ...], number: int, length_hint: int = 0) -> Prompt:
        """Return the prompt of the samples at these places, to be read up to their last token."""
        first = samples[places[0]]
        return cls(number, first.position, places, length_hint, is_whole=bool(first.input.extras))


@dataclass(frozen=True, slots=True)
class Admission:
    """Samples of one prompt that get slots in this step."""

    prompt: int
    samples: tuple[int, ...]
    slots: tuple[int, ...]
    """One slot per sample."""
    source: int | None
    """Slot that holds this prompt; None: it has to be read."""
    num_held: int = 0
    """Positions that shared pages hold already; 0 without pages."""


@dataclass(frozen=True, slots=True)
class Move:
    """Move a sample to an unused slot."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Exchange two samples: the one in ``source`` runs, the one in ``target`` does not."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Read:
    """Positions of a sequence that the step's forward reads before its samples run on."""

    samples: tuple[int, ...]
    slots: tuple[int, ...]
    """One slot per sample, after the step's moves."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """Actions before and in the next forward, in this order: ``admissions`` (copies of prompts), ``moves``,
    ``reads``."""

    admissions: tuple[Admission, ...] = ()
    moves: tuple[Move | Swap, ...] = ()
    reads: tuple[Read, ...] = ()
    preempted: tuple[int, ...] = ()
    """Samples that lost their slot and its content before all this; they will be admitted again."""


@dataclass(slots=True)
class Unread:
    """Positions of samples that are still to be read."""

    samples: tuple[int, ...]
    begin: int
    end: int
    is_whole: bool = False
    """Whether one step reads them all."""


_READING_IN_STEPS = 3.0
"""Duration of a step that reads prompts, in steps of one that is a CUDA graph: 2.5 to 4 on an H200, with one and eight
billion weights. A constant, because a measured value would differ between runs, and rounding with it."""


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


class Scheduler:
    """Continuous batching over a fixed number of slots, with refill and compaction.

    Waiting samples get the slots of finished ones. Only when none waits, the last running sample moves into the hole,
    so a forward always works on the first slots. Samples that cannot run now are parked in slots after them: they wait
    for `read`, or their tokens are not all read yet.

    Args:
        prompts: Admitted by length hint, longest first; equal hints keep the order given.
        num_slots: Samples that hold a slot at a time.
        max_prefill_tokens: Most tokens that a step reads besides those of running samples; the rest follows in later
            steps.
    """

    def __init__(
        self, prompts: Iterable[Prompt], *, num_slots: int, max_prefill_tokens: int = MAX_PREFILL_TOKENS
    ) -> None:
        self._queue = deque(sorted(prompts, key=lambda prompt: -prompt.length_hint))
        self.num_slots = num_slots
        self._max_prefill_tokens = max_prefill_tokens
        self._is_begun = False
        """Whether slots hold the prompt at the head of the queue, whose other samples were admitted."""
        self._slots: list[int | None] = []
        """Sample in each slot; None: unused."""
        self._resident: list[int] = []
        """Prompt whose keys and values each slot holds."""
        self._num_running = 0
        self._parked: set[int] = set()
        self._unread: deque[Unread] = deque()
        self._batching = PrefillBatching()
        self.should_defer = False
        """Whether prompts keep waiting although slots are free. A prompt with running samples does not: the others copy
        it from their slots."""

    @property
    def running(self) -> Sequence[int | None]:
        """Sample in each of the first slots; None if it has finished since the last step."""
        return self._slots[: self._num_running]

    @property
    def slots(self) -> Sequence[int | None]:
        """Sample in each slot, running or parked; None if the slot is unused."""
        return self._slots

    @property
    def num_waiting(self) -> int:
        """Number of prompts with samples that have no slot yet."""
        return len(self._queue)

    @property
    def waiting(self) -> list[int]:
        """Samples that have no slot yet, in the order in which they will get one."""
        return [sample for prompt in self._queue for sample in prompt.samples]

    @property
    def num_free(self) -> int:
        """Number of unused slots."""
        return self.num_slots - sum(sample is not None for sample in self._slots)

    @property
    def reads_to_admit(self) -> bool:
        """Whether the next step reads prompts only if it admits samples."""
        return bool(self._queue) and not self._is_begun and not self._unread

    @property
    def has_work(self) -> bool:
        """Whether any sample holds a slot or waits for one."""
        return bool(self._queue) or any(sample is not None for sample in self._slots)

    @property
    def _defers(self) -> bool:
        return self.should_defer and not self._is_begun

    def finish(self, slot: int) -> None:
        """Free a slot. Its content stays usable until the next step's moves."""
        sample = self._slots[slot]
        assert sample is not None, f"slot {slot} has no sample to finish"
        self._parked.discard(sample)
        self._slots[slot] = None

    def park(self, slot: int) -> None:
        """Let the sample in ``slot`` keep its slot and wait for :meth:`read` or :meth:`drop`."""
        sample = self._slots[slot]
        assert sample is not None, f"slot {slot} has no sample to park"
        self._parked.add(sample)

    def is_parked(self, sample: int) -> bool:
        """Return whether the sample holds a slot and does not run."""
        return sample in self._parked

    def read(self, sample: int, begin: int, end: int) -> None:
        """Let a parked sample run again after these positions of it are read."""
        assert sample in self._parked, f"sample {sample} is not parked"
        self._unread.append(Unread((sample,), begin, end))

    def drop(self, sample: int) -> None:
        """Free the slot of a parked sample."""
        self.finish(self._slots.index(sample))

    def add(self, prompt: Prompt) -> None:
        """Add a prompt at the end of the queue."""
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
        holes = deque(slot for slot, owner in enumerate(self._slots) if owner is None)
        self._parked.add(sample)
        return self._take_slot(holes, sample, prompt)

    def clear(self) -> None:
        """Drop all samples."""
        self._queue.clear()
        self._slots.clear()
        self._resident.clear()
        self._parked.clear()
        self._unread.clear()
        self._num_running, self._is_begun = 0, False

    def batch_prefills(self, *, is_worthwhile: bool) -> None:
        """Decide whether the next step defers prompts; ``is_worthwhile``: reading few takes as long as reading many."""
        self.should_defer = False
        if is_worthwhile and self.reads_to_admit and self.num_free > 0:
            num_running = sum(sample is not None for sample in self.running)
            self.should_defer = self._batching.should_defer(num_running=num_running, num_free=self.num_free)

    def next_step(self) -> Step:
        """Continue reads, admit samples, and move running ones into the first slots."""
        may_admit = self._queue and len(self._slots) < self.num_slots and not self._defers
        if not (may_admit or self._parked or None in self._slots):
            return Step()
        unread = tuple(self._unread)
        self._unread.clear()
        budget = self._max_prefill_tokens
        parts = []
        for waiting in unread:
            parts.append(self._read_some(waiting, budget))
            budget -= parts[-1].end - parts[-1].begin
        admissions, begun = self._admit(budget, {sample for waiting in unread for sample in waiting.samples})
        parts.extend(begun)
        moves = self._arrange()
        slot_of = {sample: slot for slot, sample in enumerate(self._slots)}
        reads = (Read(part.samples, tuple(slot_of[sample] for sample in part.samples), part.begin, part.end)
                 for part in parts if part.end > part.begin)  # fmt: skip
        return Step(tuple(admissions), moves, tuple(reads))

    def _read_some(self, unread: Unread, budget: int) -> Unread:
        """Return the part that this step reads. Its samples run if nothing is left, and are parked otherwise."""
        end = unread.end if unread.is_whole else min(unread.end, unread.begin + budget)
        if end == unread.end:
            self._parked.difference_update(unread.samples)
        else:
            self._parked.update(unread.samples)
            self._unread.append(Unread(unread.samples, end, unread.end))
        return Unread(unread.samples, unread.begin, end)

    def _admit(self, budget: int, being_read: Collection[int]) -> tuple[list[Admission], list[Unread]]:
        """Return the admissions, and the parts of their prompts that this step reads.

        Samples whose prompt is still being read in this step cannot copy it yet.
        """
        admissions, parts = [], []
        holes = deque(slot for slot, sample in enumerate(self._slots) if sample is None)
        while self._queue and not self._defers:
            prompt = self._queue[0]
            source = self._resident.index(prompt.index) if self._is_begun else None
            may_begin = (
                self._may_read(prompt.num_tokens, budget) if source is None else self._slots[source] not in being_read
            )
            room = len(holes) + self.num_slots - len(self._slots)
            if not room or not may_begin:
                break
            samples = self._dequeue(room)
            slots = tuple(self._take_slot(holes, sample, prompt.index) for sample in samples)
            admissions.append(Admission(prompt.index, samples, slots, source))
            if source is None:
                parts.append(self._read_some(Unread(samples, 0, prompt.num_tokens, prompt.is_whole), budget))
                budget -= parts[-1].end
        return admissions, parts

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

    def _take_slot(self, holes: deque[int], sample: int, prompt: int) -> int:
        if not holes:
            self._slots.append(sample)
            self._resident.append(prompt)
            return len(self._slots) - 1
        slot = holes.popleft()
        self._slots[slot] = sample
        self._resident[slot] = prompt
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
