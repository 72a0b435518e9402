"""Group-relative policy optimization and its published variants."""

from __future__ import annotations

from torch import Tensor

from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.losses.functional import KLEstimator, group_advantages
from lightning_realloc.algorithms.losses.loss_options import KLPlace
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage
from lightning_realloc.algorithms.losses.policy_losses import RatioLevel
from lightning_realloc.algorithms.rollout.policy_gradient import PolicyGradient, PolicyGradientSettings
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.rollout.rewarded import check_group
from lightning_realloc.algorithms.settings import Unpack, check_type
from lightning_realloc.batch.samples import Samples
from lightning_realloc.generation import SamplingParams


class GRPO(PolicyGradient):
    """Train an actor on rewards, each compared with those of other responses to the same prompt.

    Source: Shao et al., arXiv:2402.03300. Settings for Dr. GRPO, DAPO, GSPO or CISPO: docs/online-algorithms.md.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Reward functions, reward models, or a list of either; see :class:`RewardedModule`.
        sampling: Sampling of the rollout; ``n`` is the group size.
        normalize_by_std: Divide advantages by the group's standard deviation.
        kl_coef: Weight of the divergence from the reference; with 0 there is no reference.
        kl_estimator: k1, k2 or k3, in the loss.
        kl_place: ``"loss"`` adds the divergence to every token's loss; ``"reward"`` subtracts it (k1) from rewards.
        ratio_level: Probability ratio of a ``"token"``, a ``"sequence"`` (geometric mean), or their ``"product"``.
        loss_average: Mean over every ``"token"`` as in DAPO, or over each ``"sequence"`` and then over these as in the
            paper; ``"constant"``: sums over ``sampling.max_new_tokens``; ``"sum"``: sums of responses.
        settings: Settings of :class:`PolicyGradient` (ratios, loss), :class:`RewardedModule` (reward weights,
            reference, tokenizer), :class:`PolicyModule` (evaluation, environment, conversation, rollout budget) and
            :class:`MultiModelModule` (learning rate, optimizer, schedule, training options, seed).
    """

    learns_whole_groups = True

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource,
        *,
        sampling: SamplingParams | None = None,
        normalize_by_std: bool = True,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        kl_place: KLPlace = "loss",
        ratio_level: RatioLevel = "token",
        loss_average: LossAverage = "token",
        **settings: Unpack[PolicyGradientSettings],
    ) -> None:
        super().__init__(
            actor,
            reward,
            sampling=sampling or SamplingParams(n=8),
            kl_coef=kl_coef,
            kl_estimator=kl_estimator,
            kl_place=kl_place,
            ratio_level=ratio_level,
            loss_average=loss_average,
            **settings,
        )
        check_group(self.sampling.n)
        check_type(bool, normalize_by_std=normalize_by_std)
        self.normalize_by_std = normalize_by_std

    def advantages(self, rewards: Tensor, samples: Samples) -> Tensor:
        """Return rewards less their group's mean, divided by its standard deviation."""
        return group_advantages(rewards, samples.tensor("prompt_id"), std_eps=1e-4 if self.normalize_by_std else None)
