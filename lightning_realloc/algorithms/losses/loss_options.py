"""Group of settings for the divergence of the actor from the reference.

A group holds what differs from the algorithm's defaults. The algorithm checks the values, since defaults and rules
depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_realloc.algorithms.losses.functional import KLEstimator
from lightning_realloc.setting_hints import KL_HINTS, suggest_settings

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
