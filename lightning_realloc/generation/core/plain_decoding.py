"""Plain decoding: one token for each running sample and step, and the hooks by which speculative decoding does more."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_realloc.generation.core.noise import keyed_uniforms
from lightning_realloc.generation.core.repetition import HeldTokens, Repeated
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.sampling import Forbidden, SamplingParams, Scratch, sample_tokens

if TYPE_CHECKING:
    from lightning_realloc.generation.cache.kv_cache import KVCache

Emitted = tuple[list[int], list[float]]
"""Tokens of one sample, and their log-probabilities."""


class KeyedSampler:
    """Draws tokens by inverse distribution, with one random number for each sample and place of its response."""

    def __init__(self, params: SamplingParams) -> None:
        """Draw with the temperature, filters and penalties of ``params``."""
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
        uniforms = torch.tensor(keyed_uniforms(keys, places), dtype=torch.float64, device=logits.device)
        return sample_tokens(
            logits, uniforms, self._params, forbidden=forbidden, repeated=repeated, scratch=self._scratch
        )

    def repeated(
        self, samples: Sequence[Sample], drafts: Sequence[Sequence[int]], device: torch.device
    ) -> Repeated | None:
        """Return the tokens that a repetition penalty counts for each row of logits; None without a penalty."""
        return None if self._held is None else self._held.of_rows(samples, drafts, device)


class Decoding:
    """Plain decoding. `Speculator` overrides it; all hooks about slots do nothing here."""

    max_ahead = 0
    """Most tokens that a step reads after a sample's last one."""
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
        """Return the tokens that this step reads after the last one of each running sample.

        ``being_read``: slots whose prompts this step reads. ``is_tail``: no sample waits for a slot.
        """
        return [()] * len(running)

    def emit(self, logits: Tensor, running: Sequence[Sample], forbidden: Forbidden | None) -> list[Emitted]:
        """Return the next tokens of each running sample, one at least.

        ``logits`` (N, V) holds for every sample those after its last token and after each token of `propose`.
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
        """Return the fields of `GenerationStats` that this counts."""
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
