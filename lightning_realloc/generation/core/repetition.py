"""Tokens that each sequence holds already, for the repetition penalty; drafted tokens count for those after them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_realloc.generation.core.sample import Sample

Repeated = tuple[Tensor, Tensor]
"""Rows of the logits (M,) and tokens (M,) that the sequences before them hold, one pair for each."""


class HeldTokens:
    """The tokens of prompts and responses, kept up while these grow. One per generation."""

    def __init__(self) -> None:
        """Know of no sample yet."""
        self._of: dict[int, Tensor] = {}
        """Sample, by identity, -> its tokens so far. One that comes again is there again, and penalized once."""

    def of_rows(self, samples: Sequence[Sample], drafts: Sequence[Sequence[int]], device: torch.device) -> Repeated:
        """Return what the sequence before each row of logits holds.

        Every sample has a row behind its last token, and one behind each token of its draft: if that row counts, all
        of the draft before it stood, and is part of the sequence.
        """
        rows: list[Tensor] = []
        tokens: list[Tensor] = []
        row = 0
        for sample, draft in zip(samples, drafts, strict=True):
            held = self._held(sample)
            for length in range(len(draft) + 1):
                seen = torch.cat([held, torch.tensor(draft[:length], dtype=torch.int64)]) if length else held
                rows.append(torch.full_like(seen, row))
                tokens.append(seen)
                row += 1
        return torch.cat(rows).to(device), torch.cat(tokens).to(device)

    def _held(self, sample: Sample) -> Tensor:
        held, length = self._of.get(id(sample), torch.empty(0, dtype=torch.int64)), sample.position + 1
        if len(held) < length:
            held = torch.cat([held, torch.tensor(sample.tokens(len(held), length), dtype=torch.int64)])
            self._of[id(sample)] = held
        return held


def penalized(logits: Tensor, repeated: Repeated, penalty: float) -> Tensor:
    """Return the logits (B, V) in float32, of repeated tokens over ``penalty`` where positive, else times it.

    Source: Keskar et al., arXiv:1909.05858, section 4.1, as transformers' ``RepetitionPenaltyLogitsProcessor`` has it.
    """
    rows, tokens = repeated
    values = logits[rows, tokens].float()
    values = torch.where(values < 0, values * penalty, values / penalty)
    return logits.float().index_put((rows, tokens), values)
