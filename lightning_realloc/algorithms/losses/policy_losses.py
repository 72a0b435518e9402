"""Policy losses: values that hold their constants, check them, and give each packed token its loss.

The caller averages the losses of tokens, see ``loss_reduction.py``. CONTRIBUTING.md says how to add one.
Shapes: N packed tokens, B responses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_realloc.algorithms.losses.functional import ClippedLoss
from lightning_realloc.algorithms.settings import (
    check_not_negative,
    check_positive,
    check_positive_numbers,
    wrong_kind,
)
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.setting_hints import POLICY_LOSS_HINTS, loss_elsewhere, suggest_settings

PolicyLossName = Literal["clip", "cispo", "sapo", "vespo"]
"""Names of losses with their default constants."""
RatioLevel = Literal["token", "sequence", "product"]
"""Ratio of a token, geometric mean of its response's token ratios, or their product: the ratio of the response."""
_LOG_RATIO_BOUND = 20.0
_LEAST_LOG_WEIGHT = math.log(1e-8)


class PolicyLoss(ABC):
    """Base of policy losses: ``policy_loss=`` takes a value of a subclass, or a name.

    Subclasses have no slots: those would leave a second class, and YAML could not name the first one by ``Clip`` alone.
    """

    weighs_responses: ClassVar[bool] = False
    """Whether it makes the ratios of whole responses itself, and so takes those of tokens alone."""

    @abstractmethod
    def __call__(self, logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, batch: PackedBatch) -> ClippedLoss:
        """Return the (N,) losses of tokens. Values outside ``batch.response_mask`` are arbitrary.

        Args:
            logprobs: (N,) current log-probabilities.
            log_ratios: (N,) logarithms of the probability ratios, with a gradient.
            advantages: (N,) advantage of each token.
            batch: The micro-batch.
        """


@suggest_settings(POLICY_LOSS_HINTS)
@dataclass(frozen=True, kw_only=True)
class Clip(PolicyLoss):
    """Loss with clipped ratios: ``-min(min(r, most) * A, clip(r, 1 - low, 1 + high) * A)``.

    r is the probability ratio, A the advantage.

    Source: Schulman et al., arXiv:1707.06347, eq. 7; two bounds: Yu et al., arXiv:2503.14476, eq. 10; ``most``: Ye et
    al., arXiv:1912.09729; for language models: Prime Intellect, arXiv:2505.07291.

    Example:
        ``GRPO(actor, reward, policy_loss=Clip(low=0.2, high=0.28))``
    """

    low: float = 0.2
    """Distance below 1 at which a ratio is clipped."""
    high: float = 0.2
    """Distance above 1 at which a ratio is clipped."""
    most: float | None = None
    """Largest ratio of a token with a negative advantage, whose loss grows without bound with None."""

    def __post_init__(self) -> None:
        check_not_negative(low=self.low, high=self.high)
        check_positive(most=self.most)
        if self.most is not None and self.most <= 1 + self.high:
            raise ConfigError(
                f"most={self.most} must lie above 1 + high={1 + self.high}, where ratios of good responses are clipped "
                f"already; None leaves it out"
            )

    def __call__(self, logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, batch: PackedBatch) -> ClippedLoss:
        """Return the losses, clipped where that is pessimistic."""
        ratio = log_ratios.exp()
        plain = (ratio if self.most is None else ratio.clamp(max=self.most)) * advantages
        bounded = ratio.clamp(1.0 - self.low, 1.0 + self.high) * advantages
        clipped = bounded < plain
        if self.most is not None:
            clipped = clipped | ((ratio > self.most) & (advantages < 0))
        return ClippedLoss(-torch.minimum(plain, bounded), clipped.detach())


@suggest_settings(POLICY_LOSS_HINTS)
@dataclass(frozen=True, kw_only=True)
class Cispo(PolicyLoss):
    """Loss with bounded weights: ``-sg(min(r, 1 + high)) * A * log p``. A clipped token keeps its gradient.

    There is no lower bound, as in the authors' training. Source: MiniMax, arXiv:2506.13585, eq. 4 and 5.
    """

    high: float = 0.2
    """Distance above 1 at which a ratio is clipped."""

    def __post_init__(self) -> None:
        check_not_negative(high=self.high)

    def __call__(self, logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, batch: PackedBatch) -> ClippedLoss:
        """Return the weighted log-probabilities."""
        ratio, bound = log_ratios.detach().exp(), 1.0 + self.high
        # Weights of negative advantages are bounded, too, but Clip would not clip these ratios; TRL counts the same.
        clipped = (ratio > bound) & (advantages > 0)
        return ClippedLoss(-ratio.clamp(max=bound) * advantages * logprobs, clipped)


@suggest_settings(POLICY_LOSS_HINTS)
@dataclass(frozen=True, kw_only=True)
class Sapo(PolicyLoss):
    """Loss with a smooth gate, of slope 1 at r = 1: ``-(4 / t) * s(t * (r - 1)) * A``.

    Source: arXiv:2511.20347.
    """

    positive: float = 1.0
    """Temperature t for positive advantages."""
    negative: float = 1.05
    """Temperature t for the other advantages."""

    def __post_init__(self) -> None:
        check_positive_numbers(**asdict(self))

    def __call__(self, logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, batch: PackedBatch) -> ClippedLoss:
        """Return the gated losses."""
        temperature = torch.where(advantages > 0, self.positive, self.negative)
        gate = torch.sigmoid(temperature * (log_ratios.exp() - 1.0)) * 4.0 / temperature
        return ClippedLoss(-gate * advantages, torch.zeros_like(gate, dtype=torch.bool))


@suggest_settings(POLICY_LOSS_HINTS)
@dataclass(frozen=True, kw_only=True)
class Vespo(PolicyLoss):
    """Loss with weights of whole responses: ``-w^k * exp(l * (1 - w)) * A * log p``.

    w is the ratio of the response, and the weight has no gradient. w is bounded by 1e-8 and exp(20), the tokens' ratios
    by exp(-20) and exp(20).

    Source: arXiv:2602.10693, the gamma weighting.
    """

    k_positive: float = 2.0
    """Power k for advantages from 0 on."""
    lambda_positive: float = 3.0
    """Decay l for advantages from 0 on."""
    k_negative: float = 3.0
    """Power k for negative advantages."""
    lambda_negative: float = 2.0
    """Decay l for negative advantages."""

    weighs_responses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive_numbers(**asdict(self))

    def __call__(self, logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, batch: PackedBatch) -> ClippedLoss:
        """Return the weighted log-probabilities."""
        bounded = log_ratios.detach().clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
        log_weight = batch.per_token(response_sums(bounded, batch).clamp(_LEAST_LOG_WEIGHT, _LOG_RATIO_BOUND))
        good = advantages >= 0
        power = torch.where(good, self.k_positive, self.k_negative)
        decay = torch.where(good, self.lambda_positive, self.lambda_negative)
        weight = (power * log_weight + decay * (1.0 - log_weight.exp())).exp()
        return ClippedLoss(-weight * advantages * logprobs, torch.zeros_like(good))


POLICY_LOSSES: Mapping[PolicyLossName, type[PolicyLoss]] = {"clip": Clip, "cispo": Cispo, "sapo": Sapo, "vespo": Vespo}


def resolve_policy_loss(given: PolicyLoss | PolicyLossName) -> PolicyLoss:
    """Return a loss from a value or a name; ConfigError for another name."""
    if isinstance(given, PolicyLoss):
        return given
    if not isinstance(given, str):
        raise wrong_kind("policy_loss", given, "a name, or a value such as Clip(low=0.2, high=0.28)")
    if given not in POLICY_LOSSES and (ours := loss_elsewhere(given)) is not None:
        raise ConfigError(f"policy_loss={given!r} must be one of {', '.join(POLICY_LOSSES)}; {given} is here {ours}")
    require_choice("policy_loss", given, tuple(POLICY_LOSSES))
    return POLICY_LOSSES[given]()


def log_ratios(differences: Tensor, batch: PackedBatch, *, level: RatioLevel) -> Tensor:
    """Return the (N,) log-ratios at a level, from the (N,) log-ratios of tokens.

    Source: ``sequence``: Zheng et al., arXiv:2507.18071, eq. 7; ``product``: Ahmadian et al., arXiv:2402.14740.
    """
    if level == "token":
        return differences
    sums = response_sums(differences, batch)
    if level == "sequence":
        sums = sums / response_sums(torch.ones_like(differences), batch).clamp(min=1.0)
    return batch.per_token(sums)


def response_sums(values: Tensor, batch: PackedBatch) -> Tensor:
    """Return the (B,) sums of the (N,) values over each response's tokens in the mask."""
    kept = torch.where(batch.response_mask, values, 0.0)
    return kept.new_zeros(len(batch)).index_add(0, batch.sample_index, kept)
