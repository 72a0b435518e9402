"""Kahneman-Tversky optimization: learn from single responses with a good or bad label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import compute, train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.referenced import ReferencedModule, ReferencedSettings
from lightning_realloc.algorithms.losses.functional import sequence_sums
from lightning_realloc.algorithms.losses.pair_metrics import ranking_metrics
from lightning_realloc.algorithms.losses.preference_losses import kto_loss
from lightning_realloc.algorithms.settings import (
    Unpack,
    check_minibatches,
    check_not_negative,
    check_positive,
    check_single_step,
)
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples, prompt_keys
from lightning_realloc.batch.training import Average, Loss, Totals
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import DataError, require_choice
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs

_RESPONSE = ("response_ids", "model_mask")
"""Columns of a response's tokens."""
_MISMATCHED, _MISMATCHED_MASK, _MISMATCHED_LOGPROBS = "mismatched_ids", "mismatched_mask", "mismatched_ref_logprobs"
KTOLoss = Literal["kto", "apo_zero_unpaired"]


class KTO(ReferencedModule):
    """Train an actor on responses with a desirable or undesirable label each.

    Gains and losses count from a reference point, the divergence from the reference. It is estimated on mismatched
    responses: each prompt is also scored with the response to the prompt before it, and these samples are not trained
    on. With ``precompute_reference``, responses are shifted over all rows, in their order.

    Source: Ethayarajh et al., arXiv:2402.01306.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        loss: ``"kto"``, or ``"apo_zero_unpaired"``, which counts from zero and needs no estimate.
        beta: Speed at which gains and losses saturate; larger stays closer to the reference.
        desirable_weight: Weight of the loss of desirable responses.
        undesirable_weight: Weight of the loss of undesirable responses. The paper keeps the ratio of weight times count
            between 1 : 1 and 4 : 3.
        settings: Settings of :class:`ReferencedModule` (reference, precomputing) and :class:`MultiModelModule`
            (learning
            rate, optimizer, schedule, tokenizer, training options, seed).
    """

    batch_columns = ("prompt_ids", "response_ids", "label")
    data_module = "BinaryFeedbackDataModule"

    def __init__(
        self,
        actor: ModelSource,
        *,
        loss: KTOLoss = "kto",
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        **settings: Unpack[ReferencedSettings],
    ) -> None:
        super().__init__(actor, **settings)
        require_choice("loss", loss, get_args(KTOLoss))
        check_positive(beta=beta)
        check_not_negative(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
        if loss == "kto":
            check_single_step("loss='kto' estimates the divergence from the whole batch", self.train_options)
        self.loss = loss
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls, without the estimate if the loss counts from zero."""
        calls = super().calls()
        if self.loss == "kto":
            return calls
        kept = [call for call in calls if call.name != "estimate_kl"]
        return tuple(replace(call, needs=tuple(name for name in call.needs if name != "kl")) for call in kept)

    def check_batch(self, batch: Samples) -> None:
        """Raise for labels other than 0 and 1, empty responses, and fewer samples than mini-batches."""
        super().check_batch(batch)
        labels, lengths = batch.tensor("label"), batch.ragged("response_ids").lengths
        wrong = (labels != 0) & (labels != 1)
        for at_fault, what in ((wrong, "a label of 0 or 1"), (lengths == 0, "a response")):
            if bool(at_fault.any()):
                row = int(at_fault.nonzero()[0])
                raise DataError(f"every sample needs {what}; sample {int(batch.ids[row])} has none, leave it out")
        if self.trainer.training:
            check_minibatches(len(batch), self.train_options_of("actor"))

    def prepare_batch(self, batch: Samples) -> Samples:
        """Add mismatched samples after each sample, if the loss needs them.

        A last batch of held-out data may have a single prompt; its gains count from zero.
        """
        if self.loss != "kto":
            return batch
        if _MISMATCHED in batch:
            return with_known_mismatches(batch)
        if _is_one_prompt(batch) and not self.trainer.training:
            return batch.with_columns(trained=torch.ones(len(batch), dtype=torch.bool))
        return with_mismatches(batch)

    def reference_columns(self, table: Samples, batch_size: int) -> dict[str, Column]:
        """Return also a mismatched response of each row and its scores, if the loss needs them.

        Held-out rows of a single prompt have none, and count from zero.
        """
        if self.loss != "kto" or _is_one_prompt(table):
            return super().reference_columns(table, batch_size)
        both = with_mismatches(table)
        said, own = self.compute_ref_logprobs(both, batch_size), torch.arange(len(table)) * 2
        masks = {} if "model_mask" not in both else {_MISMATCHED_MASK: both.ragged("model_mask").select(own + 1)}
        return {
            "ref_logprobs": said.select(own),
            _MISMATCHED: both.ragged("response_ids").select(own + 1),
            **masks,
            _MISMATCHED_LOGPROBS: said.select(own + 1),
        }

    # ---- the calls
    @compute(needs=("batch", "logprobs", "ref_logprobs"), produces="kl", whole_batch=True)
    def estimate_kl(self, samples: Samples) -> Mapping[str, Column]:
        """Return the reference point for each sample: the mean log-ratio of mismatched samples, at least 0.

        It is not an estimate of a divergence by itself, but it moves with the policy.
        """
        return {"kl": self._reference_point(samples)}

    @compute(needs=("batch", "logprobs", "ref_logprobs"), produces=("losses", "ratios"), whole_batch=True)
    def measure(self, samples: Samples) -> Mapping[str, Column]:
        """Return the loss and the log-ratio of every sample."""
        ratios, desirable = _ratios(samples), samples.tensor("label").bool()
        return {"losses": self._losses(ratios, desirable, self._reference_point(samples)), "ratios": ratios}

    @train("actor", needs=("batch", "ref_logprobs", "kl"))
    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return one micro-batch's part of the mean loss."""
        logprobs = sequence_sums(batch.responses(token_logprobs(actor, batch, only_responses=True).logprobs))
        ratios = logprobs - sequence_sums(batch.responses(batch["ref_logprobs"])).to(logprobs)
        desirable = batch["label"].bool()
        kl = batch["kl"] if self.loss == "kto" else torch.zeros_like(ratios)
        losses = self._losses(ratios, desirable, kl)
        rewards = self.beta * ratios.detach()
        metrics = {
            "kl": Average(kl.sum(), len(batch)),
            "desirable_reward": Average(torch.where(desirable, rewards, 0.0).sum(), desirable.sum()),
            "undesirable_reward": Average(torch.where(desirable, 0.0, rewards).sum(), (~desirable).sum()),
        }
        return Loss(losses.sum() / totals.num_sequences, metrics)

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return the mean loss, mean rewards by label, their difference, and ranking metrics."""
        if "losses" not in samples:
            return {}
        kept = samples.tensor("trained").bool() if "trained" in samples else torch.ones(len(samples), dtype=torch.bool)
        desirable, rewards = samples.tensor("label").bool(), self.beta * samples.tensor("ratios")
        found = {"loss": samples.tensor("losses")[kept].mean()}
        for name, rows in (("desirable_reward", desirable & kept), ("undesirable_reward", ~desirable & kept)):
            if bool(rows.any()):
                found[name] = rewards[rows].mean()
        if len(found) == 3:
            found["margin"] = found["desirable_reward"] - found["undesirable_reward"]
        return found | ranking_metrics(rewards[kept], desirable[kept])

    # ---- helpers
    def _losses(self, ratios: Tensor, desirable: Tensor, kl: Tensor) -> Tensor:
        return kto_loss(
            ratios, desirable, kl.to(ratios), beta=self.beta, desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )  # fmt: skip

    def _reference_point(self, samples: Samples) -> Tensor:
        """Return (B,) the reference point, equal for all samples."""
        if self.loss != "kto" or bool(samples.tensor("trained").all()):
            return torch.zeros(len(samples))
        mismatched = _ratios(samples)[~samples.tensor("trained")]
        return mismatched.mean().clamp(min=0.0).expand(len(samples)).clone()


def _ratios(samples: Samples) -> Tensor:
    """Return the (B,) log-ratios of responses."""
    return sequence_sums(samples.ragged("logprobs")) - sequence_sums(samples.ragged("ref_logprobs"))


def _is_one_prompt(batch: Samples) -> bool:
    return len(prompt_keys(batch).unique()) == 1


def with_mismatches(batch: Samples) -> Samples:
    """Return each sample followed by its prompt with a mismatched response: the nearest earlier one to another prompt.

    The first samples take responses from the end. Ids double; ``trained`` is True for the original samples.

    Raises:
        DataError: if all prompts are equal.
    """
    prompts = prompt_keys(batch).tolist()
    if _is_one_prompt(batch):
        raise DataError(
            f"loss='kto' needs two different prompts in a batch to estimate the divergence, and all {len(batch)} are "
            f"the same; raise batch_size, shuffle, or use loss='apo_zero_unpaired'"
        )
    rows: list[int] = []
    for row, prompt in enumerate(prompts):
        other = row - 1
        while prompts[other] == prompt:
            other -= 1
        rows += [row, other % len(prompts)]
    both = batch.repeat(2)
    trained = torch.tensor([True, False]).repeat(len(batch))
    responses = _responses(*(batch.ragged(name).select(rows) for name in _RESPONSE if name in batch))
    return both.with_columns(**responses, trained=trained)


def with_known_mismatches(batch: Samples) -> Samples:
    """Return the samples of :func:`with_mismatches`, with mismatched responses and scores from the rows."""
    rows = torch.arange(len(batch) * 2).view(2, -1).T.flatten()  # alternately own and mismatched

    def in_turn(own: str, mismatched: str) -> Ragged:
        return Ragged.concatenate([batch.ragged(own), batch.ragged(mismatched)]).select(rows)

    names = zip(_RESPONSE, (_MISMATCHED, _MISMATCHED_MASK), strict=True)
    responses = _responses(*(in_turn(own, mismatched) for own, mismatched in names if mismatched in batch))
    return (
        batch.without_columns(_MISMATCHED, _MISMATCHED_MASK, _MISMATCHED_LOGPROBS)
        .repeat(2)
        .with_columns(
            **responses,
            ref_logprobs=in_turn("ref_logprobs", _MISMATCHED_LOGPROBS),
            trained=torch.tensor([True, False]).repeat(len(batch)),
        )
    )


def _responses(ids: Ragged, mask: Ragged | None = None) -> dict[str, Column]:
    """Return the columns of responses; with a mask also their numbers of tokens to learn."""
    if mask is None:
        return {"response_ids": ids}
    counts = sequence_sums(Ragged(mask.values.long(), mask.lengths))
    return {"response_ids": ids, "model_mask": mask, "num_model_tokens": counts}
