"""REINFORCE++: REINFORCE with PPO's tricks and without a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

from torch import Tensor

from lightning_realloc.algorithms.base.calls import compute
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.losses.advantages import group_advantages
from lightning_realloc.algorithms.losses.kl import KL
from lightning_realloc.algorithms.rollout.policy_gradient import (
    PolicyDefaults,
    PolicyGradient,
    PolicyGradientSettings,
)
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.rollout.rewarded import check_group
from lightning_realloc.algorithms.settings import Unpack, check_share
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.errors import require_choice
from lightning_realloc.generation import SamplingParams

Baseline = Literal["batch", "group"]


class ReinforcePlusPlus(PolicyGradient):
    """Train an actor on the returns of tokens, normalized over the whole batch.

    Source: Hu et al., arXiv:2501.03262.

    It has the settings of :class:`PolicyGradient`, without ``advantages``. Defaults: ``kl=KL(0.01, estimator="k2",
    place="reward")``, which subtracts the divergence from every token's reward, and ``loss_average="token"``. With
    ``baseline="group"``: ``sampling=SamplingParams(n=8)``, and ``place="loss"``.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Reward functions, reward models, or a list of either; see :class:`RewardedModule`.
        baseline: ``"batch"``: returns are normalised over all tokens of the batch; ``"group"``: the mean of its group
            is first subtracted from each reward.
        discount: Discount of a reward per token.
        settings: Settings of :class:`PolicyGradient` and its bases.
    """

    defaults = PolicyDefaults(
        kl=KL(0.01, estimator="k2", place="reward"), sampling=SamplingParams(), loss_average="token"
    )

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource | None = None,
        *,
        baseline: Baseline = "batch",
        discount: float = 1.0,
        **settings: Unpack[PolicyGradientSettings],
    ) -> None:
        require_choice("baseline", baseline, get_args(Baseline))
        if baseline == "group":
            in_loss = replace(self.defaults.kl, place="loss")
            self.defaults = replace(self.defaults, sampling=SamplingParams(n=8), kl=in_loss)
        super().__init__(actor, reward, **settings)
        check_share(discount=discount)
        self.baseline = baseline
        self.discount = discount
        if baseline == "group" or self.chooses:
            check_group(self.sampling.n)

    @property
    def learns_whole_groups(self) -> bool:
        """Whether responses to one prompt are compared with each other."""
        return self.baseline == "group"

    @compute(needs=("rollout", "rewards", "ref_logprobs"), produces="advantages", whole_batch=True)
    def compare(self, samples: Samples) -> Mapping[str, Column]:
        """Return the return of every token, normalized over all tokens of the batch; NaN for excluded responses."""
        compared = self.advantages(samples.tensor("rewards"), samples)
        return self.token_advantages(samples, compared, discount=self.discount, normalize=True)

    def advantages(self, rewards: Tensor, samples: Samples) -> Tensor:
        """Return the rewards, less their group's mean with ``baseline="group"``."""
        if self.baseline == "batch":
            return rewards
        return group_advantages(rewards, samples.tensor("prompt_id"), std_eps=None)
