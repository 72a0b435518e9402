"""Boundaries of the sequences of a packed row, an argument of the attention function."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from torch import Tensor

from lightning_realloc.runtime.forward.token_group import RowDivision


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent segments of equal length that see equally many shared tokens."""

    count: int
    """Number of segments."""
    length: int
    """Tokens of each segment."""
    shared: int
    """Shared prompt tokens that each segment sees. The last segment with ``shared=0`` before the run holds them."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Boundaries of the sequences of a pack."""

    lengths: tuple[int, ...]
    """Tokens of each of the B sequences in the row."""
    cu_seqlens: Tensor
    """(B + 1,) int32 cumulative lengths on the model's device."""
    shared: tuple[int, ...]
    """Shared prompt tokens that each sequence sees. The last sequence before it with a 0 here holds them."""
    division: RowDivision | None = None
    """How ranks divide the tokens of the row; None: the model runs on all of them."""
    row: Tensor | None = None
    """(1, N) token ids of the whole row, by which a pipeline's stage knows its micro-batch."""
    blocks: Tensor | None = None
    """(N,) image that each token belongs to, -1 for text, in models where an image's tokens see later ones of it."""
    masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    """Additive masks, made once for all layers."""

    @property
    def runs(self) -> list[Run]:
        """Runs of adjacent sequences that are alike, in order, such as a group's responses of one length."""
        kinds = itertools.groupby(zip(self.lengths, self.shared, strict=True))
        return [Run(len(list(members)), length, shared) for (length, shared), members in kinds]
