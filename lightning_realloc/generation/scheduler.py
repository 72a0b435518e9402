"""Which sample runs in which slot, and when. Pure: it sees lengths and indices, never a token or a tensor.

Invariants, held by a property test: after every turn the running samples fill the first slots without holes; every
sample is admitted exactly once; a prompt is computed once however many samples it has, and its other samples copy it
from a slot that still holds it; a copy or a move never reads a slot that an earlier one of the turn overwrote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
    """Samples of one prompt that begin in this turn."""

    prompt: int
    samples: tuple[int, ...]
    slots: tuple[int, ...]
    """One per sample."""
    source: int | None
    """A slot that holds this prompt already; None: the prompt has to be computed."""


@dataclass(frozen=True, slots=True)
class Move:
    """A running sample changes its slot."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What to do before the next forward, in this order: copy prompts of ``admissions``, carry out ``moves``."""

    admissions: tuple[Admission, ...]
    moves: tuple[Move, ...]


class Scheduler:
    """Continuous batching over a fixed number of slots, with refill and compaction.

    Slots of finished samples are given to waiting ones first; only when nobody waits is the last running sample
    moved into the hole, so that a forward always works on the first slots.
    """

    def __init__(self, prompts: Iterable[Prompt], *, num_slots: int, max_prefill_tokens: int = 8192) -> None:
        """Order the prompts by length hint, longest first; equal hints keep the order given.

        ``max_prefill_tokens`` bounds the prompt tokens computed in one turn; one prompt is always let through.
        """
        self._queue = deque(sorted(prompts, key=lambda prompt: -prompt.length_hint))
        self._num_slots = num_slots
        self._max_prefill_tokens = max_prefill_tokens
        self._begun = 0
        """Samples of the prompt at the head of the queue that were admitted already."""
        self._running: list[int | None] = []
        """Sample per slot; None: finished in the last turn."""
        self._resident: list[int] = []
        """Prompt whose keys and values the slot holds."""

    @property
    def running(self) -> Sequence[int | None]:
        """The sample in each slot, None in a slot whose sample finished since the last turn."""
        return self._running

    @property
    def num_waiting(self) -> int:
        """Prompts with samples that have no slot yet."""
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        """Whether any sample runs or waits."""
        return bool(self._queue) or any(sample is not None for sample in self._running)

    def finish(self, slot: int) -> None:
        """Take the sample out of ``slot``. What the slot holds stays usable until the next turn's moves."""
        assert self._running[slot] is not None, f"slot {slot} has no running sample"
        self._running[slot] = None

    def next_turn(self) -> Turn:
        """Admit whom there is room for and close the holes that remain."""
        holes = deque(slot for slot, sample in enumerate(self._running) if sample is None)
        if not holes and not self._queue:
            return Turn((), ())
        admissions = self._admit(holes)
        return Turn(admissions, self._compact(holes))

    def _admit(self, holes: deque[int]) -> tuple[Admission, ...]:
        admissions = []
        budget = self._max_prefill_tokens
        while self._queue:
            prompt = self._queue[0]
            room = len(holes) + self._num_slots - len(self._running)
            source = self._resident.index(prompt.index) if self._begun else None
            too_much = source is None and prompt.num_tokens > budget and budget < self._max_prefill_tokens
            if not room or too_much:
                break
            samples = prompt.samples[self._begun : self._begun + room]
            slots = tuple(self._take_slot(holes, sample, prompt.index) for sample in samples)
            admissions.append(Admission(prompt.index, samples, slots, source))
            budget -= prompt.num_tokens if source is None else 0
            self._begun += len(samples)
            if self._begun == len(prompt.samples):
                self._queue.popleft()
                self._begun = 0
        return tuple(admissions)

    def _take_slot(self, holes: deque[int], sample: int, prompt: int) -> int:
        if not holes:
            self._running.append(sample)
            self._resident.append(prompt)
            return len(self._running) - 1
        slot = holes.popleft()
        self._running[slot] = sample
        self._resident[slot] = prompt
        return slot

    def _compact(self, holes: deque[int]) -> tuple[Move, ...]:
        moves = []
        for hole in holes:
            self._drop_finished_at_the_end()
            if hole >= len(self._running):
                break
            moves.append(Move(len(self._running) - 1, hole))
            self._running[hole] = self._running.pop()
            self._resident[hole] = self._resident.pop()
        self._drop_finished_at_the_end()
        return tuple(moves)

    def _drop_finished_at_the_end(self) -> None:
        while self._running and self._running[-1] is None:
            self._running.pop()
            self._resident.pop()
