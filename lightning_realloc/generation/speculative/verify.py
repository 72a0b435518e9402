"""Which of the drafted tokens stand, and which token comes after them.

Whatever was drafted, the responses follow the target's distribution. `KeyedDraws` goes further: the target draws every
token with the noise of its place, so a response is the same, token for token, with any drafts and with none. A draft
stands where it names the token that the target drew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_realloc.generation.core.noise import gumbel_noise, keyed_uniform, keyed_uniforms, stream_key
from lightning_realloc.generation.core.repetition import HeldTokens, Repeated
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.sampling import (
    Forbidden,
    SamplingParams,
    Scratch,
    draw_gumbel,
    draw_weights,
    sample_tokens,
    sampling_weights,
    token_logprobs,
)

Emitted = tuple[list[int], list[float]]
"""Tokens of one sample, and their log-probabilities."""
_ACCEPT, _FINAL, _DRAFT = 1, 2, 3  # streams of a sample beside its own, for a rule that needs several numbers a token


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a sample's last one."""

    tokens: Sequence[int] = ()
    kinds: Sequence[object] = ()
    """What each token's chance to stand is told by: tokens of one kind share an estimate."""
    laws: Sequence[Tensor | tuple[int, ...]] = ()
    """What each token was drawn from, where the rule does not anticipate: a distribution (V,), or tokens that count the
    same."""

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> Draft:
        """Return the first ``length`` tokens."""
        return Draft(self.tokens[:length], self.kinds[:length], self.laws[:length])

    def without_laws(self) -> Draft:
        """Return the tokens and their kinds alone: distributions over the vocabulary are too large to keep."""
        return Draft(self.tokens, self.kinds) if self.laws else self


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class DrawnDrafts:
    """One drafted token per row, drawn from a drafter's logits."""

    tokens: list[int]
    confidences: list[float]
    """What the drafter gives the token, or, where that would anticipate it, its likeliest one."""
    laws: Tensor | None = None
    """(B, V) what the tokens were drawn from, where verification needs it."""


class Verification(ABC):
    """A rule that turns the target's logits behind a draft into tokens."""

    anticipates: bool = True
    """Whether how much of a draft is verified may depend on the very tokens that are left out. Where it may not,
    drafts say what they were drawn from."""

    @abstractmethod
    def emit(
        self, logits: Tensor, samples: Sequence[Sample], drafts: Sequence[Draft], forbidden: Forbidden | None
    ) -> list[Emitted]:
        """Return each sample's next tokens, one at least and at most one more than were drafted.

        ``logits`` (N, V) holds for every sample those behind its last token and behind each drafted one.
        """

    @abstractmethod
    def draw_among(self, followers: Sequence[int], sample: Sample, offset: int) -> int:
        """Return the index of one of ``followers``, sorted, to be drafted ``offset`` tokens ahead.

        Each of them counts the same: a token that followed twice is there twice.
        """

    @abstractmethod
    def draw_drafts(self, logits: Tensor, samples: Sequence[Sample], offset: int) -> DrawnDrafts:
        """Return a token per row of a drafter's logits (B, V), to be drafted ``offset`` tokens ahead.

        A repetition penalty counts what the samples hold, without the tokens drafted before this one: what is drafted
        is a guess, and what stands is decided by the target's own law.
        """


class KeyedDraws(Verification):
    """The target draws with the noise of each place by inverse distribution; a draft stands where it is what was drawn.

    A drafter draws with the same noise from what it takes for the distribution: where that is the target's own, every
    draft stands.
    """

    def __init__(self, params: SamplingParams) -> None:
        """Draw as ``params`` say."""
        self._params = params
        self._scratch = Scratch()
        self._held = HeldTokens() if params.penalizes else None

    def emit(
        self, logits: Tensor, samples: Sequence[Sample], drafts: Sequence[Draft], forbidden: Forbidden | None
    ) -> list[Emitted]:
        keys, places = _places(samples, drafts)
        repeated = _repeated(self._held, samples, drafts, logits.device)
        drawn, of_drawn = self._draw(logits, keys, places, forbidden, repeated)
        return _while_equal(drawn.tolist(), of_drawn.tolist(), drafts)

    def draw_among(self, followers: Sequence[int], sample: Sample, offset: int) -> int:
        if self._params.greedy:
            return _index_of_most_common(followers)
        return int(keyed_uniform(sample.key, len(sample.token_ids) + offset) * len(followers))

    def draw_drafts(self, logits: Tensor, samples: Sequence[Sample], offset: int) -> DrawnDrafts:
        keys, places = [sample.key for sample in samples], [len(sample.token_ids) + offset for sample in samples]
        repeated = _repeated(self._held, samples, [NO_DRAFT] * len(samples), logits.device)
        tokens, logprobs = self._draw(logits, keys, places, None, repeated)
        return DrawnDrafts(tokens.tolist(), logprobs.exp().tolist())

    def _draw(
        self,
        logits: Tensor,
        keys: Sequence[int],
        places: Sequence[int],
        forbidden: Forbidden | None,
        repeated: Repeated | None,
    ) -> tuple[Tensor, Tensor]:
        uniforms = torch.tensor(keyed_uniforms(keys, places), dtype=torch.float64, device=logits.device)
        return sample_tokens(
            logits, uniforms, self._params, forbidden=forbidden, repeated=repeated, scratch=self._scratch
        )


class GumbelDraws(KeyedDraws):
    """As `KeyedDraws`, with one number for every place and token: the largest sum of log-probability and noise wins.

    Where drafter and target differ by a total variation of d, a draft stands with a probability of at least
    (1 - d) / (1 + d), however the vocabulary is ordered. Source: Daliri et al., arXiv:2408.07978, theorem 3.
    """

    def draw_among(self, followers: Sequence[int], sample: Sample, offset: int) -> int:
        if self._params.greedy:
            return _index_of_most_common(followers)
        tokens, counts = torch.unique(torch.tensor(followers), return_counts=True)
        noise = gumbel_noise([sample.key], [len(sample.token_ids) + offset], tokens[None])[0]
        return followers.index(int(tokens[(counts.double().log() + noise).argmax()]))

    def _draw(
        self,
        logits: Tensor,
        keys: Sequence[int],
        places: Sequence[int],
        forbidden: Forbidden | None,
        repeated: Repeated | None,
    ) -> tuple[Tensor, Tensor]:
        weights = sampling_weights(logits, self._params, forbidden=forbidden, repeated=repeated)
        tokens = draw_gumbel(weights, keys, places)
        return tokens, token_logprobs(logits, tokens, self._params)


@dataclass
class Rejection(Verification):
    """A draft stands with probability ``min(1, target / drafter)``; what replaces the first that falls is drawn from
    what the target has more of. Responses follow the target's distribution, but change with the drafts.

    Source: Leviathan et al., arXiv:2211.17192, algorithm 1.
    """

    params: SamplingParams
    anticipates: bool = field(default=False, init=False)
    _held: HeldTokens | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._held = HeldTokens() if self.params.penalizes else None

    def emit(
        self, logits: Tensor, samples: Sequence[Sample], drafts: Sequence[Draft], forbidden: Forbidden | None
    ) -> list[Emitted]:
        repeated = _repeated(self._held, samples, drafts, logits.device)
        weights = sampling_weights(logits, self.params, forbidden=forbidden, repeated=repeated)
        starts = _starts(drafts)
        standing = self._standing(weights, starts, samples, drafts)
        finals = self._finals(weights, starts, samples, drafts, standing)
        tokens = [[*draft.tokens[:n], final] for draft, n, final in zip(drafts, standing, finals, strict=True)]
        rows = torch.tensor([start + j for start, own in zip(starts, tokens, strict=True) for j in range(len(own))])
        flat = torch.tensor([token for own in tokens for token in own], device=logits.device)
        logprobs = iter(token_logprobs(logits[rows.to(logits.device)], flat, self.params).tolist())
        return [(own, [next(logprobs) for _ in own]) for own in tokens]

    def draw_among(self, followers: Sequence[int], sample: Sample, offset: int) -> int:
        uniform = keyed_uniform(stream_key(sample.key, _DRAFT), len(sample.token_ids) + offset)
        return int(uniform * len(followers))

    def draw_drafts(self, logits: Tensor, samples: Sequence[Sample], offset: int) -> DrawnDrafts:
        repeated = _repeated(self._held, samples, [NO_DRAFT] * len(samples), logits.device)
        laws = sampling_weights(logits, self.params, repeated=repeated)
        places = [len(sample.token_ids) + offset for sample in samples]
        tokens = draw_weights(laws, _uniforms(samples, _DRAFT, places, laws.device))
        return DrawnDrafts(tokens.tolist(), laws.amax(-1).tolist(), laws)

    def _standing(
        self, weights: Tensor, starts: Sequence[int], samples: Sequence[Sample], drafts: Sequence[Draft]
    ) -> list[int]:
        """Return how many tokens of each draft stand."""
        drafted = [(start + j, token) for start, draft in zip(starts, drafts, strict=True)
                   for j, token in enumerate(draft.tokens)]  # fmt: skip
        if not drafted:
            return [0] * len(drafts)
        rows, tokens = torch.tensor(drafted, device=weights.device).unbind(1)
        laws = torch.stack([_dense(law, weights[0]) for draft in drafts for law in draft.laws])
        target = weights[rows, tokens].double()
        drafter = laws.gather(1, tokens[:, None])[:, 0].double()
        owners = [sample for sample, draft in zip(samples, drafts, strict=True) for _ in draft.tokens]
        places = [len(sample.token_ids) + j for sample, draft in zip(samples, drafts, strict=True)
                  for j in range(len(draft))]  # fmt: skip
        uniforms = _uniforms(owners, _ACCEPT, places, weights.device)
        stands = iter((uniforms * drafter < target).tolist())
        verdicts = [[next(stands) for _ in draft.tokens] for draft in drafts]
        return [own.index(False) if False in own else len(own) for own in verdicts]

    def _finals(
        self,
        weights: Tensor,
        starts: Sequence[int],
        samples: Sequence[Sample],
        drafts: Sequence[Draft],
        standing: Sequence[int],
    ) -> list[int]:
        """Return the token after each draft's last standing one."""
        rows = torch.tensor([start + n for start, n in zip(starts, standing, strict=True)], device=weights.device)
        left = weights[rows]
        for index, (draft, n) in enumerate(zip(drafts, standing, strict=True)):
            if n < len(draft):
                left[index] = (left[index] - _dense(draft.laws[n], left[index])).clamp_min_(0.0)
        places = [len(sample.token_ids) + n for sample, n in zip(samples, standing, strict=True)]
        tokens: list[int] = draw_weights(left, _uniforms(samples, _FINAL, places, left.device)).tolist()
        return tokens


def _repeated(
    held: HeldTokens | None, samples: Sequence[Sample], drafts: Sequence[Draft], device: torch.device
) -> Repeated | None:
    return None if held is None else held.of_rows(samples, [draft.tokens for draft in drafts], device)


def _while_equal(drawn: Sequence[int], logprobs: Sequence[float], drafts: Sequence[Draft]) -> list[Emitted]:
    """Return per sample what was drawn up to and with the first token that its draft does not name."""
    emitted, start = [], 0
    for draft in drafts:
        stop = start
        for token in draft.tokens:
            if drawn[stop] != token:
                break
            stop += 1
        emitted.append((list(drawn[start : stop + 1]), list(logprobs[start : stop + 1])))
        start += len(draft) + 1
    return emitted


def _places(samples: Sequence[Sample], drafts: Sequence[Draft]) -> tuple[list[int], list[int]]:
    """Return the key and the place in its response of every token that a forward's logits are for."""
    keys = [sample.key for sample, draft in zip(samples, drafts, strict=True) for _ in range(len(draft) + 1)]
    places = [len(sample.token_ids) + offset for sample, draft in zip(samples, drafts, strict=True)
              for offset in range(len(draft) + 1)]  # fmt: skip
    return keys, places


def _starts(drafts: Sequence[Draft]) -> list[int]:
    starts, start = [], 0
    for draft in drafts:
        starts.append(start)
        start += len(draft) + 1
    return starts


def _uniforms(samples: Sequence[Sample], stream: int, places: Sequence[int], device: torch.device) -> Tensor:
    numbers = keyed_uniforms([stream_key(sample.key, stream) for sample in samples], places)
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _dense(law: Tensor | tuple[int, ...], like: Tensor) -> Tensor:
    """Return a law as a distribution (V,)."""
    if isinstance(law, Tensor):
        return law
    tokens = torch.tensor(law, device=like.device)
    return torch.zeros_like(like).index_add_(0, tokens, like.new_full((len(law),), 1 / len(law)))


def _index_of_most_common(followers: Sequence[int]) -> int:
    return followers.index(max(sorted(set(followers)), key=followers.count))
