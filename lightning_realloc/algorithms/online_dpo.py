"""Direct preference optimization on the actor's own responses: the best and the worst of a group are a pair."""

from __future__ import annotations

from numbers import Real
from typing import get_args

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.pairs import pair_metrics, sides
from lightning_realloc.algorithms.best_of_n import best_rows
from lightning_realloc.algorithms.losses.loss_reduction import token_metrics
from lightning_realloc.algorithms.losses.policy_losses import response_sums
from lightning_realloc.algorithms.losses.preference_losses import (
    OF_WHOLE_BATCH,
    PairLossName,
    PairLossSettings,
    Pairs,
    pair_loss,
)
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.rollout.rewarded import RewardedModule, RewardedSettings, check_group
from lightning_realloc.algorithms.settings import Unpack, check_positive, check_type
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Loss, Totals
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.generation import SamplingParams


class OnlineDPO(RewardedModule):
    """Train an actor to prefer the best of its own responses to the worst, relative to a reference.

    Groups of equal rewards make no pair.

    Source: Guo et al., arXiv:2402.04792; pairs of best and worst: Xiong et al., arXiv:2312.11456.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Reward functions, reward models, or a list of either; see :class:`RewardedModule`.
        sampling: Sampling of the rollout; a pair is made of ``n`` responses.
        loss: ``"sigmoid"``, or another of ``PairLossName`` that needs no ranks.
        beta: Strength of the pull to the reference.
        label_smoothing: Assumed share of wrong pairs, in losses that support it.
        settings: Settings of :class:`RewardedModule` and its bases.
    """

    group_size = 2
    default_learning_rate = 5e-7

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource | None = None,
        *,
        sampling: SamplingParams | None = None,
        loss: PairLossName = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        **settings: Unpack[RewardedSettings],
    ) -> None:
        super().__init__(actor, reward, sampling=sampling or SamplingParams(n=2), **settings)
        check_group(self.sampling.n)
        require_choice("loss", loss, sorted(set(get_args(PairLossName)) - OF_WHOLE_BATCH))
        check_positive(beta=beta)
        check_type(Real, label_smoothing=label_smoothing)
        smoothed = 0 < label_smoothing < 0.5
        if not smoothed and (label_smoothing or loss == "exo_pair"):
            raise ConfigError(
                f"label_smoothing={label_smoothing} must lie below 0.5, and above 0 with loss='exo_pair'; this is "
                f"loss={loss!r}"
            )
        self.loss = loss
        self.settings = PairLossSettings(beta=beta, label_smoothing=label_smoothing)

    @property
    def chooses(self) -> bool:
        """Always True."""
        return True

    def choose(self, samples: Samples) -> Samples | None:
        """Return pairs, chosen and rejected alternately; None, and so no step, if there are fewer than mini-batches."""
        rewards = samples.tensor("rewards")
        rows = pair_rows(rewards, samples.tensor("prompt_id"))
        self.log("reward_of_all", rewards.nanmean(), batch_size=1)
        self.log("pairs", len(rows) / 2 * self.sampling.n / len(samples), batch_size=1)
        enough = len(rows) >= 2 * self.train_options_of("actor").num_minibatches
        return samples.select(rows) if enough else None

    @train("actor", needs=("rollout", "ref_logprobs"))
    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return one micro-batch's part of the mean loss over pairs."""
        logprobs = self._logprobs(actor, batch)
        lengths = response_sums(torch.ones_like(logprobs), batch)
        columns = (sides(response_sums(values, batch)) for values in (logprobs, batch["ref_logprobs"]))
        pairs = Pairs(*next(columns), *next(columns), *sides(lengths))
        losses = pair_loss(self.loss, pairs, self.settings)
        margins = self.settings.beta * (pairs.chosen_ratios - pairs.rejected_ratios)
        metrics = pair_metrics(margins) | token_metrics(self.start_metrics(batch), batch.response_mask)
        return Loss(losses.sum() / totals.num_groups, metrics)


def pair_rows(rewards: Tensor, groups: Tensor) -> list[int]:
    """Return the positions of the best and the worst of the (B,) rewards of every group, alternately.

    Groups come in the order of their first sample; the first of equal rewards is taken. Groups of equal rewards are
    left out. NaN rewards are ignored.
    """
    best, worst = (best_rows(signed, groups, keep=1) for signed in (rewards, -rewards))
    of_group = {int(groups[row]): row for row in worst}
    pairs = [(row, of_group[int(groups[row])]) for row in best]
    first = {int(group): row for row, group in reversed(list(enumerate(groups.tolist())))}
    pairs.sort(key=lambda pair: first[int(groups[pair[0]])])
    return [row for pair in pairs if rewards[pair[0]] > rewards[pair[1]] for row in pair]
