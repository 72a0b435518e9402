"""Prompts that a scheduler gets, and the step that it returns: samples that get slots, moves, and positions to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_realloc.generation.core.sample import Sample


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
    """Whether one step reads all its tokens, because further inputs of the model belong to some together."""

    @classmethod
    def of(cls, samples: Sequence[Sample], places: tuple[int, ...], number: int, length_hint: int = 0) -> Prompt:
        """Return the prompt of the samples at these places, to be read up to their last token."""
        first = samples[places[0]]
        return cls(number, first.position, places, length_hint, is_whole=bool(first.extras_between(0, first.position)))


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
class Entry:
    """Parts of a prompt that need not be read before its samples run."""

    source: int | None = None
    """Slot of another sample of the prompt; None if there is none."""
    pages: Sequence[int] = ()
    """Full pages that hold the beginning of the prompt."""
    num_held: int = 0
    """Number of positions that need not be read."""


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
    """Samples that lost their slot and its content before all this; they run on after a further admission."""


@dataclass(slots=True)
class Unread:
    """Positions of samples that are still to be read."""

    samples: tuple[int, ...]
    begin: int
    end: int
    is_whole: bool = False
    """Whether one step reads them all."""
