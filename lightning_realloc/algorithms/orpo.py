"""Odds ratio preference optimization: fine-tuning and preferences in one loss, without a reference."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import compute, infer, train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.module import ModuleSettings
from lightning_realloc.algorithms.base.pairs import (
    PairwiseModule,
    both_sides,
    chosen_tokens,
    known_logprobs,
    packed_logprobs,
    pair_metrics,
    pair_sums,
    sides,
)
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.losses.preference_losses import odds_ratio_loss
from lightning_realloc.algorithms.settings import Unpack, check_not_negative
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.batch.training import Average, Loss, Totals
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs


class ORPO(PairwiseModule):
    """Train an actor on chosen responses, and to prefer them to the rejected ones.

    Source: Hong et al., arXiv:2403.07691, eq. 6.

    Args:
        actor: The model: a Hugging Face name or folder, a config, or a module.
        beta: Weight of the odds ratio next to the likelihood; lambda in the paper.
        settings: Settings of :class:`MultiModelModule`: learning rate, optimizer, schedule, tokenizer, seed.
    """

    evaluation_calls = ("actor.infer", "measure")
    totals_of = ("chosen_tokens",)

    def __init__(
        self,
        actor: ModelSource,
        *,
        beta: float = 0.1,
        **settings: Unpack[ModuleSettings],
    ) -> None:
        super().__init__(**settings)
        check_not_negative(beta=beta)
        self.beta = beta
        self.sources["actor"] = actor

    def roles(self) -> tuple[Role, ...]:
        """Return the single model."""
        return (self.make_role("actor", trained=True),)

    def prepare_batch(self, batch: Samples) -> Samples:
        """Add the divisor of the likelihood of chosen responses."""
        return batch.with_columns(chosen_tokens=chosen_tokens(batch))

    @infer("actor", needs="batch", produces="logprobs")
    def score(self, actor: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the log-probability of every response token, for held-out data."""
        return token_logprobs(actor, batch, only_responses=True).logprobs

    @compute(needs=("batch", "logprobs"), produces=("losses", "margins"), whole_batch=True)
    def measure(self, samples: Samples) -> Mapping[str, Column]:
        """Return every pair's loss and difference of mean log-probabilities, for both of its samples."""
        logprobs = known_logprobs(samples, "logprobs")
        odds, margins = self._odds(logprobs)
        nll = -pair_sums(logprobs)[0] * (len(odds) / chosen_tokens(samples).sum())
        return {"losses": both_sides((nll + self.beta * odds).float()), "margins": both_sides(margins)}

    @train("actor", needs="batch")
    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return one micro-batch's part of the likelihood per chosen token and of the odds ratio loss."""
        logprobs = packed_logprobs(batch, token_logprobs(actor, batch, only_responses=True).logprobs)
        odds, margins = self._odds(logprobs)
        nll = -pair_sums(logprobs)[0].sum()
        value = nll / totals.sums["chosen_tokens"] + self.beta * odds.sum() / totals.num_groups
        metrics = {
            "nll": Average(nll, sides(logprobs.lengths)[0].sum()),
            "odds_ratio_loss": Average(odds.sum(), len(odds)),
        }
        return Loss(value, metrics | pair_metrics(margins))

    def _odds(self, logprobs: Ragged) -> tuple[Tensor, Tensor]:
        """Return the (P,) odds ratio losses, and the differences of mean log-probabilities."""
        lengths = sides(logprobs.lengths.to(logprobs.values.device))
        chosen, rejected = (total / length for total, length in zip(pair_sums(logprobs), lengths, strict=True))
        return odds_ratio_loss(chosen, rejected), (chosen - rejected).detach()
