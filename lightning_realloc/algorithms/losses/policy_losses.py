"""Policy losses over packed tokens, one formula per name: ``clip``, ``cispo``, ``sapo`` and ``vespo``.

All of them take the change of a token's probability since it was drawn, and the advantage of its response. They differ
in how they treat tokens that have changed much. The caller averages, see ``loss_reduction.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_realloc.algorithms.losses.functional import ClippedLoss, clipped_surrogate
from lightning_realloc.algorithms.settings import check_choice, check_not_negative, check_positive
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.errors import ConfigError

PolicyLossName = Literal["clip", "cispo", "sapo", "vespo"]
RatioLevel = Literal["token", "sequence", "product"]
"""Of one token; the geometric mean over its response's; or their product, which is the response's own ratio."""
_LOG_RATIO_BOUND = 20.0
_LEAST_LOG_WEIGHT = math.log(1e-8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Which loss, and its constants."""

    loss: PolicyLossName = "clip"
    ratio_level: RatioLevel = "token"
    """Whose probability the ratios are of; ``vespo`` has one per response whatever this says."""
    clip_low: float = 0.2
    """``clip``: how far a ratio may fall below 1 and still be pushed down."""
    clip_high: float = 0.2
    """``clip``: how far it may rise above 1 and still be pushed up; ``cispo``: how far it may rise as a weight."""
    clip_most: float | None = None
    """``clip``: the largest ratio that a response with a negative advantage is pushed down by; None: any."""
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    """``sapo``: how sharply ratios are gated where the advantage is positive, and where it is not."""
    vespo_shapes: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)
    """``vespo``: k and lambda where the advantage is not negative, and where it is."""

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, get_args(PolicyLossName))
        check_choice("ratio_level", self.ratio_level, get_args(RatioLevel))
        check_not_negative(clip_low=self.clip_low, clip_high=self.clip_high)
        check_positive(clip_most=self.clip_most)
        if self.clip_most is not None and self.clip_most <= 1 + self.clip_high:
            raise ConfigError(
                f"clip_most={self.clip_most} must lie above 1 + clip_high={1 + self.clip_high}, where ratios of good "
                f"responses are clipped already; None leaves it out"
            )
        for name, values, count in (
            ("sapo_temperatures", self.sapo_temperatures, 2),
            ("vespo_shapes", self.vespo_shapes, 4),
        ):
            if len(values) != count or not all(value > 0 for value in values):
                raise ConfigError(f"{name}={values} must be {count} positive numbers")
        if self.loss == "vespo" and self.ratio_level != "token":
            raise ConfigError(
                f"loss='vespo' weighs whole responses by itself; leave ratio_level={self.ratio_level!r} out"
            )

    def __call__(self, logprobs: Tensor, before: Tensor, advantages: Tensor, batch: PackedBatch) -> ClippedLoss:
        """Return the (N,) losses of tokens; what they are outside ``batch.response_mask`` does not matter.

        Args:
            logprobs: (N,) now.
            before: (N,) what ratios are taken to.
            advantages: (N,) of each token.
        """
        ratios = log_ratios(logprobs - before, batch, level="token" if self.loss == "vespo" else self.ratio_level)
        return _LOSSES[self.loss](self, _Tokens(logprobs, ratios, advantages, batch))


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    logprobs: Tensor
    log_ratios: Tensor
    advantages: Tensor
    batch: PackedBatch


def log_ratios(differences: Tensor, batch: PackedBatch, *, level: RatioLevel) -> Tensor:
    """Return (N,) the logarithm of the ratio that each token counts with, from those of the tokens themselves.

    Source of ``sequence``: Zheng et al., arXiv:2507.18071, eq. 7; of ``product``: Ahmadian et al., arXiv:2402.14740.
    """
    if level == "token":
        return differences
    sums = response_sums(differences, batch)
    if level == "sequence":
        sums = sums / response_sums(torch.ones_like(differences), batch).clamp(min=1.0)
    return batch.per_token(sums)


def response_sums(values: Tensor, batch: PackedBatch) -> Tensor:
    """Return (B,) the sums of the (N,) values over the tokens of each response that count."""
    kept = torch.where(batch.response_mask, values, 0.0)
    return kept.new_zeros(len(batch)).index_add(0, batch.sample_index, kept)


def _clip(settings: PolicyLoss, tokens: _Tokens) -> ClippedLoss:
    """``-min(r * A, clip(r) * A)``. Source: see ``clipped_surrogate``."""
    return clipped_surrogate(
        tokens.log_ratios.exp(), tokens.advantages, clip_low=settings.clip_low, clip_high=settings.clip_high,
        clip_most=settings.clip_most,
    )  # fmt: skip


def _cispo(settings: PolicyLoss, tokens: _Tokens) -> ClippedLoss:
    """``-sg(min(r, 1 + clip_high)) * A * log p``: no token loses its gradient, only weight.

    Without a lower bound, as its authors train. Source: MiniMax, arXiv:2506.13585, eq. 4 and 5.
    """
    ratio, bound = tokens.log_ratios.detach().exp(), 1.0 + settings.clip_high
    clipped = (ratio > bound) & (tokens.advantages > 0)
    return ClippedLoss(-ratio.clamp(max=bound) * tokens.advantages * tokens.logprobs, clipped)


def _sapo(settings: PolicyLoss, tokens: _Tokens) -> ClippedLoss:
    """``-(4 / t) * s(t * (r - 1)) * A``: a gate with slope 1 at r = 1 that closes on both sides.

    Nothing is clipped. Source: arXiv:2511.20347.
    """
    rising, falling = settings.sapo_temperatures
    temperature = torch.where(tokens.advantages > 0, rising, falling)
    gate = torch.sigmoid(temperature * (tokens.log_ratios.exp() - 1.0)) * 4.0 / temperature
    return ClippedLoss(-gate * tokens.advantages, torch.zeros_like(gate, dtype=torch.bool))


def _vespo(settings: PolicyLoss, tokens: _Tokens) -> ClippedLoss:
    """``-w^k * exp(l * (1 - w)) * A * log p`` with w the ratio of the whole response, and no gradient of the weight.

    Source: arXiv:2602.10693, the gamma weighting; w is kept between 1e-8 and exp(20), and tokens' ratios likewise.
    """
    bounded = tokens.log_ratios.detach().clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    log_weight = response_sums(bounded, tokens.batch).clamp(_LEAST_LOG_WEIGHT, _LOG_RATIO_BOUND)
    log_weight = tokens.batch.per_token(log_weight)
    good = tokens.advantages >= 0
    k_good, l_good, k_bad, l_bad = settings.vespo_shapes
    power, decay = torch.where(good, k_good, k_bad), torch.where(good, l_good, l_bad)
    weight = (power * log_weight + decay * (1.0 - log_weight.exp())).exp()
    return ClippedLoss(-weight * tokens.advantages * tokens.logprobs, torch.zeros_like(good))


_LOSSES: Mapping[PolicyLossName, Callable[[PolicyLoss, _Tokens], ClippedLoss]] = {
    "clip": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
}
