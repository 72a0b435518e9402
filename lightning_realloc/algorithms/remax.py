"""REINFORCE with the reward of the greedy response as the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_realloc.algorithms.base.calls import compute
from lightning_realloc.algorithms.losses.advantages import require_shape
from lightning_realloc.algorithms.losses.kl import KL
from lightning_realloc.algorithms.rollout.policy_gradient import PolicyDefaults, PolicyGradient
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import SamplingParams


class ReMax(PolicyGradient):
    """Train an actor on rewards, each less the reward of the greedy response to the same prompt.

    Every iteration also generates and scores the greedy responses. They are not trained on.

    Source: Li et al., arXiv:2310.10505.

    It has the settings of :class:`PolicyGradient`, without ``advantages`` and ``dynamic_sampling``. Defaults:
    ``kl=KL(0.05, place="reward")``, which subtracts the divergence of every token and of those after it from its
    reward; ``loss_average="token"`` as in the authors' code. A divisor per response would make the divergence, which
    has no baseline, depend on lengths.
    """

    defaults = PolicyDefaults(
        kl=KL(0.05, estimator="k3", place="reward"), sampling=SamplingParams(), loss_average="token"
    )
    _answers_greedily = False

    def _check_loss(self) -> None:
        super()._check_loss()
        if self._refill is not None:
            raise ConfigError(
                "dynamic_sampling compares responses of a group, and ReMax each with the greedy one; leave it out"
            )

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
