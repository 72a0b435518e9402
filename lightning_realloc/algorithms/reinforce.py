"""REINFORCE++: REINFORCE with PPO's tricks and without a critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from lightning_realloc.algorithms.base.calls import compute
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.losses.functional import (
    KLEstimator,
    group_advantages,
)
from lightning_realloc.algorithms.losses.loss_options import KLPlace
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage
from lightning_realloc.algorithms.losses.policy_losses import RatioLevel
from lightning_realloc.algorithms.rollout.policy_gradient import PolicyGradient, PolicyGradientSettings
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.rollout.rewarded import check_group
from lightning_realloc.algorithms.settings import Unpack, check_choice, check_share
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.generation import SamplingParams

Baseline = Literal["batch", "group"]


class ReinforcePlusPlus(PolicyGradient):
    """Train an actor on the returns of tokens, normalized over the whole batch.

    Source: Hu et al., arXiv:2501.03262.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Reward functions, reward models, or a list of either; see :class:`RewardedModule`.
        sampling: Sampling of the rollout; with ``baseline="group"``, ``n`` is the group size.
        baseline: ``"batch"``: returns are normalised over all tokens of the batch; ``"group"``: the mean of its group
            is first subtracted from each reward.
        discount: Discount of a reward per token.
        kl_coef: Weight of the divergence; 0 leaves the reference out.
        kl_place: ``"reward"`` subtracts the divergence from every token's reward; ``"loss"`` adds it to the loss.
            None: ``"reward"`` with ``baseline="batch"``, ``"loss"`` with ``"group"``.
        kl_estimator: k1, k2 or k3, in the loss.
        loss_average: Mean over each ``"sequence"`` and then over these, or over every ``"token"``; ``"constant"``:
            sums over ``sampling.max_new_tokens``; ``"sum"``: sums of responses.
        ratio_level: Probability ratio of a ``"token"``, a ``"sequence"`` (geometric mean), or their ``"product"``.
        settings: Settings of :class:`PolicyGradient` and its bases; see :class:`GRPO`.
    """

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource,
        *,
        sampling: SamplingParams | None = None,
        baseline: Baseline = "batch",
        discount: float = 1.0,
        kl_coef: float = 0.01,
        kl_place: KLPlace | None = None,
        kl_estimator: KLEstimator = "k2",
        loss_average: LossAverage = "token",
        ratio_level: RatioLevel = "token",
        **settings: Unpack[PolicyGradientSettings],
    ) -> None:
        check_choice("baseline", baseline, get_args(Baseline))
        place: KLPlace = "reward" if baseline == "batch" else "loss"
        super().__init__(
            actor, reward, sampling=sampling or SamplingParams(n=1 if baseline == "batch" else 8), kl_coef=kl_coef,
            kl_place=kl_place or place, kl_estimator=kl_estimator, loss_average=loss_average,
            ratio_level=ratio_level, **settings,
        )  # fmt: skip
        check_share(discount=discount)
        self.baseline = baseline
        self.discount = discount
        if baseline == "group" or self.chooses:
            check_group(self.sampling.n)

    @property
    def learns_whole_groups(self) -> bool:  # type: ignore[override]
        """Whether responses to one prompt are compared with each other."""
        return self.baseline == "group"

    @compute(needs=("rollout", "rewards", "ref_logprobs"), produces="advantages", whole_batch=True)
    def compare(self, samples: Samples) -> Mapping[str, Column]:
        """Return the return of every token, normalized over all tokens of the batch; NaN for excluded responses."""
        rewards = samples.tensor("rewards")
        if self.baseline == "group":
            rewards = group_advantages(rewards, samples.tensor("prompt_id"), std_eps=None)
        return self.token_advantages(samples, rewards, discount=self.discount, normalize=True)
