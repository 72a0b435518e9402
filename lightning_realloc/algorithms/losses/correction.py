"""Importance weights that correct for the difference between the engine's and the training's log-probabilities.

An engine with other matrix shapes or in 16 bit computes other log-probabilities from the same parameters. Ratios to the
trained model's own log-probabilities leave this difference out; the weights add it, bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_realloc.algorithms.losses.functional import kl_estimate
from lightning_realloc.algorithms.losses.loss_reduction import token_metrics
from lightning_realloc.algorithms.losses.policy_losses import response_sums
from lightning_realloc.algorithms.losses.proximal import RatioTo
from lightning_realloc.algorithms.settings import check_not_negative, check_positive
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.training import Average
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.setting_hints import suggest_settings


@suggest_settings({})
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCorrection:
    """Weights of truncated importance sampling: the trained model's probability over the engine's.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025,
    https://fengyao.notion.site/off-policy-rl; masked instead of truncated: Team Ling, arXiv:2510.18855.
    """

    cap: float = 2.0
    """Largest weight."""
    floor: float = 0.0
    """Smallest weight."""
    level: Literal["token", "sequence"] = "token"
    """``"token"``: one weight per token; ``"sequence"``: the product over the response."""
    beyond: Literal["truncate", "mask"] = "truncate"
    """Treatment of a weight outside the bounds: ``"truncate"`` sets it to the bound, ``"mask"`` to 0."""

    def __post_init__(self) -> None:
        check_positive(cap=self.cap)
        check_not_negative(floor=self.floor)
        require_choice("level", self.level, ("token", "sequence"))
        require_choice("beyond", self.beyond, ("truncate", "mask"))
        if self.floor >= self.cap:
            raise ConfigError(f"floor={self.floor} must lie below cap={self.cap}")

    def weights(self, proximal: Tensor, behaviour: Tensor, batch: PackedBatch) -> Tensor:
        """Return the (N,) factors of the tokens' losses, without a gradient.

        Args:
            proximal: (N,) log-probabilities of the trained model before its first step.
            behaviour: (N,) log-probabilities that the engine recorded.
        """
        differences = (proximal - behaviour).detach()
        if self.level == "sequence":
            differences = batch.per_token(response_sums(differences, batch))
        weights = differences.exp()
        if self.beyond == "truncate":
            return weights.clamp(self.floor, self.cap)
        return torch.where((weights < self.floor) | (weights > self.cap), 0.0, weights)


def engine_defaults(
    ratio_to: RatioTo | None, correction: EngineCorrection | None, *, is_other_engine: bool
) -> tuple[RatioTo, EngineCorrection | None]:
    """Return both settings with their defaults: behaviour ratios, or proximal ones with weights for another engine.

    ``is_other_engine``: whether another program computes the rollout's log-probabilities, with kernels of its own.
    """
    ratio_to = ratio_to or ("proximal" if is_other_engine else "behaviour")
    corrects = is_other_engine and ratio_to == "proximal" and correction is None
    return ratio_to, EngineCorrection() if corrects else correction


def mismatch_metrics(proximal: Tensor, behaviour: Tensor, batch: PackedBatch) -> dict[str, Average]:
    """Return the mean absolute difference between engine and trained model, and k3 from the engine to the model."""
    mask, proximal = batch.response_mask, proximal.detach()
    measured = {
        "engine_difference": (proximal - behaviour).abs(),
        "engine_kl": kl_estimate(behaviour, proximal, estimator="k3"),
    }
    return token_metrics(measured, mask)
