"""Supervised fine-tuning: maximise the likelihood of given responses."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import compute, infer, train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.module import ModuleSettings, MultiModelModule
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.base.rollout_columns import num_model_tokens
from lightning_realloc.algorithms.losses.functional import cross_entropy, sequence_sums
from lightning_realloc.algorithms.settings import Unpack
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.batch.training import Average, Loss, Totals
from lightning_realloc.errors import DataError
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs


class SFT(MultiModelModule):
    """Train one model on prompts with given responses; only the marked response tokens are learned.

    Args:
        actor: The model: a Hugging Face name or folder, a config, or a module.
        settings: Settings of :class:`MultiModelModule`: learning rate, optimizer, schedule, tokenizer, training
            options, seed.
    """

    evaluation_calls = ("actor.infer", "measure")
    default_learning_rate = 2e-5
    dropout = True
    batch_columns = ("prompt_ids", "response_ids")
    data_module = "SFTDataModule"

    def __init__(self, actor: ModelSource, **settings: Unpack[ModuleSettings]) -> None:
        super().__init__(**settings)
        self.sources["actor"] = actor

    def roles(self) -> tuple[Role, ...]:
        """Return the single model."""
        return (self.make_role("actor", trained=True),)

    def check_batch(self, batch: Samples) -> None:
        """Raise for pairs and labelled responses, because the bad ones would be learned as well."""
        if {"chosen", "rejected"} <= batch.data.keys():
            raise DataError(
                "SFT learns every response that it is given, and of pairs that is also the rejected ones; give "
                "SFTDataModule rows of prompt and chosen, named completion, or use DPO or ORPO"
            )

        if "label" in batch and "completion" in batch.data:
            raise DataError(
                "SFT learns every response that it is given, and of judged ones that is also the undesirable; give "
                "SFTDataModule the others, or use KTO"
            )

    @infer("actor", needs="batch", produces="logprobs")
    def score(self, actor: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the log-probability of every response token, for held-out data."""
        return token_logprobs(actor, batch, only_responses=True).logprobs

    @compute(needs="logprobs", produces="response_logprobs")
    def measure(self, samples: Samples) -> Mapping[str, Column]:
        """Return the log-probability of every response."""
        return {"response_logprobs": sequence_sums(samples.ragged("logprobs"))}

    @train("actor", needs="batch")
    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return one micro-batch's part of the mean negative log-likelihood per token."""
        logprobs = token_logprobs(actor, batch, only_responses=True).logprobs
        loss = cross_entropy(logprobs, batch.response_mask).sum()
        return Loss(loss / totals.num_tokens, {"nll": Average(loss, batch.response_mask.sum())})

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return the mean negative log-likelihood per token, if responses were scored."""
        if "response_logprobs" not in samples:
            return {}
        return {"loss": -samples.tensor("response_logprobs").sum() / num_model_tokens(samples).sum()}
