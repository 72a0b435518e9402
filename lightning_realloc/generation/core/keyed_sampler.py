"""Draw tokens with one random number for each sample and place, and track the tokens that sequences hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_realloc.generation.core.noise import uniforms_on
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sampling import Repeated, Scratch, sample_tokens
from lightning_realloc.generation.core.step import DecodeRow, Emitted, Forbidden


class HeldTokens:
    """Tokens that each sequence holds, for the repetition penalty; one object per generation."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}
        """Tokens by the key of their sample; a token that occurs twice is penalized once."""

    def of_rows(self, rows: Sequence[DecodeRow], device: torch.device) -> Repeated:
        """Return the tokens of the sequence up to each token of each row, after which there is a row of logits."""
        indices: list[Tensor] = []
        tokens: list[Tensor] = []
        for row in rows:
            held = self._update(row)
            for length in range(len(row.tokens)):
                seen = torch.cat([held, torch.tensor(row.drafted[:length], dtype=torch.int64)]) if length else held
                indices.append(torch.full_like(seen, len(indices)))
                tokens.append(seen)
        return torch.cat(indices).to(device), torch.cat(tokens).to(device)

    def _update(self, row: DecodeRow) -> Tensor:
        held = self._held.get(row.key, torch.empty(0, dtype=torch.int64))
        if len(held) <= row.position:
            new = (*row.held[len(held) :], row.tokens[0])
            held = self._held[row.key] = torch.cat([held, torch.tensor(new, dtype=torch.int64)])
        return held


class TokenSampler:
    """Sampling parameters, and the tokens that a repetition penalty counts."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._held = HeldTokens() if params.penalizes else None

    def repeated(self, rows: Sequence[DecodeRow], device: torch.device) -> Repeated | None:
        """Return the tokens to penalize in each row of logits; None without a repetition penalty."""
        return None if self._held is None else self._held.of_rows(rows, device)


class KeyedSampler(TokenSampler):
    """Draws tokens by inverse transform sampling, with one random number per sample and position.

    It draws one token per sample, and takes no drafts.
    """

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self._scratch = Scratch()

    def emit(self, logits: Tensor, rows: Sequence[DecodeRow], forbidden: Forbidden | None) -> list[Emitted]:
        """Return the next token of each row, which has no draft; ``logits`` is (B, V)."""
        keys, places = [row.key for row in rows], [row.place for row in rows]
        tokens, logprobs = self.draw(logits, keys, places, forbidden, self.repeated(rows, logits.device))
        return [([token], [logprob]) for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True)]

    def draw(
        self,
        logits: Tensor,
        keys: Sequence[int],
        places: Sequence[int],
        forbidden: Forbidden | None = None,
        repeated: Repeated | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return a token and its log-probability for each row of ``logits`` (N, V)."""
        uniforms = uniforms_on(logits.device, keys, places)
        return sample_tokens(
            logits, uniforms, self._params, forbidden=forbidden, repeated=repeated, scratch=self._scratch
        )
