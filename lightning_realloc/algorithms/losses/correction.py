"""Corrections for the difference between the policy that drew a response and the one that learns from it.

An engine with other matrix shapes or in 16 bit computes other log-probabilities from the same parameters, and responses
of older weights come from another policy. Ratios to the trained model's own log-probabilities leave both out; a
correction brings them back as bounded weights, or excludes what lies too far off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_realloc.algorithms.losses.functional import kl_estimate, masked_sum
from lightning_realloc.algorithms.losses.loss_reduction import token_metrics
from lightning_realloc.algorithms.losses.policy_losses import PolicyLoss, RatioLevel, log_ratios, response_sums
from lightning_realloc.algorithms.losses.proximal import RatioTo
from lightning_realloc.algorithms.settings import check_not_negative, check_positive_numbers, wrong_kind
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import OLDEST_AGES, Samples
from lightning_realloc.batch.training import Average
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.setting_hints import CORRECTION_HINTS, suggest_settings

CorrectionName = Literal["token-truncate", "sequence-mask", "geometric", "reject", "none"]
"""Names of corrections with published constants; ``"none"`` corrects nothing."""
Weigh = Literal["token", "sequence", "none"]
Reject = Literal["token", "sequence", "geometric", "none"]
_LEVELS: Mapping[str, RatioLevel] = {"token": "token", "sequence": "product", "geometric": "sequence"}
_MOST_LOG_RATIO = 20.0
"""Bound on logarithms of ratios, so that products over long responses stay finite."""


@suggest_settings(CORRECTION_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weights of tokens by their ratios, and exclusion of tokens whose ratios lie outside bounds.

    The ratio of a token is its probability under the trained model before the iteration's first step, over that
    recorded when it was drawn. Excluded tokens have weight 0 and stay in the denominators of averages, as in TRL.

    Sources: truncated weights: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025, https://fengyao.notion.site/off-policy-rl; masks: Team Ling, arXiv:2510.18855; products and geometric means of
    responses, and exclusion by one token: Liu et al., "When speed kills stability", 2025,
    https://richardli.xyz/rl-collapse; the ratio to the trained model: Hilton et al., arXiv:2110.00641.
    """

    weigh: Weigh = "token"
    """Weight of a token: its ratio, the product over its response (``"sequence"``), or 1 (``"none"``)."""
    floor: float = 0.0
    """Smallest weight of a token that is not excluded."""
    cap: float = 2.0
    """Largest weight."""
    reject: Reject = "none"
    """Ratio that must lie between ``low`` and ``high``: of a token, or a response's product (``"sequence"``) or
    ``"geometric"`` mean, which exclude whole responses."""
    low: float = 0.5
    """Smallest ratio that is not excluded."""
    high: float = 2.0
    """Largest ratio that is not excluded."""
    least_token: float = 0.0
    """Responses with a token whose ratio is smaller are excluded, whatever the others are."""
    max_age: int | None = None
    """Responses with a token from weights of more iterations ago are left out, also of denominators; None: none."""

    def __post_init__(self) -> None:
        check_positive_numbers(cap=self.cap, high=self.high)
        check_not_negative(floor=self.floor, low=self.low, least_token=self.least_token)
        require_choice("weigh", self.weigh, get_args(Weigh))
        require_choice("reject", self.reject, get_args(Reject))
        for lower, upper in (("floor", "cap"), ("low", "high")):
            if getattr(self, lower) >= getattr(self, upper):
                raise ConfigError(f"{lower}={getattr(self, lower)} must lie below {upper}={getattr(self, upper)}")
        if self.least_token >= 1:
            raise ConfigError(
                f"least_token={self.least_token} would exclude every response, as some ratio is always below 1; write "
                f"a small number such as 1e-4, or 0 to exclude none"
            )
        age = self.max_age
        if age is not None and (isinstance(age, bool) or not isinstance(age, int) or age < 0):
            raise ConfigError(f"max_age={age!r} must be a whole number of iterations, at least 0, or None")
        self._refuse_idle()

    def _refuse_idle(self) -> None:
        """Raise ConfigError for settings without an effect, and for bounds that exclude equal probabilities."""
        changed = {each.name for each in fields(self) if getattr(self, each.name) != each.default}
        for switch, ends, choices in (("weigh", ("floor", "cap"), Weigh), ("reject", ("low", "high"), Reject)):
            idle = [f"{name}={getattr(self, name)}" for name in ends if name in changed]
            if getattr(self, switch) == "none" and idle:
                ways = " or ".join(map(repr, get_args(choices)[:-1]))
                raise ConfigError(
                    f"{' and '.join(idle)} of Correction has no effect with {switch}='none'; write {switch}={ways}, or "
                    f"leave it out"
                )
        if self.weigh == self.reject == "none" and not changed & {"least_token", "max_age"}:
            raise ConfigError(
                "Correction(weigh='none') with reject='none' corrects nothing; write a weigh, a reject, a least_token "
                "or a max_age, or correction='none'"
            )
        if self.reject != "none" and not self.low <= 1 <= self.high:
            raise ConfigError(
                f"low={self.low} and high={self.high} exclude the ratio 1, that of equal probabilities; write a low of "
                f"at most 1 and a high of at least 1, such as those of 'geometric', low=0.999 and high=1.001"
            )

    def weights(self, proximal: Tensor, behaviour: Tensor, batch: PackedBatch) -> CorrectionWeights:
        """Return the factors of the tokens' losses.

        Args:
            proximal: (N,) log-probabilities of the trained model before its first step.
            behaviour: (N,) log-probabilities recorded when the tokens were drawn.
            batch: The micro-batch; values outside its ``response_mask`` are ignored.
        """
        differences = (proximal - behaviour).detach()
        kept = torch.ones_like(batch.response_mask)
        if self.reject != "none":
            ratios = _ratios(differences, batch, self.reject)
            kept = (ratios >= self.low) & (ratios <= self.high)
        if self.least_token > 0:
            improbable = (differences < math.log(self.least_token)).to(differences)
            kept = kept & (batch.per_token(response_sums(improbable, batch)) == 0)
        ratios = torch.ones_like(differences) if self.weigh == "none" else _ratios(differences, batch, self.weigh)
        bounded = ratios.clamp(self.floor, self.cap)
        return CorrectionWeights(torch.where(kept, bounded, 0.0), kept, kept & (bounded != ratios))


@dataclass(frozen=True, slots=True, eq=False)
class CorrectionWeights:
    """Weights of N packed tokens, without a gradient."""

    values: Tensor
    """(N,) factors of losses: 0 where excluded."""
    kept: Tensor
    """(N,) bool: True where not excluded."""
    truncated: Tensor
    """(N,) bool: True where the weight was set to a bound."""

    def metrics(self, mask: Tensor) -> dict[str, Average]:
        """Return the mean weight, the shares of excluded and truncated tokens, and the effective sample size.

        The effective sample size is ``(sum w)^2 / (n * sum w^2)`` of the n tokens in the ``mask``: 1 for equal weights.

        Source: Kish, "Survey sampling", 1965, §11.7.
        """
        shares = {"correction_excluded": (~self.kept).float(), "correction_truncated": self.truncated.float()}
        total, squares = masked_sum(self.values, mask), masked_sum(self.values.square(), mask)
        return {
            "correction_weight": Average(total, mask.sum()),
            "effective_sample_size": Average(total, mask.sum(), times=Average(total, squares)),
            **token_metrics(shares, mask),
        }


CORRECTIONS: Mapping[CorrectionName, Correction | None] = {
    "token-truncate": Correction(),
    "sequence-mask": Correction(weigh="sequence", reject="sequence", low=0.0),
    "geometric": Correction(weigh="none", reject="geometric", low=0.999, high=1.001, least_token=1e-4),
    "reject": Correction(weigh="none", reject="sequence"),
    "none": None,
}
"""Corrections by name. Constants: of verl's ``token_is``, ``seq_mis``, ``geo_rs`` and ``seq_rs``."""


def resolve_ratios(
    ratio_to: RatioTo | None,
    correction: Correction | CorrectionName | None,
    loss: PolicyLoss,
    *,
    is_other_engine: bool,
) -> tuple[RatioTo, Correction | None]:
    """Return both settings with their defaults.

    A correction asks for proximal ratios, and so does another engine, with ``"token-truncate"``. Else ratios are to the
    behaviour.

    Args:
        ratio_to: What was given; None: nothing.
        correction: What was given; None: nothing.
        loss: The policy loss.
        is_other_engine: Whether another program computes the rollout's log-probabilities, with kernels of its own.

    Raises:
        ConfigError: for an unknown name, or a correction that goes with neither the ratios nor the loss.
    """
    if isinstance(correction, str):
        require_choice("correction", correction, tuple(CORRECTIONS))
    elif correction is not None and not isinstance(correction, Correction):
        wanted = f"one of {', '.join(CORRECTIONS)}, or a value such as Correction(cap=3.0)"
        raise wrong_kind("correction", correction, wanted)
    named = CORRECTIONS[correction] if isinstance(correction, str) else correction
    corrects_engine = is_other_engine and not loss.weighs_responses
    if ratio_to is not None:
        require_choice("ratio_to", ratio_to, get_args(RatioTo))
    chosen = ratio_to or ("proximal" if named is not None or corrects_engine else "behaviour")
    if named is not None and (chosen == "behaviour" or loss.weighs_responses):
        raise ConfigError(
            f"correction={correction!r} with ratio_to={chosen!r} and policy_loss={loss}: ratios to the behaviour hold "
            f"what it corrects already, and Vespo's weights take them; use ratio_to='proximal' and another loss, or "
            f"leave correction out"
        )
    if correction is None and corrects_engine and chosen == "proximal":
        named = CORRECTIONS["token-truncate"]
    return chosen, named


def corrected_loss(
    values: Tensor, proximal: Tensor, batch: PackedBatch, correction: Correction | None
) -> tuple[Tensor, dict[str, Average]]:
    """Return the (N,) losses of tokens times their weights, and metrics of the difference and the weights."""
    behaviour, mask = batch["behaviour_logprobs"], batch.response_mask
    metrics = mismatch_metrics(proximal, behaviour, batch)
    if correction is None:
        return values, metrics
    weights = correction.weights(proximal, behaviour, batch)
    # An excluded token may have a loss that is not finite; zero times that is none either.
    return torch.where(weights.kept, values * weights.values, 0.0), metrics | weights.metrics(mask)


def refuse_stale(ratio_to: RatioTo, correction: Correction | None, cause: str) -> None:
    """Raise ConfigError, with the cause of responses from older weights, for proximal ratios without a correction.

    Weights bring in the policy that drew them: Fu et al., arXiv:2505.24298.
    """
    if ratio_to == "proximal" and correction is None:
        raise ConfigError(
            f"ratio_to='proximal' leaves out what was learnt since a token was drawn, and {cause}; use "
            f"ratio_to='behaviour', or correction='token-truncate', which weighs by what was learnt since"
        )


def too_old(samples: Samples, correction: Correction | None) -> Tensor:
    """Return (B,) bool: True for responses with a token older than ``max_age`` of the correction."""
    if correction is None or correction.max_age is None or OLDEST_AGES not in samples:
        return torch.zeros(len(samples), dtype=torch.bool)
    return samples.tensor(OLDEST_AGES) > correction.max_age


def mismatch_metrics(proximal: Tensor, behaviour: Tensor, batch: PackedBatch) -> dict[str, Average]:
    """Return the mean absolute difference between engine and trained model, and k3 from the engine to the model."""
    mask, proximal = batch.response_mask, proximal.detach()
    measured = {
        "engine_difference": (proximal - behaviour).abs(),
        "engine_kl": kl_estimate(behaviour, proximal, estimator="k3"),
    }
    return token_metrics(measured, mask)


def _ratios(differences: Tensor, batch: PackedBatch, level: Weigh | Reject) -> Tensor:
    """Return the (N,) ratios of tokens, or of their responses, from their (N,) differences of log-probabilities."""
    return log_ratios(differences, batch, level=_LEVELS[level]).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO).exp()
