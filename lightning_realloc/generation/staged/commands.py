"""Commands of the last stage to the others, as plain data: slots that change, and the tokens of a forward.

Draws stay on the last stage, so a command holds no more of a step than its forward reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, get_args

from lightning_realloc.errors import GenerationError, require_choice
from lightning_realloc.generation.cache.paged_cache import PageSizes
from lightning_realloc.generation.core.step import DecodeRow, ForwardStep, PrefillChunk


class PageMeasurement(NamedTuple):
    """Runs a dummy forward of a group, which shows the layers' shapes, and finds the largest pages of all stages."""

    group: int


class PageAllocation(NamedTuple):
    """Allocates the pages of a group."""

    group: int
    sizes: PageSizes


class Opening(NamedTuple):
    """Begins a generation."""

    num_slots: int
    """Slots of each group, to begin with."""
    num_running: int
    """Most samples of a group that run."""
    num_kept: int
    """Most further samples that keep a slot while they wait."""
    longest: int
    """Most positions of a slot of this rank's samples."""
    num_steps: int
    """Most tokens of a response."""
    version: int | None
    """Version of the weights; None: stages get weights between calls only."""
    role: str | None = None
    """Role of the model, among those that environments of the call ask; None: the one whose call it is."""


ChangeName = Literal["may_need", "make_room", "copy", "move", "swap", "set_pages"]


@dataclass(frozen=True, slots=True)
class SlotChange:
    """One call of the method of `StageRunner` that has this name."""

    name: ChangeName
    arguments: tuple[Any, ...]

    def __post_init__(self) -> None:
        require_choice("name", self.name, get_args(ChangeName), GenerationError)


class StageStep(NamedTuple):
    """Changes of a group's slots, and the forward after them."""

    group: int
    changes: tuple[SlotChange, ...]
    prefills: tuple[PrefillChunk, ...]
    tokens: Sequence[int]
    """Tokens of all rows, row after row."""
    counts: Sequence[int]
    """Number of tokens of each row."""
    positions: Sequence[int]
    """Position of the first token of each row."""
    shifts: Sequence[int]
    """What the model's positions of each row's tokens are more than their places."""

    @classmethod
    def of(cls, group: int, changes: Sequence[SlotChange], step: ForwardStep) -> StageStep:
        """Return the command for a step."""
        return cls(
            group,
            tuple(changes),
            tuple(step.prefills),
            [token for row in step.rows for token in row.tokens],
            [len(row.tokens) for row in step.rows],
            [row.position for row in step.rows],
            [row.shift for row in step.rows],
        )

    @property
    def rows(self) -> list[DecodeRow]:
        """Rows of the forward, without what only draws need."""
        bounds = pairwise(accumulate(self.counts, initial=0))
        return [
            DecodeRow(self.tokens[begin:end], position, shift=shift)
            for (begin, end), position, shift in zip(bounds, self.positions, self.shifts, strict=True)
        ]


GroupCommand = PageMeasurement | PageAllocation | StageStep
"""Commands that change one group."""


class NewWeights(NamedTuple):
    """Fills the weights with a newer version; no step is under way."""

    version: int


class Closing(NamedTuple):
    """Ends a generation; ``has_failed``: by an error, perhaps with steps under way."""

    has_failed: bool


class Leaving(NamedTuple):
    """Ends the call, which may hold several generations; ``has_failed``: by an error of the last stage."""

    has_failed: bool
