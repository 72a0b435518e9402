"""Policy losses over packed tokens, one formula for each ``PolicyLossName``.

Every formula takes the probability ratio and the advantage of each token, and returns one loss per token. The caller
averages them, see ``loss_reduction.py``. CONTRIBUTING.md says how to add a formula and its constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_realloc.algorithms.losses.functional import ClippedLoss, clipped_surrogate
from lightning_realloc.algorithms.settings import (
    check_choice,
    check_not_negative,
    check_positive,
    check_positive_numbers,
)
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.errors import ConfigError

PolicyLossName = Literal["clip", "cispo", "sapo", "vespo"]
_TRL_LOSSES = {
    "grpo": 'loss_average="sequence"',
    "dapo": 'loss_average="token"',
    "bnpo": 'loss_average="token"',
    "dr_grpo": 'loss_average="constant"',
    "luspo": 'ratio_level="sequence", loss_average="sum"',
}
"""TRL's ``loss_type`` -> settings here, for those that are not a loss of their own."""
RatioLevel = Literal["token", "sequence", "product"]
"""Ratio of a token, geometric mean of its response's token ratios, or their product: the ratio of the response."""
_LOG_RATIO_BOUND = 20.0
_LEAST_LOG_WEIGHT = math.log(1e-8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A policy loss by name, with its constants."""

    loss: PolicyLossName = "clip"
    ratio_level: RatioLevel = "token"
    """Level of the probability ratios. ``vespo`` always uses the response's ratio."""
    clip_low: float = 0.2
    """For losses that clip low ratios: distance below 1 at which a ratio is clipped."""
    clip_high: float = 0.2
    """For losses that clip high ratios: distance above 1 at which a ratio is clipped."""
    clip_most: float | None = None
    """``clip``: largest ratio of a token with a negative advantage; None: no bound."""
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    """``sapo``: temperature of the gate for positive advantages, and for the others."""
    vespo_shapes: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)
    """``vespo``: k and lambda for advantages from 0 on, and for the others."""

    def __post_init__(self) -> None:
        if self.loss in _TRL_LOSSES:
            raise ConfigError(
                f"loss={self.loss!r} must be one of {', '.join(get_args(PolicyLossName))}; TRL's loss_type "
                f"{self.loss!r} is here {_TRL_LOSSES[self.loss]}, with loss='clip'"
            )
        check_choice("loss", self.loss, get_args(PolicyLossName))
        check_choice("ratio_level", self.ratio_level, get_args(RatioLevel))
        check_not_negative(clip_low=self.clip_low, clip_high=self.clip_high)
        check_positive(clip_most=self.clip_most)
        if self.clip_most is not None and self.clip_most <= 1 + self.clip_high:
            raise ConfigError(
                f"clip_most={self.clip_most} must lie above 1 + clip_high={1 + self.clip_high}, where ratios of good "
                f"responses are clipped already; None leaves it out"
            )
        for field in fields(self):
            if isinstance(field.default, tuple):
                check_positive_numbers(field.name, getattr(self, field.name), example=field.default)
        if self.loss == "vespo" and self.ratio_level != "token":
            raise ConfigError(
                f"loss='vespo' weighs whole responses by itself; leave ratio_level={self.ratio_level!r} out"
            )

    def __call__(self, logprobs: Tensor, before: Tensor, advantages: Tensor, batch: PackedBatch) -> ClippedLoss:
        """Return the (N,) losses of tokens. Values outside ``batch.response_mask`` are arbitrary.

        Args:
            logprobs: (N,) current log-probabilities.
            before: (N,) log-probabilities in the denominator of ratios.
            advantages: (N,) advantage of each token.
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


def _clip(settings: PolicyLoss, tokens: _Tokens) -> ClippedLoss:
    """``-min(r * A, clip(r) * A)``. Source: see ``clipped_surrogate``."""
    return clipped_surrogate(
        tokens.log_ratios.exp(), tokens.advantages, clip_low=settings.clip_low, clip_high=settings.clip_high,
        clip_most=settings.clip_most,
    )  # fmt: skip


def _cispo(settings: PolicyLoss, tokens: _Tokens) -> ClippedLoss:
    """``-sg(min(r, 1 + clip_high)) * A * log p``: a clipped token keeps its gradient, with a bounded weight.

    There is no lower bound, as in the authors' training. Source: MiniMax, arXiv:2506.13585, eq. 4 and 5.
    """
    ratio, bound = tokens.log_ratios.detach().exp(), 1.0 + settings.clip_high
    # Weights of negative advantages are bounded, too, but "clip" would not clip these ratios; TRL counts the same.
    clipped = (ratio > bound) & (tokens.advantages > 0)
    return ClippedLoss(-ratio.clamp(max=bound) * tokens.advantages * tokens.logprobs, clipped)


def _sapo(settings: PolicyLoss, tokens: _Tokens) -> ClippedLoss:
    """``-(4 / t) * s(t * (r - 1)) * A``: a smooth gate with slope 1 at r = 1. Source: arXiv:2511.20347."""
    rising, falling = settings.sapo_temperatures
    temperature = torch.where(tokens.advantages > 0, rising, falling)
    gate = torch.sigmoid(temperature * (tokens.log_ratios.exp() - 1.0)) * 4.0 / temperature
    return ClippedLoss(-gate * tokens.advantages, torch.zeros_like(gate, dtype=torch.bool))


def _vespo(settings: PolicyLoss, tokens: _Tokens) -> ClippedLoss:
    """``-w^k * exp(l * (1 - w)) * A * log p``, with w the ratio of the whole response. The weight has no gradient.

    w is bounded by 1e-8 and exp(20), the tokens' ratios by exp(-20) and exp(20).
    Source: arXiv:2602.10693, the gamma weighting.
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
