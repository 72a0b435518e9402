"""Base of algorithms that learn from pairs: chosen responses at even rows, rejected ones after them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.algorithms.losses.functional import sequence_sums
from lightning_realloc.algorithms.losses.preference_losses import shared_length_sums
from lightning_realloc.algorithms.settings import check_minibatches
from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.batch.training import Average
from lightning_realloc.errors import DataError


class PairwiseModule(MultiModelModule):
    """A module whose batches are pairs: two samples with the same prompt, of which the first one was preferred."""

    group_size = 2
    share_prompts = True
    batch_columns = ("prompt_ids", "response_ids")
    data_module = "PreferenceDataModule"

    def check_batch(self, batch: Samples) -> None:
        """Refuse samples that do not come in pairs, and fewer pairs than mini-batches."""
        check_pairs(batch)
        if self.trainer.training:
            options = self.train_options_of(self.dataflow.trained_roles[0])
            check_minibatches(len(batch), options, group_size=self.group_size)

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return the mean loss and margin of pairs, and the share that is ordered right, where they were measured."""
        if "losses" not in samples:
            return {}
        margins, _ = sides(samples.tensor("margins"))
        return {
            "loss": sides(samples.tensor("losses"))[0].mean(),
            "margin": margins.mean(),
            "accuracy": (margins > 0).float().mean(),
        }


def sides(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (P,) values of the chosen and of the rejected responses, from those of 2P samples."""
    return values[0::2], values[1::2]


def both_sides(values: Tensor) -> Tensor:
    """Return the (P,) values of pairs for each of their 2P samples."""
    return values.repeat_interleave(2, dim=0)


def pair_sums(logprobs: Ragged, *, tail_weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return two (P,): the log-probabilities of the chosen and of the rejected responses.

    Args:
        logprobs: Of the tokens of 2P responses.
        tail_weight: What tokens count that lie further back than the shorter response of their pair is long.
    """
    if tail_weight == 1.0:
        return sides(sequence_sums(logprobs))
    shared = both_sides(torch.minimum(*sides(logprobs.lengths)))
    owner = torch.repeat_interleave(torch.arange(len(logprobs)), logprobs.lengths)
    places = torch.arange(logprobs.num_tokens) - logprobs.offsets[owner]
    device = logprobs.values.device
    values = shared_length_sums(logprobs.values, places.to(device), shared[owner].to(device), tail_weight=tail_weight)
    return sides(sequence_sums(Ragged(values, logprobs.lengths)))


def chosen_tokens(samples: Samples) -> Tensor:
    """Return (B,) float64: the tokens of each sample's response where it was chosen, else 0."""
    tokens = samples.ragged("response_ids").lengths.double()
    tokens[1::2] = 0.0
    return tokens


def pair_metrics(margins: Tensor) -> dict[str, Average]:
    """Return the mean of (P,) margins and the share of them above zero."""
    margins = margins.detach()
    return {
        "margin": Average(margins.sum(), len(margins)),
        "accuracy": Average((margins > 0).float().sum(), len(margins)),
    }


def check_pairs(batch: Samples) -> None:
    """Raise DataError unless the samples are pairs: neighbours with the same prompt, both with a response."""
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    if len(batch) % 2:
        raise DataError(
            f"a batch of pairs holds a chosen and a rejected sample of each, and this one {len(batch)} samples; "
            f"use PreferenceDataModule, or lay samples out as chosen, rejected, chosen, rejected, ..."
        )
    if bool((responses.lengths == 0).any()):
        empty = int(batch.ids[int(responses.lengths.argmin())])
        raise DataError(f"both sides of a pair need a response; that of sample {empty} is empty, leave its pair out")
    rows = torch.arange(len(batch))
    if not prompts.select(rows[0::2]).equals(prompts.select(rows[1::2])):
        rows_differ = [not torch.equal(a, b) for a, b in zip(prompts.split()[0::2], prompts.split()[1::2], strict=True)]
        first = 2 * rows_differ.index(True)
        raise DataError(
            f"both sides of a pair need the same prompt; those of samples {int(batch.ids[first])} and "
            f"{int(batch.ids[first + 1])} differ, put what both begin with into prompt_ids"
        )
