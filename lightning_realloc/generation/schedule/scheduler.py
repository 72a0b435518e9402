"""Which sample runs in which slot, and when. Pure: it sees lengths and indices, never a token or a tensor.

Invariants, held by a property test: after every step the running samples fill the first slots without holes, and those
that are parked keep a slot behind them; every sample is admitted exactly once; a prompt is computed once however many
samples it has, and its other samples copy it from a slot that still holds it; what a sample needs is read in order,
and it runs once all of it is read; a copy or a move never reads a slot that an earlier one of the step overwrote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_realloc.limits import MAX_PREFILL_TOKENS


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt waiting for slots."""

    index: int
    num_tokens: int
    """Tokens that must be computed before its samples can run."""
    samples: tuple[int, ...]
    length_hint: int = 0
    """Expected response length. Longer prompts of a batch are admitted first, so that they do not end it alone."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Samples of one prompt that get their slots in this step."""

    prompt: int
    samples: tuple[int, ...]
    slots: tuple[int, ...]
    """One per sample."""
    source: int | None
    """A slot that holds this prompt already; None: the prompt has to be computed."""
    num_held: int = 0
    """Positions of it that the slots hold already, in pages of others; in a paged cache alone."""


@dataclass(frozen=True, slots=True)
class Move:
    """A sample changes into a slot that nobody needs."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Two samples change their slots: the one in ``source`` runs, the one in ``target`` does not."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Read:
    """Positions of a sequence that the step's forward computes, before it takes its running samples further."""

    samples: tuple[int, ...]
    slots: tuple[int, ...]
    """One per sample, after the step's moves."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """What to do for the next forward: copy prompts of ``admissions``, carry out ``moves``, then compute ``reads``."""

    admissions: tuple[Admission, ...] = ()
    moves: tuple[Move | Swap, ...] = ()
    reads: tuple[Read, ...] = ()
    preempted: tuple[int, ...] = ()
    """Samples that lost their slot before all that, with all that it held; they will be admitted again."""


@dataclass(slots=True)
class Unread:
    """Positions that samples hold nothing of yet."""

    samples: tuple[int, ...]
    begin: int
    end: int


class Scheduler:
    """Continuous batching over a fixed number of slots, with refill and compaction.

    Slots of finished samples are given to waiting ones first; only when nobody waits is the last running sample
    moved into the hole, so that a forward always works on the first slots. A sample that cannot run now is parked
    behind them: because its owner says so, or because not all of its tokens are read yet.
    """

    def __init__(
        self, prompts: Iterable[Prompt], *, num_slots: int, max_prefill_tokens: int = MAX_PREFILL_TOKENS
    ) -> None:
        """Order the prompts by length hint, longest first; equal hints keep the order given.

        ``max_prefill_tokens`` bounds the tokens read in one step, besides those of running samples. What is longer is
        read in several.
        """
        self._queue = deque(sorted(prompts, key=lambda prompt: -prompt.length_hint))
        self._num_slots = num_slots
        self._max_prefill_tokens = max_prefill_tokens
        self._begun = 0
        """Samples of the prompt at the head of the queue that were admitted already."""
        self._slots: list[int | None] = []
        """Sample per slot; None: nobody needs it any more."""
        self._resident: list[int] = []
        """Prompt whose keys and values the slot holds."""
        self._num_running = 0
        self._parked: set[int] = set()
        self._unread: deque[Unread] = deque()
        self.should_defer = False
        """Whether prompts go on waiting, though slots are free; one whose other samples run already does not."""

    @property
    def running(self) -> Sequence[int | None]:
        """The sample in each of the first slots, None in a slot whose sample finished since the last step."""
        return self._slots[: self._num_running]

    @property
    def slots(self) -> Sequence[int | None]:
        """The sample in each slot, running or parked; None where nobody needs it."""
        return self._slots

    @property
    def num_waiting(self) -> int:
        """Prompts with samples that have no slot yet."""
        return len(self._queue)

    @property
    def waiting(self) -> list[int]:
        """Samples that have no slot yet, in the order in which they will get one."""
        begun = [self._begun] + [0] * len(self._queue)
        return [sample for prompt, first in zip(self._queue, begun, strict=False) for sample in prompt.samples[first:]]

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return self._num_slots - sum(sample is not None for sample in self._slots)

    @property
    def reads_to_admit(self) -> bool:
        """Whether the next step reads prompts if it admits samples, and otherwise nothing."""
        return bool(self._queue) and not self._begun and not self._unread

    @property
    def has_work(self) -> bool:
        """Whether any sample holds a slot or waits for one."""
        return bool(self._queue) or any(sample is not None for sample in self._slots)

    @property
    def _waits_on(self) -> bool:
        # Samples of a prompt that others read copy it from their slots, as long as one of these holds it.
        return self.should_defer and not self._begun

    def finish(self, slot: int) -> None:
        """Take the sample out of ``slot``. What the slot holds stays usable until the next step's moves."""
        sample = self._slots[slot]
        assert sample is not None, f"slot {slot} has no sample to finish"
        self._parked.discard(sample)
        self._slots[slot] = None

    def park(self, slot: int) -> None:
        """Let the sample in ``slot`` wait, with all that its slot holds, for :meth:`read` or :meth:`drop`."""
        sample = self._slots[slot]
        assert sample is not None, f"slot {slot} has no sample to park"
        self._parked.add(sample)

    def is_parked(self, sample: int) -> bool:
        """Whether the sample holds a slot and does not run."""
        return sample in self._parked

    def read(self, sample: int, begin: int, end: int) -> None:
        """Let a parked sample run again once these positions of it are read."""
        assert sample in self._parked, f"sample {sample} is not parked"
        self._unread.append(Unread((sample,), begin, end))

    def drop(self, sample: int) -> None:
        """Give the slot of a parked sample back."""
        self.finish(self._slots.index(sample))

    def add(self, prompt: Prompt) -> None:
        """Let another prompt wait, behind those that wait already."""
        self._queue.append(prompt)

    def withdraw(self, samples: Collection[int]) -> None:
        """Take samples that wait for a slot out of the queue."""
        left: deque[Prompt] = deque()
        for place, prompt in enumerate(self._queue):
            begun = self._begun if place == 0 else 0
            stay = (*prompt.samples[:begun], *(s for s in prompt.samples[begun:] if s not in samples))
            if len(stay) > begun:
                left.append(replace(prompt, samples=stay))
            elif place == 0:
                self._begun = 0
        self._queue = left

    def seat(self, sample: int, prompt: int) -> int | None:
        """Give a sample of another rank a slot, parked for :meth:`read`; None where it has to wait like others."""
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
        self._num_running = self._begun = 0

    def next_step(self) -> Step:
        """Read on, admit whom there is room for, and put those who run into the first slots."""
        may_admit = self._queue and len(self._slots) < self._num_slots and not self._waits_on
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
        """Return what of it is read in this step; its samples run if that is all, and are parked otherwise."""
        end = min(unread.end, unread.begin + budget)
        if end == unread.end:
            self._parked.difference_update(unread.samples)
        else:
            self._parked.update(unread.samples)
            self._unread.append(Unread(unread.samples, end, unread.end))
        return Unread(unread.samples, unread.begin, end)

    def _admit(self, budget: int, being_read: Collection[int]) -> tuple[list[Admission], list[Unread]]:
        """Return who gets slots, and what of their prompts is read at once.

        A prompt that samples are still reading in this step cannot be copied from them yet.
        """
        admissions, parts = [], []
        holes = deque(slot for slot, sample in enumerate(self._slots) if sample is None)
        while self._queue and not self._waits_on:
            prompt = self._queue[0]
            room = len(holes) + self._num_slots - len(self._slots)
            may_begin = prompt.samples[0] not in being_read if self._begun else self._may_read(prompt, budget)
            if not room or not may_begin:
                break
            source = self._resident.index(prompt.index) if self._begun else None
            samples = prompt.samples[self._begun : self._begun + room]
            slots = tuple(self._take_slot(holes, sample, prompt.index) for sample in samples)
            admissions.append(Admission(prompt.index, samples, slots, source))
            if source is None:
                parts.append(self._read_some(Unread(samples, 0, prompt.num_tokens), budget))
                budget -= parts[-1].end
            self._begun += len(samples)
            if self._begun == len(prompt.samples):
                self._queue.popleft()
                self._begun = 0
        return admissions, parts

    def _may_read(self, prompt: Prompt, budget: int) -> bool:
        """Return whether to begin a prompt with what is left of the budget.

        Only what exceeds a whole budget is cut, and not for the last crumbs of one.
        """
        whole = self._max_prefill_tokens
        return prompt.num_tokens <= budget or (prompt.num_tokens > whole and 2 * budget >= whole)

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
        """Bring every running sample that is behind the first slots into one of them, the last one first."""
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
                moves.append(Move(source, slot))  # a copy: what `source` holds is still there
            else:
                moves.append(Swap(source, slot))
                self._resident[source] = left
        while self._slots and self._slots[-1] is None:
            self._slots.pop()
            self._resident.pop()
        return tuple(moves)
