"""Plain decoding: one token per running sample and step, and the hooks that speculative decoding overrides."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_realloc.generation.core.noise import uniforms_on
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.sampling import Forbidden, Repeated, SamplingParams, Scratch, sample_tokens

if TYPE_CHECKING:
    from lightning_realloc.generation.cache.kv_cache import KVCache

Emitted = tuple[list[int], list[float]]
"""Tokens of one sample, and their log-probabilities."""


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


class KeyedSampler:
    """Draws tokens by inverse transform sampling, with one random number per sample and position."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._scratch = Scratch()
        self._held = HeldTokens() if params.penalizes else None

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

    def repeated(
        self, samples: Sequence[Sample], drafts: Sequence[Sequence[int]], device: torch.device
    ) -> Repeated | None:
        """Return the tokens to penalize in each row of logits; None without a repetition penalty."""
        return None if self._held is None else self._held.of_rows(samples, drafts, device)


class Decoding:
    """Plain decoding. `Speculator` overrides it; the hooks about slots do nothing here."""

    max_ahead = 0
    """Most drafted tokens that a step reads after a sample's last one."""
    adapts = False
    """Whether measured seconds decide how many tokens a step reads."""

    def begin(self, samples: Sequence[Sample], params: SamplingParams, num_slots: int) -> None:
        """Start a generation of these samples."""
        self._sampler = KeyedSampler(params)

    def end(self, *, has_failed: bool = False) -> None:
        """End the generation."""

    def propose(
        self, running: Sequence[Sample], being_read: Collection[int], *, is_tail: bool
    ) -> Sequence[Sequence[int]]:
        """Return a draft for each running sample.

        Args:
            running: Samples by slot.
            being_read: Slots whose prompts this step reads.
            is_tail: Whether no sample waits for a slot.
        """
        return [()] * len(running)

    def emit(self, logits: Tensor, running: Sequence[Sample], forbidden: Forbidden | None) -> list[Emitted]:
        """Return the next tokens of each running sample, at least one.

        ``logits`` (N, V) holds one row after each sample's last token and one after each token of `propose`.
        """
        keys, places = [sample.key for sample in running], [len(sample.token_ids) for sample in running]
        repeated = self._sampler.repeated(running, [()] * len(running), logits.device)
        tokens, logprobs = self._sampler.draw(logits, keys, places, forbidden, repeated)
        return [([token], [logprob]) for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True)]

    def end_step(self, *, is_typical: bool) -> None:
        """End a step whose tokens were taken. ``is_typical``: later steps of its size will take about as long."""

    def finished(self, sample: Sample) -> None:
        """Take a sample that has its last token."""

    def counts(self) -> dict[str, float]:
        """Return the fields of `GenerationStats` that this class counts."""
        return {}

    def share_cache(self, cache: KVCache) -> None:
        """Take the cache of the target's keys and values for the next generation."""

    def admitted(self, slots: Sequence[int]) -> None:
        """Take that new samples are in these slots."""

    def copied(self, source: int, targets: Sequence[int], length: int) -> None:
        """Take that the first ``length`` positions of slot ``source`` were copied to others."""

    def kept(self, slot: int, length: int) -> None:
        """Take that another sample of the same prompt continues a slot from ``length`` on."""

    def swapped(self, first: int, second: int) -> None:
        """Take that two slots exchanged their content."""
