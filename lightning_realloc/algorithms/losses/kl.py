"""Divergence of the actor from the reference, as a setting that checks itself and is estimated on tokens."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Literal, get_args

from torch import Tensor

from lightning_realloc.algorithms.losses.functional import KLEstimator, kl_estimate
from lightning_realloc.algorithms.settings import check_not_negative, check_positive, check_type
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.setting_hints import KL_HINTS, suggest_settings

KLPlace = Literal["loss", "reward"]
"""Place of the divergence: added to the loss, or subtracted from rewards."""


@suggest_settings(KL_HINTS)
@dataclass(frozen=True, slots=True)
class KL:
    """Divergence of the actor from the reference. Fields that are None keep the algorithm's default.

    Example:
        ``RLOO(actor, reward, kl=KL(0.02, estimator="k3", place="loss"))``
    """

    coef: float | None = None
    """Weight of the divergence; 0 leaves the reference out altogether."""
    _: KW_ONLY
    estimator: KLEstimator | None = None
    """k1, k2 or k3, in the loss."""
    place: KLPlace | None = None
    """``"loss"`` adds the divergence to every token's loss; ``"reward"`` subtracts it (k1) from rewards: of responses,
    or of every token in PPO, ReinforcePlusPlus and ReMax."""
    target: float | None = None
    """PPO only: divergence in nats per response that ``coef`` is steered towards; None keeps ``coef`` fixed."""
    gain: float | None = None
    """PPO only: share of the divergence's relative error, at most 20 %, by which ``coef`` changes in an iteration.
    None: 0.1."""

    def __post_init__(self) -> None:
        for name in ("coef", "gain"):
            if (value := getattr(self, name)) is not None:
                check_not_negative(**{name: value})
        check_positive(target=self.target)
        for name, choices in (("estimator", get_args(KLEstimator)), ("place", get_args(KLPlace))):
            if (value := getattr(self, name)) is not None:
                require_choice(name, value, choices)
        if self.target is not None and self.coef == 0:
            raise ConfigError(
                f"target={self.target} steers coef, as PPO does alone, and coef=0 leaves the reference out; raise coef "
                f"in PPO, and leave target out elsewhere"
            )

    @property
    def weight(self) -> float:
        """The weight of a divergence whose fields are all given."""
        assert self.coef is not None, "an algorithm's default has a weight"
        return self.coef

    def estimate(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Return the (N,) estimates for the loss."""
        assert self.estimator is not None, "an algorithm's default has an estimator"
        return kl_estimate(logprobs, ref_logprobs, estimator=self.estimator)


def fixed_kl(kl: KL | None) -> KL | None:
    """Return a divergence whose weight is fixed. Raises ConfigError for one that is steered, which PPO does alone."""
    check_type(KL, kl=kl)
    names = () if kl is None else ("target", "gain")
    steering = [f"{name}={value}" for name in names if (value := getattr(kl, name)) is not None]
    if steering:
        raise ConfigError(
            f"kl=KL({', '.join(steering)}) steers the weight of the divergence, as PPO does alone; leave target and "
            f"gain out, and give a fixed weight, such as kl_coef=0.05"
        )
    return kl


def resolve_kl(kl: KL | None, kl_coef: float | None, default: KL) -> KL:
    """Return the divergence that ``kl=`` and ``kl_coef=`` give, with an algorithm's default for what they leave out.

    Raises:
        ConfigError: for two different weights.
    """
    check_type(KL, kl=kl)
    given = {} if kl is None else {field.name: getattr(kl, field.name) for field in fields(kl)}
    if kl_coef is not None:
        check_not_negative(kl_coef=kl_coef)
        if given.get("coef") not in (None, kl_coef):
            raise ConfigError(
                f"kl_coef={kl_coef} and kl=KL({given['coef']}) contradict each other; leave one of them out"
            )
        given["coef"] = kl_coef
    return replace(default, **{name: value for name, value in given.items() if value is not None})
