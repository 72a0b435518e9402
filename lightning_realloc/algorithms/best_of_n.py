"""Best-of-n: sample several responses, and fine-tune on the best."""

from __future__ import annotations

from numbers import Integral, Real
from typing import get_args

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.rollout.rewarded import RewardedModule, RewardedSettings, check_group
from lightning_realloc.algorithms.settings import Unpack, check_type
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Average, Loss, Totals
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.generation import SamplingParams


class BestOfN(RewardedModule):
    """Train an actor on the best of its own responses to every prompt.

    Source: Dong et al., arXiv:2304.06767 (RAFT); with a ``min_reward``: Yuan et al., arXiv:2308.01825 (RFT).

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Reward functions, reward models, or a list of either; see :class:`RewardedModule`.
        sampling: Sampling of the rollout; ``n`` responses are compared.
        keep: Number of responses per prompt to train on.
        min_reward: Smallest reward of a response to train on; None: no minimum.
        loss_average: Mean over every ``"token"``, or over each ``"sequence"`` and then over these; see
            :class:`PolicyGradient`.
        settings: Settings of :class:`RewardedModule` and its bases.
    """

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource | None = None,
        *,
        sampling: SamplingParams | None = None,
        keep: int = 1,
        min_reward: float | None = None,
        loss_average: LossAverage = "token",
        **settings: Unpack[RewardedSettings],
    ) -> None:
        super().__init__(actor, reward, sampling=sampling or SamplingParams(n=8), **settings)
        check_group(self.sampling.n)
        require_choice("loss_average", loss_average, get_args(LossAverage))
        check_type(Integral, keep=keep)
        if not 1 <= keep <= self.sampling.n:
            raise ConfigError(f"keep={keep} must lie between 1 and sampling.n={self.sampling.n}")
        check_type(Real, min_reward=min_reward)
        self.keep = keep
        self.min_reward = min_reward
        self.loss_average = loss_average

    @property
    def has_reference(self) -> bool:
        """Always False."""
        return False

    @property
    def chooses(self) -> bool:
        """Always True."""
        return True

    def choose(self, samples: Samples) -> Samples | None:
        """Return the best responses; None, and so no step, if there are fewer than mini-batches."""
        rewards = samples.tensor("rewards")
        rows = best_rows(rewards, samples.tensor("prompt_id"), keep=self.keep, min_reward=self.min_reward)
        self.log("reward_of_all", rewards.nanmean(), batch_size=1)
        self.log("kept", len(rows) / len(samples), batch_size=1)
        enough = len(rows) >= self.train_options_of("actor").num_minibatches
        return samples.select(rows) if enough else None

    @train("actor", needs="rollout")
    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return one micro-batch's part of the mean negative log-likelihood."""
        values, mask = -self._logprobs(actor, batch), batch.response_mask
        return Loss(self.average_loss(values, batch, totals), {"nll": Average(values.sum(), mask.sum())})


def best_rows(rewards: Tensor, groups: Tensor, *, keep: int, min_reward: float | None = None) -> list[int]:
    """Return the ascending positions of the ``keep`` largest of the (B,) rewards of every group.

    The first one wins a tie. NaN rewards and those below ``min_reward`` are excluded.
    """
    least = -torch.inf if min_reward is None else min_reward
    best: dict[int, list[int]] = {}
    for row in torch.argsort(rewards, descending=True, stable=True).tolist():
        if float(rewards[row]) >= least:  # False for NaN
            best.setdefault(int(groups[row]), []).append(row)
    return sorted(row for rows in best.values() for row in rows[:keep])
