"""Verification of drafted tokens: accept or reject each of them, and draw the next token.

With any drafts, responses follow the target's distribution. Under `KeyedDraws` the target draws every token with the
random number of its place, and accepts a drafted token that equals the drawn one. So a response is the same, token for
token, with any drafts and with none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_realloc.generation.core.keyed_sampler import KeyedSampler, TokenSampler
from lightning_realloc.generation.core.noise import gumbel_noise, keyed_uniform, stream_key, uniforms_on
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.sampling import (
    Repeated,
    draw_gumbel,
    draw_weights,
    sampling_logprobs,
    sampling_weights,
)
from lightning_realloc.generation.core.step import NO_DRAFT, DecodeRow, DrawRule, Emitted, Forbidden, decode_rows

_ACCEPT, _FINAL, _DRAFT = 1, 2, 3  # random streams of a sample, since rejection needs several numbers for each token


class Verification(DrawRule, ABC):
    """A rule that turns drafts, and the target's logits after them, into tokens."""

    needs_laws: bool = False
    """Whether drafts must carry the distribution that each token was drawn from."""

    @abstractmethod
    def draw_among(self, followers: Sequence[int], sample: Sample, offset: int) -> int:
        """Return the index of one of ``followers`` to draft ``offset`` tokens ahead.

        ``followers`` are sorted. A token that followed twice occurs twice.
        """

    @abstractmethod
    def draw_drafts(
        self, logits: Tensor, samples: Sequence[Sample], offset: int
    ) -> tuple[list[int], Sequence[Tensor] | None]:
        """Return a token per row of a drafter's logits (B, V) to draft ``offset`` tokens ahead, and the probabilities
        (V,) that each was drawn from; None unless `needs_laws`.

        A repetition penalty does not count tokens drafted before this one. The target applies the exact penalty.
        """


class KeyedDraws(KeyedSampler, Verification):
    """The target draws with the random number of each place, and accepts a drafted token that equals the drawn one.

    A drafter draws with the same numbers. If its distribution is the target's own, every drafted token is accepted.
    """

    def emit(self, logits: Tensor, rows: Sequence[DecodeRow], forbidden: Forbidden | None) -> list[Emitted]:
        keys, places = _places(rows)
        drawn, of_drawn = self.draw(logits, keys, places, forbidden, self.repeated(rows, logits.device))
        return _while_equal(drawn.tolist(), of_drawn.tolist(), rows)

    def draw_among(self, followers: Sequence[int], sample: Sample, offset: int) -> int:
        if self._params.greedy:
            return _index_of_most_common(followers)
        return int(keyed_uniform(sample.key, len(sample.token_ids) + offset) * len(followers))

    def draw_drafts(self, logits: Tensor, samples: Sequence[Sample], offset: int) -> tuple[list[int], None]:
        rows = _undrafted(samples, self._params)
        keys, places = [row.key for row in rows], [row.place + offset for row in rows]
        return self.draw(logits, keys, places, repeated=self.repeated(rows, logits.device))[0].tolist(), None


class GumbelDraws(KeyedDraws):
    """As `KeyedDraws`, but by the largest sum of log-probability and Gumbel noise, which is keyed by place and token.

    Where drafter and target differ by a total variation of d, a draft is accepted with a probability of at least
    (1 - d) / (1 + d), in any order of the vocabulary. Source: Daliri et al., arXiv:2408.07978, theorem 3.
    """

    def draw_among(self, followers: Sequence[int], sample: Sample, offset: int) -> int:
        if self._params.greedy:
            return _index_of_most_common(followers)
        tokens, counts = torch.unique(torch.tensor(followers), return_counts=True)
        noise = gumbel_noise([sample.key], [len(sample.token_ids) + offset], tokens[None])[0]
        return followers.index(int(tokens[(counts.double().log() + noise).argmax()]))

    def draw(
        self,
        logits: Tensor,
        keys: Sequence[int],
        places: Sequence[int],
        forbidden: Forbidden | None = None,
        repeated: Repeated | None = None,
    ) -> tuple[Tensor, Tensor]:
        weights = sampling_weights(logits, self._params, forbidden=forbidden, repeated=repeated)
        tokens = draw_gumbel(weights, keys, places)
        return tokens, sampling_logprobs(logits, tokens, self._params)


class Rejection(TokenSampler, Verification):
    """Rejection sampling: a drafted token is accepted with probability ``min(1, target / drafter)``.

    The token in place of the first rejected one is drawn from the positive part of ``target - drafter``. Responses
    follow the target's distribution, but change with the drafts.

    Source: Leviathan et al., arXiv:2211.17192, algorithm 1.
    """

    needs_laws = True

    def emit(self, logits: Tensor, rows: Sequence[DecodeRow], forbidden: Forbidden | None) -> list[Emitted]:
        repeated = self.repeated(rows, logits.device)
        weights = sampling_weights(logits, self._params, forbidden=forbidden, repeated=repeated)
        starts = _starts(rows)
        accepted = self._num_accepted(weights, starts, rows)
        finals = self._finals(weights, starts, rows, accepted)
        tokens = [[*row.drafted[:n], final] for row, n, final in zip(rows, accepted, finals, strict=True)]
        after = torch.tensor([start + j for start, own in zip(starts, tokens, strict=True) for j in range(len(own))])
        flat = torch.tensor([token for own in tokens for token in own], device=logits.device)
        logprobs = iter(sampling_logprobs(logits[after.to(logits.device)], flat, self._params).tolist())
        return [(own, [next(logprobs) for _ in own]) for own in tokens]

    def draw_among(self, followers: Sequence[int], sample: Sample, offset: int) -> int:
        uniform = keyed_uniform(stream_key(sample.key, _DRAFT), len(sample.token_ids) + offset)
        return int(uniform * len(followers))

    def draw_drafts(
        self, logits: Tensor, samples: Sequence[Sample], offset: int
    ) -> tuple[list[int], Sequence[Tensor] | None]:
        rows = _undrafted(samples, self._params)
        laws = sampling_weights(logits, self._params, repeated=self.repeated(rows, logits.device))
        tokens = draw_weights(laws, _uniforms(rows, _DRAFT, [row.place + offset for row in rows], laws.device))
        return tokens.tolist(), laws.unbind()

    def _num_accepted(self, weights: Tensor, starts: Sequence[int], rows: Sequence[DecodeRow]) -> list[int]:
        """Return the number of accepted tokens of each draft."""
        drafted = [(start + j, token) for start, row in zip(starts, rows, strict=True)
                   for j, token in enumerate(row.drafted)]  # fmt: skip
        if not drafted:
            return [0] * len(rows)
        before, tokens = torch.tensor(drafted, device=weights.device).unbind(1)
        laws = torch.stack([_dense(law, weights[0]) for row in rows for law in row.laws])
        target = weights[before, tokens].double()
        drafter = laws.gather(1, tokens[:, None])[:, 0].double()
        owners = [(row, j) for row in rows for j in range(len(row.drafted))]
        places = [row.place + j for row, j in owners]
        uniforms = _uniforms([row for row, _ in owners], _ACCEPT, places, weights.device)
        are_accepted = iter((uniforms * drafter < target).tolist())
        verdicts = [[next(are_accepted) for _ in row.drafted] for row in rows]
        return [own.index(False) if False in own else len(own) for own in verdicts]

    def _finals(
        self, weights: Tensor, starts: Sequence[int], rows: Sequence[DecodeRow], accepted: Sequence[int]
    ) -> list[int]:
        """Return the token after the last accepted one of each draft."""
        after = torch.tensor([start + n for start, n in zip(starts, accepted, strict=True)], device=weights.device)
        left = weights[after]
        for index, (row, n) in enumerate(zip(rows, accepted, strict=True)):
            if n < len(row.drafted):
                left[index] = (left[index] - _dense(row.laws[n], left[index])).clamp_min_(0.0)
        places = [row.place + n for row, n in zip(rows, accepted, strict=True)]
        tokens: list[int] = draw_weights(left, _uniforms(rows, _FINAL, places, left.device)).tolist()
        return tokens


def _while_equal(drawn: Sequence[int], logprobs: Sequence[float], rows: Sequence[DecodeRow]) -> list[Emitted]:
    """Return the tokens drawn for each sample, up to the first one that differs from its draft, which is included."""
    emitted = []
    for start, row in zip(_starts(rows), rows, strict=True):
        stop = start
        for token in row.drafted:
            if drawn[stop] != token:
                break
            stop += 1
        emitted.append((list(drawn[start : stop + 1]), list(logprobs[start : stop + 1])))
    return emitted


def _undrafted(samples: Sequence[Sample], params: SamplingParams) -> list[DecodeRow]:
    return decode_rows(samples, [NO_DRAFT] * len(samples), params)


def _places(rows: Sequence[DecodeRow]) -> tuple[list[int], list[int]]:
    """Return the sample's key and the place in its response for every row of the logits."""
    owners = [(row, offset) for row in rows for offset in range(len(row.tokens))]
    return [row.key for row, _ in owners], [row.place + offset for row, offset in owners]


def _starts(rows: Sequence[DecodeRow]) -> list[int]:
    """Return the first row of each sample in the logits."""
    return [0, *accumulate(len(row.tokens) for row in rows)][:-1]


def _uniforms(rows: Sequence[DecodeRow], stream: int, places: Sequence[int], device: torch.device) -> Tensor:
    return uniforms_on(device, [stream_key(row.key, stream) for row in rows], places)


def _dense(law: Tensor | tuple[int, ...], like: Tensor) -> Tensor:
    """Return a law as a distribution (V,)."""
    if isinstance(law, Tensor):
        return law
    tokens = torch.tensor(law, device=like.device)
    return torch.zeros_like(like).index_add_(0, tokens, like.new_full((len(law),), 1 / len(law)))


def _index_of_most_common(followers: Sequence[int]) -> int:
    return followers.index(max(sorted(set(followers)), key=followers.count))
