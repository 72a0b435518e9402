"""Draw tokens with one random number for each sample and place, and track the tokens that sequences hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_realloc.generation.core.noise import uniforms_on
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.sampling import Repeated, Scratch, sample_tokens
from lightning_realloc.generation.core.step import Draft, Emitted, Forbidden


class HeldTokens:
    """Tokens that each sequence holds, for the repetition penalty; one object per generation."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}
        """Tokens by the id of their sample; a token that occurs twice is penalized once."""

    def of_rows(self, samples: Sequence[Sample], drafts: Sequence[Sequence[int]], device: torch.device) -> Repeated:
        """Return the tokens of the sequence before each row of logits.

        Each sample has a row after its last token and one after each drafted token, whose sequence includes the draft.
        """
        rows: list[Tensor] = []
        tokens: list[Tensor] = []
        for sample, draft in zip(samples, drafts, strict=True):
            held = self._update(sample)
            for length in range(len(draft) + 1):
                seen = torch.cat([held, torch.tensor(draft[:length], dtype=torch.int64)]) if length else held
                rows.append(torch.full_like(seen, len(rows)))
                tokens.append(seen)
        return torch.cat(rows).to(device), torch.cat(tokens).to(device)

    def _update(self, sample: Sample) -> Tensor:
        held, length = self._held.get(id(sample), torch.empty(0, dtype=torch.int64)), sample.position + 1
        if len(held) < length:
            held = torch.cat([held, torch.tensor(sample.tokens(len(held), length), dtype=torch.int64)])
            self._held[id(sample)] = held
        return held


class TokenSampler:
    """Sampling parameters, and the tokens that a repetition penalty counts."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._held = HeldTokens() if params.penalizes else None

    def repeated(
        self, samples: Sequence[Sample], drafts: Sequence[Sequence[int]], device: torch.device
    ) -> Repeated | None:
        """Return the tokens to penalize in each row of logits; None without a repetition penalty."""
        return None if self._held is None else self._held.of_rows(samples, drafts, device)


class KeyedSampler(TokenSampler):
    """Draws tokens by inverse transform sampling, with one random number per sample and position.

    It draws one token per sample, and takes no drafts.
    """

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self._scratch = Scratch()

    def emit(
        self, logits: Tensor, samples: Sequence[Sample], drafts: Sequence[Draft], forbidden: Forbidden | None
    ) -> list[Emitted]:
        """Return each sample's next token; ``logits`` (B, V) has a row for each."""
        tokens, logprobs = self.draw_next(logits, samples, forbidden=forbidden)
        return [([token], [logprob]) for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True)]

    def draw_next(
        self, logits: Tensor, samples: Sequence[Sample], *, offset: int = 0, forbidden: Forbidden | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a token per row of ``logits`` (B, V), ``offset`` places after the next one, and its log-probability.

        A repetition penalty counts the tokens that the samples hold.
        """
        keys, places = [sample.key for sample in samples], [len(sample.token_ids) + offset for sample in samples]
        repeated = self.repeated(samples, [()] * len(samples), logits.device)
        return self.draw(logits, keys, places, forbidden, repeated)

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
