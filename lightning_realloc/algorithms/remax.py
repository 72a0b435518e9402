"""REINFORCE with the reward of the greedy response as the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_realloc.algorithms.base.calls import compute
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.losses.functional import KLEstimator
from lightning_realloc.algorithms.losses.loss_options import KLPlace
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage
from lightning_realloc.algorithms.losses.policy_losses import RatioLevel
from lightning_realloc.algorithms.rollout.policy_gradient import PolicyGradient, PolicyGradientSettings, require_shape
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.settings import Unpack
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import SamplingParams


class ReMax(PolicyGradient):
    """Train an actor on rewards, each less the reward of the greedy response to the same prompt.

    Every iteration also generates and scores the greedy responses. They are not trained on.

    Source: Li et al., arXiv:2310.10505.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Reward functions, reward models, or a list of either; see :class:`RewardedModule`.
        sampling: Sampling of the rollout.
        kl_coef: Weight of the divergence; 0 leaves the reference out.
        kl_place: ``"reward"`` subtracts the divergence of every token and of those after it from its reward;
            ``"loss"`` adds it to the loss.
        kl_estimator: k1, k2 or k3, in the loss.
        ratio_level: Probability ratio of a ``"token"``, a ``"sequence"`` (geometric mean), or their ``"product"``.
        loss_average: As in :class:`PolicyGradient`; over tokens as in the authors' code. A divisor per response would
            make the divergence, which has no baseline, depend on lengths.
        settings: Settings of :class:`PolicyGradient` and its bases; see :class:`GRPO`.
    """

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource,
        *,
        sampling: SamplingParams | None = None,
        kl_coef: float = 0.05,
        kl_place: KLPlace = "reward",
        kl_estimator: KLEstimator = "k3",
        ratio_level: RatioLevel = "token",
        loss_average: LossAverage = "token",
        **settings: Unpack[PolicyGradientSettings],
    ) -> None:
        super().__init__(
            actor, reward, sampling=sampling or SamplingParams(), kl_coef=kl_coef, kl_place=kl_place,
            kl_estimator=kl_estimator, ratio_level=ratio_level, loss_average=loss_average, **settings,
        )  # fmt: skip
        if self._refill is not None:
            raise ConfigError(
                "dynamic_sampling compares responses of a group, and ReMax each with the greedy one; leave it out"
            )
        self._answers_greedily = False

    @property
    def chooses(self) -> bool:
        """Always True: the greedy responses must be scored before training."""
        return True

    def rollout_sampling(self) -> SamplingParams:
        """Return the sampling of the current pass."""
        greedy = replace(self.sampling, n=1, temperature=0.0)
        return greedy if self._answers_greedily else super().rollout_sampling()

    def first_walk(self, batch: Samples) -> Samples:
        """Return scored responses with ``greedy_rewards``, the rewards of the greedy responses to their prompts."""
        samples = super().first_walk(batch)
        self._answers_greedily = True
        try:
            greedy = super().first_walk(batch)
        finally:
            self._answers_greedily = False
        row_of = {prompt: row for row, prompt in enumerate(greedy.tensor("prompt_id").tolist())}
        rows = torch.tensor([row_of[prompt] for prompt in samples.tensor("prompt_id").tolist()])
        return samples.with_columns(greedy_rewards=greedy.tensor("rewards")[rows])

    def choose(self, samples: Samples) -> Samples:
        """Return all samples."""
        return samples

    @compute(needs=("rollout", "rewards", "ref_logprobs"), produces="advantages")
    def compare(self, samples: Samples) -> Mapping[str, Column]:
        """Return the return of every token, less the greedy reward; NaN for excluded responses."""
        rewards = samples.tensor("rewards")
        advantages = require_shape("advantages()", self.advantages(rewards, samples), rewards, "response")
        return self.token_advantages(samples, advantages)

    def advantages(self, rewards: Tensor, samples: Samples) -> Tensor:
        """Return rewards less the greedy response's; NaN if either is missing."""
        return rewards - samples.tensor("greedy_rewards")

    def has_signal(self, samples: Samples) -> bool:
        """Return whether a reward differs from the greedy response's."""
        compared = samples.tensor("rewards") - samples.tensor("greedy_rewards")
        return bool((compared.nan_to_num() != 0).any())

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return also the mean reward of greedy responses."""
        made = "greedy_rewards" in samples
        return super().summarize(samples) | (
            {"greedy_reward": samples.tensor("greedy_rewards").nanmean()} if made else {}
        )
