"""Rules that keep a policy's entropy up: a weight of the entropy that follows it, or tokens with losses of their own.

Tokens are marked before the first step of an iteration, among all its tokens, by the policy that drew them. So what is
learned depends on neither micro-batches nor ranks. Shapes: N tokens of all responses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.settings import check_not_negative, check_positive_numbers, check_share, wrong_kind
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.setting_hints import ENTROPY_HINTS, suggest_settings

EntropyName = Literal["adaptive", "clip-cov", "kl-cov", "top-share"]
"""Names of rules with their default constants."""


class EntropyRule:
    """Base of the rules: ``entropy=`` takes a value of a subclass, or a name.

    Not a dataclass itself: YAML could then name no subclass by ``class_path``.
    """

    reads_entropies: ClassVar[bool] = False
    """Whether tokens are marked by the entropies of their distributions, which a call ``actor.infer`` computes."""


@dataclass(frozen=True, kw_only=True)
class MarkingRule(EntropyRule, ABC):
    """Base of rules that mark tokens, whose losses differ."""

    share: float
    """Share of the tokens that are marked; at least one is."""

    def __post_init__(self) -> None:
        check_share(share=self.share)
        if self.share == 0:
            raise ConfigError("share=0 marks no token; leave entropy out, or write a share such as 0.2")

    @abstractmethod
    def mark(self, values: Tensor, advantages: Tensor, generator: torch.Generator) -> Tensor:
        """Return (N,) bool: the marked tokens.

        Args:
            values: (N,) log-probabilities of the tokens when they were drawn, or entropies for a rule that reads them.
            advantages: (N,) their advantages.
            generator: Draws tokens.
        """

    @abstractmethod
    def losses(self, values: Tensor, marked: Tensor, apart: Tensor) -> Tensor:
        """Return the (n,) losses of packed tokens.

        Args:
            values: (n,) losses without the rule.
            marked: (n,) bool.
            apart: (n,) logarithms of the ratios, with a gradient.
        """

    def _count(self, num_tokens: int) -> int:
        return max(1, int(self.share * num_tokens))


@suggest_settings(ENTROPY_HINTS)
@dataclass(frozen=True, kw_only=True)
class AdaptiveEntropy(EntropyRule):
    """Entropy bonus whose weight grows while the entropy is at most ``target``. Above, it is off and shrinks.

    Source: He et al., arXiv:2505.22312 (Skywork-OR1), §3.4.
    """

    target: float = 0.2
    """Entropy in nats per token below which the weight grows."""
    step: float = 0.005
    """Change of the weight in an iteration."""
    low: float = 0.0
    """Smallest weight."""
    high: float = 1.0
    """Largest weight."""

    def __post_init__(self) -> None:
        check_positive_numbers(target=self.target, step=self.step, high=self.high)
        check_not_negative(low=self.low)
        if self.low >= self.high:
            raise ConfigError(f"low={self.low} must lie below high={self.high}")


@suggest_settings(ENTROPY_HINTS)
@dataclass(frozen=True, kw_only=True)
class ClipCov(MarkingRule):
    """Leave some tokens out of the loss, drawn among those with covariances between ``low`` and ``high``.

    The covariance of a token is ``(log p - mean log p) * (A - mean A)``. Source: Cui et al., arXiv:2505.22617, §4.2.
    """

    share: float = 2e-4
    low: float = 1.0
    """Smallest covariance of a token that may be drawn."""
    high: float = 5.0
    """Largest covariance of a token that may be drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_numbers(low=self.low, high=self.high)
        if self.low >= self.high:
            raise ConfigError(f"low={self.low} must lie below high={self.high}")

    def mark(self, values: Tensor, advantages: Tensor, generator: torch.Generator) -> Tensor:
        """Return tokens drawn among those with covariances between the bounds."""
        found = covariances(values, advantages)
        places = ((found > self.low) & (found < self.high)).nonzero().flatten()
        drawn = places[torch.randperm(len(places), generator=generator)[: self._count(len(values))]]
        return _marked(drawn, values)

    def losses(self, values: Tensor, marked: Tensor, apart: Tensor) -> Tensor:
        """Return 0 for marked tokens."""
        return values.masked_fill(marked, 0.0)


@suggest_settings(ENTROPY_HINTS)
@dataclass(frozen=True, kw_only=True)
class KLCov(MarkingRule):
    """Penalty ``weight * abs(log ratio)`` for the tokens that lower the entropy most: those of the largest covariances.

    Where nothing was learnt since the ratio's denominator, the sign of the logarithm is that of a rounding error.

    Source: Cui et al., arXiv:2505.22617, §4.3. There, ratios are not clipped: ``policy_loss=Clip(low=1.0, high=1e6)``.
    """

    share: float = 2e-4
    weight: float = 1.0
    """Weight of the penalty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_numbers(weight=self.weight)

    def mark(self, values: Tensor, advantages: Tensor, generator: torch.Generator) -> Tensor:
        """Return the tokens of the largest covariances."""
        return _marked(covariances(values, advantages).topk(self._count(len(values))).indices, values)

    def losses(self, values: Tensor, marked: Tensor, apart: Tensor) -> Tensor:
        """Return the losses, with the penalty for marked tokens."""
        return values + torch.where(marked, self.weight * apart.abs(), 0.0)


@suggest_settings(ENTROPY_HINTS)
@dataclass(frozen=True, kw_only=True)
class TopShare(MarkingRule):
    """Loss of the tokens with the largest entropies alone: where the policy decides.

    Source: Wang et al., arXiv:2506.01939.
    """

    share: float = 0.2
    reads_entropies: ClassVar[bool] = True

    def mark(self, values: Tensor, advantages: Tensor, generator: torch.Generator) -> Tensor:
        """Return the tokens whose entropies reach the quantile ``1 - share``."""
        # torch.quantile takes at most 2^24 values.
        place = (1 - self.share) * (len(values) - 1)
        lower, upper = (values.kthvalue(int(k) + 1).values for k in (place, min(place + 1, len(values) - 1)))
        return values >= torch.lerp(lower, upper, place - int(place))

    def losses(self, values: Tensor, marked: Tensor, apart: Tensor) -> Tensor:
        """Return 0 for other tokens."""
        return values.masked_fill(~marked, 0.0)


ENTROPY_RULES: Mapping[EntropyName, type[EntropyRule]] = {
    "adaptive": AdaptiveEntropy,
    "clip-cov": ClipCov,
    "kl-cov": KLCov,
    "top-share": TopShare,
}


def resolve_entropy(given: EntropyRule | EntropyName | None, entropy_coef: float) -> EntropyRule | None:
    """Return a rule from a value or a name; ConfigError for others, or a weight that the rule sets itself."""
    check_not_negative(entropy_coef=entropy_coef)
    if isinstance(given, str):
        require_choice("entropy", given, tuple(ENTROPY_RULES))
        given = ENTROPY_RULES[given]()
    elif isinstance(given, (int, float)) and not isinstance(given, bool):
        raise ConfigError(f"entropy={given} is a weight; write entropy_coef={given}, or a rule such as 'adaptive'")
    if given is not None and not isinstance(given, EntropyRule):
        wanted = f"one of {', '.join(ENTROPY_RULES)}, or a value such as TopShare(share=0.2)"
        raise wrong_kind("entropy", given, wanted)
    if isinstance(given, AdaptiveEntropy) and not given.low <= entropy_coef <= given.high:
        raise ConfigError(
            f"entropy_coef={entropy_coef} is where the weight of {given} begins; write one between low and high"
        )
    return given


class EntropyWeight(nn.Module):
    """Weight of the entropy bonus: fixed, or changed after every iteration by an `AdaptiveEntropy`.

    Args:
        coefficient: Weight at the start.
        rule: How it changes; None: it is fixed.
    """

    coefficient: Tensor
    """Scalar float64: the current weight, whether or not the bonus is on."""
    is_on: Tensor
    """Scalar bool: whether the entropy was at most the target in the last iteration, and in the first."""

    def __init__(self, coefficient: float, rule: AdaptiveEntropy | None) -> None:
        super().__init__()
        self.rule = rule
        self.register_buffer("coefficient", torch.tensor(coefficient, dtype=torch.float64))
        self.register_buffer("is_on", torch.tensor(True))

    @property
    def current(self) -> float:
        """The weight that losses use."""
        return float(self.coefficient) if bool(self.is_on) else 0.0

    def update(self, entropy: Tensor) -> None:
        """Change the weight after an iteration with a mean entropy in nats per token; NaN changes nothing."""
        if self.rule is None or not bool(entropy.isfinite()):
            return
        is_low = bool(entropy <= self.rule.target)
        change = self.rule.step if is_low else -self.rule.step
        self.coefficient.add_(change).clamp_(self.rule.low, self.rule.high)
        self.is_on.fill_(is_low)


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return the (N,) centred products of tokens' log-probabilities and advantages.

    Source: Cui et al., arXiv:2505.22617, eq. 10.
    """
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def _marked(places: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool).index_fill(0, places, True)
