"""Base of algorithms that learn from pairs: chosen responses in even rows, rejected ones in odd rows."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.algorithms.base.rollout_columns import model_mask, num_model_tokens
from lightning_realloc.algorithms.losses.functional import kept_tokens, sequence_sums
from lightning_realloc.algorithms.losses.preference_losses import shared_length_sums
from lightning_realloc.algorithms.settings import check_minibatches
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Ragged, Samples, prompt_keys
from lightning_realloc.batch.training import Average
from lightning_realloc.errors import DataError


class PairwiseModule(MultiModelModule):
    """A module whose batches are pairs: two samples with the same prompt, the preferred one first."""

    group_size = 2
    share_prompts = True
    batch_columns = ("prompt_ids", "response_ids")
    data_module = "PreferenceDataModule"

    def check_batch(self, batch: Samples) -> None:
        """Raise for samples that are not pairs, and for fewer pairs than mini-batches."""
        check_pairs(batch)
        if self.trainer.training:
            options = self.train_options_of(self.dataflow.trained_roles[0])
            check_minibatches(len(batch), options, group_size=self.group_size)

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return the mean loss and margin of pairs, and the share with a positive margin, if they were measured."""
        if "losses" not in samples:
            return {}
        margins, _ = sides(samples.tensor("margins"))
        return {
            "loss": sides(samples.tensor("losses"))[0].mean(),
            "margin": margins.mean(),
            "accuracy": (margins > 0).float().mean(),
        }


def sides(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (P,) values of the chosen and of the rejected responses, from 2P samples."""
    return values[0::2], values[1::2]


def both_sides(values: Tensor) -> Tensor:
    """Repeat the (P,) values of pairs for their 2P samples."""
    return values.repeat_interleave(2, dim=0)


def pair_sums(logprobs: Ragged, *, tail_weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the chosen and of the rejected responses, (P,) each.

    Args:
        logprobs: Log-probabilities of the tokens of 2P responses.
        tail_weight: Weight of tokens after the length of the pair's shorter response.
    """
    if tail_weight == 1.0:
        return sides(sequence_sums(logprobs))
    shared = both_sides(torch.minimum(*sides(logprobs.lengths)))
    owner = torch.repeat_interleave(torch.arange(len(logprobs)), logprobs.lengths)
    places = torch.arange(logprobs.num_tokens) - logprobs.offsets[owner]
    device = logprobs.values.device
    values = shared_length_sums(logprobs.values, places.to(device), shared[owner].to(device), tail_weight=tail_weight)
    return sides(sequence_sums(Ragged(values, logprobs.lengths)))


def packed_logprobs(batch: PackedBatch, values: Tensor) -> Ragged:
    """Return the (N,) values of the tokens that the model chose: of a response without the messages of others."""
    responses = batch.responses(values)
    return kept_tokens(responses, batch.responses(batch["model_mask"]) if "model_mask" in batch.columns else None)


def known_logprobs(samples: Samples, name: str) -> Ragged:
    """Return the values of the tokens that the model chose, from the column ``name``."""
    return kept_tokens(samples.ragged(name), model_mask(samples))


def chosen_tokens(samples: Samples) -> Tensor:
    """Return (B,) float64: the number of tokens to learn of each chosen response, 0 for rejected ones."""
    tokens = num_model_tokens(samples).double()
    tokens[1::2] = 0.0
    return tokens


def pair_metrics(margins: Tensor) -> dict[str, Average]:
    """Return the mean of (P,) margins, and the share above zero."""
    margins = margins.detach()
    return {
        "margin": Average(margins.sum(), len(margins)),
        "accuracy": Average((margins > 0).float().sum(), len(margins)),
    }


def check_pairs(batch: Samples) -> None:
    """Raise DataError unless adjacent samples have the same prompt, and both have a response."""
    responses = batch.ragged("response_ids")
    if len(batch) % 2:
        raise DataError(
            f"a batch of pairs holds a chosen and a rejected sample of each, and this one {len(batch)} samples; "
            f"use PreferenceDataModule, or lay samples out as chosen, rejected, chosen, rejected, ..."
        )
    if bool((responses.lengths == 0).any()):
        empty = int(batch.ids[int(responses.lengths.argmin())])
        raise DataError(f"both sides of a pair need a response; that of sample {empty} is empty, leave its pair out")
    chosen, rejected = prompt_keys(batch).view(-1, 2).unbind(1)
    if not torch.equal(chosen, rejected):
        first = 2 * int((chosen != rejected).nonzero()[0])
        raise DataError(
            f"both sides of a pair need the same prompt; those of samples {int(batch.ids[first])} and "
            f"{int(batch.ids[first + 1])} differ, put what both begin with into prompt_ids"
        )
