"""REINFORCE with the other responses' mean reward as the baseline."""

from __future__ import annotations

from torch import Tensor

from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.losses.functional import KLEstimator, leave_one_out_advantages
from lightning_realloc.algorithms.losses.loss_options import KLPlace
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage
from lightning_realloc.algorithms.losses.policy_losses import RatioLevel
from lightning_realloc.algorithms.rollout.policy_gradient import PolicyGradient, PolicyGradientSettings
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.rollout.rewarded import check_group
from lightning_realloc.algorithms.settings import Unpack
from lightning_realloc.batch.samples import Samples
from lightning_realloc.generation import SamplingParams


class RLOO(PolicyGradient):
    """Train an actor on rewards, each less the mean of the other responses to the prompt. A response is one action.

    Source: Ahmadian et al., arXiv:2402.14740.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Reward functions, reward models, or a list of either; see :class:`RewardedModule`.
        sampling: Sampling of the rollout; ``n`` is the group size.
        kl_coef: Weight of the divergence; 0 leaves the reference out.
        kl_place: ``"reward"`` subtracts the response's divergence from its reward; ``"loss"`` adds it to the loss.
        kl_estimator: k1, k2 or k3, in the loss.
        ratio_level: Probability ratios of the whole response (``"product"``), of a ``"token"``, or of a ``"sequence"``.
        loss_average: Mean over each ``"sequence"`` and then over these, or over every ``"token"``; ``"constant"``:
            sums over ``sampling.max_new_tokens``; ``"sum"``: sums of responses.
        settings: Settings of :class:`PolicyGradient` and its bases; see :class:`GRPO`.
    """

    learns_whole_groups = True

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource,
        *,
        sampling: SamplingParams | None = None,
        kl_coef: float = 0.05,
        kl_place: KLPlace = "reward",
        kl_estimator: KLEstimator = "k3",
        ratio_level: RatioLevel = "product",
        loss_average: LossAverage = "sequence",
        **settings: Unpack[PolicyGradientSettings],
    ) -> None:
        super().__init__(
            actor, reward, sampling=sampling or SamplingParams(n=4), kl_coef=kl_coef, kl_place=kl_place,
            kl_estimator=kl_estimator, ratio_level=ratio_level, loss_average=loss_average, **settings,
        )  # fmt: skip
        check_group(self.sampling.n)

    def advantages(self, rewards: Tensor, samples: Samples) -> Tensor:
        """Return rewards less the mean of the others in the group."""
        return leave_one_out_advantages(rewards, samples.tensor("prompt_id"))
