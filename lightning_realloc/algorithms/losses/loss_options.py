"""Groups of settings for the actor's loss: divergence from the reference, and policy loss.

A group holds what differs from the algorithm's defaults. The algorithm checks the values, since defaults and rules
depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from lightning_realloc.algorithms.losses.correction import EngineCorrection
from lightning_realloc.algorithms.losses.functional import KLEstimator
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage
from lightning_realloc.algorithms.losses.policy_losses import PolicyLoss, PolicyLossName, RatioLevel
from lightning_realloc.algorithms.losses.proximal import RatioTo
from lightning_realloc.setting_hints import KL_HINTS, POLICY_LOSS_HINTS, suggest_settings

KLPlace = Literal["loss", "reward"]
"""Place of the divergence: added to the loss, or subtracted from rewards."""


@suggest_settings(KL_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class KLOptions:
    """Divergence of the actor from the reference. Fields that are None keep the algorithm's default.

    Example:
        ``RLOO(actor, reward, kl=KLOptions(coef=0.02, place="loss"))``
    """

    coef: float | None = None
    """Weight of the divergence; 0 leaves the reference out altogether."""
    estimator: KLEstimator | None = None
    """k1, k2 or k3, in the loss."""
    place: KLPlace | None = None
    """``"loss"`` adds the divergence to the loss; ``"reward"`` subtracts it (k1) from rewards."""
    target: float | None = None
    """PPO only: divergence in nats per response that ``coef`` is steered towards; None keeps ``coef`` fixed."""
    gain: float | None = None
    """PPO only: share of the divergence's relative error, at most 20 %, by which ``coef`` changes in an iteration."""


@suggest_settings(POLICY_LOSS_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossOptions:
    """Loss of a policy: formula, probability ratios, averaging. Fields that are None keep the algorithm's default.

    Example:
        ``GRPO(actor, reward, policy_loss=PolicyLossOptions(ratio_level="sequence", clip_low=3e-4, clip_high=4e-4))``
    """

    loss: PolicyLossName | None = None
    """Name of the loss, from the table in docs/policy-loss.md."""
    loss_average: LossAverage | None = None
    """Mean over tokens and responses; see :class:`PolicyGradient`."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus."""
    ratio_level: RatioLevel | None = None
    """Probability ratios of a ``"token"``, of a ``"sequence"`` (geometric mean), or the ``"product"`` over tokens."""
    ratio_to: RatioTo | None = None
    """Denominator of ratios: the ``"behaviour"`` policy, or the ``"proximal"`` one before the first step."""
    engine_correction: EngineCorrection | None = None
    """Importance weights for the engine's distribution, with ``ratio_to="proximal"``; None: no weights."""
    clip_low: float | None = None
    """For losses that clip low ratios: distance below 1 at which a ratio is clipped."""
    clip_high: float | None = None
    """For losses that clip high ratios: distance above 1 at which a ratio is clipped."""
    clip_most: float | None = None
    """``"clip"``: largest ratio of a token with a negative advantage; None: no bound."""
    sapo_temperatures: tuple[float, float] | None = None
    """``"sapo"``: temperature for positive advantages, and for the others."""
    vespo_shapes: tuple[float, float, float, float] | None = None
    """``"vespo"``: k and lambda for advantages from 0 on, and for the others."""

    def over(self, loss: PolicyLoss) -> PolicyLoss:
        """Return the loss with the options that are given."""
        values = {field.name: getattr(self, field.name) for field in fields(loss)}
        return replace(loss, **{name: value for name, value in values.items() if value is not None})
