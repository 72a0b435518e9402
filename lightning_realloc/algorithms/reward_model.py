"""Reward model: one score per response, learned from preference pairs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import compute, infer, train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.module import ModuleSettings
from lightning_realloc.algorithms.base.pairs import PairwiseModule, both_sides, pair_metrics, sides
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.losses.pair_metrics import calibration_error, ranking_metrics
from lightning_realloc.algorithms.losses.preference_losses import bradley_terry_loss
from lightning_realloc.algorithms.settings import Unpack, check_not_negative
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.batch.training import Average, Loss, Totals
from lightning_realloc.runtime.parallel.packed_forward import sequence_scores


class RewardModel(PairwiseModule):
    """Train a model to give the preferred response of a pair the higher score.

    An optional column ``margin`` holds the minimum difference of each pair; see :class:`PreferenceDataModule`.

    Source: Bradley and Terry, Biometrika 39 (1952); of language models: Ouyang et al., arXiv:2203.02155, eq. 1.

    Args:
        reward: The model: a Hugging Face name or folder, a config, or a module. Without a head of one label it gets a
            new one. The score is read at the last token of a response, its end token.
        centre_coef: Weight of the squared sum of a pair's scores, which keeps scores around zero; 0 leaves it out.
        settings: Settings of :class:`MultiModelModule`: learning rate, optimizer, schedule, tokenizer, seed.
    """

    evaluation_calls = ("reward.infer", "measure")
    default_learning_rate = 1e-5

    def __init__(
        self,
        reward: ModelSource,
        *,
        centre_coef: float = 0.0,
        **settings: Unpack[ModuleSettings],
    ) -> None:
        super().__init__(**settings)
        check_not_negative(centre_coef=centre_coef)
        self.centre_coef = centre_coef
        self.sources["reward"] = reward

    def roles(self) -> tuple[Role, ...]:
        """Return the single model."""
        return (self.make_role("reward", trained=True, task="sequence_classification"),)

    @infer("reward", needs="batch", produces="scores")
    def score(self, reward: nn.Module, batch: PackedBatch) -> Tensor:
        """Return every response's score, for held-out data."""
        return sequence_scores(reward, batch).float()

    @compute(needs=("batch", "scores"), produces=("losses", "margins"))
    def measure(self, samples: Samples) -> Mapping[str, Column]:
        """Return every pair's loss and difference of scores, for both of its samples."""
        margins = samples.tensor("margin") if "margin" in samples else None
        losses, differences = self._losses(samples.tensor("scores"), margins)
        return {"losses": both_sides(losses), "margins": both_sides(differences)}

    @train("reward", needs="batch")
    def reward_loss(self, reward: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return one micro-batch's part of the mean loss over pairs."""
        scores = sequence_scores(reward, batch).float()
        losses, differences = self._losses(scores, batch.columns.get("margin"))
        metrics = {"score": Average(scores.detach().sum(), len(scores)), **pair_metrics(differences)}
        return Loss(losses.sum() / totals.num_groups, metrics)

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return also the mean score, the calibration error and ranking metrics of all responses."""
        if "losses" not in samples:
            return {}
        scores = samples.tensor("scores")
        chosen = torch.tensor([True, False]).repeat(len(samples) // 2)
        found = {"score": scores.mean(), "calibration_error": calibration_error(sides(samples.tensor("margins"))[0])}
        return super().summarize(samples) | found | ranking_metrics(scores, chosen)

    def _losses(self, scores: Tensor, margins: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the (P,) losses and score differences of (2P,) scores and margins."""
        chosen, rejected = sides(scores)
        apart = 0.0 if margins is None else sides(margins)[0].to(scores)
        losses = bradley_terry_loss(chosen, rejected, apart, centre_coef=self.centre_coef)
        return losses, (chosen - rejected).detach()
