"""Group-relative policy optimisation, and the variants that have been published of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_realloc.algorithms.base.role import ModelSource
from lightning_realloc.algorithms.losses.functional import group_advantages
from lightning_realloc.algorithms.rollout.policy_gradient import PolicyGradient
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.rollout.rewarded import check_group
from lightning_realloc.batch.samples import Samples
from lightning_realloc.generation import SamplingParams


class GRPO(PolicyGradient):
    """Train an actor on rewards, each compared with those of other responses to the same prompt.

    Source: Shao et al., arXiv:2402.03300. Settings that make it Dr. GRPO, DAPO, GSPO or CISPO: docs/policies.md.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Reward functions, reward models, or a list of either; see :class:`RewardedModule`.
        sampling: Of the rollout; ``n`` is the group size.
        evaluation_sampling: Of ``validate`` and ``test``; by default one greedy response per prompt.
        normalize_by_std: Divide advantages by the group's standard deviation.
        settings: Of :class:`PolicyGradient`: divergence, ratios, loss; of :class:`RewardedModule`: reward weights,
            reference, tokenizer; of :class:`PolicyModule`: environment, conversation, rollout
            budget; of :class:`MultiModelModule`: learning rate, optimizer, schedule, training options, seed.
    """

    learns_whole_groups = True

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource,
        *,
        sampling: SamplingParams | None = None,
        evaluation_sampling: SamplingParams | None = None,
        normalize_by_std: bool = True,
        **settings: Any,
    ) -> None:
        sampling = sampling or SamplingParams(n=8)
        super().__init__(actor, reward, sampling=sampling, evaluation_sampling=evaluation_sampling, **settings)
        check_group(self.sampling.n)
        self.normalize_by_std = normalize_by_std

    def advantages(self, rewards: Tensor, samples: Samples) -> Tensor:
        """Return rewards less their group's mean, over its deviation."""
        return group_advantages(rewards, samples.tensor("prompt_id"), std_eps=1e-4 if self.normalize_by_std else None)
