"""Divide the rows of packs over context-parallel ranks, which exchange tokens for heads inside attention (Ulysses).

Each rank runs the layers of a model on a contiguous slice of a row. Before attention, an all-to-all gives it the whole
row of some heads; after it, all heads of its slice. So attention itself is that of one rank, windows and shared prompts
included. Values per token are joined to whole rows, and a loss is computed on every rank alike. The gradient of a
parameter is then the part of the rank's tokens; FSDP adds the parts.

Source: Jacobs et al., arXiv:2309.14509.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.peer_group import PeerGroup, SumOverRanks
from lightning_realloc.runtime.model.batching_limits import rotary_bounds


class TokenGroup(PeerGroup):
    """The ranks that divide the tokens of each row, in the layout's order. The last slices may end with padding."""

    def slice_length(self, num_tokens: int) -> int:
        """Return the number of tokens that each rank runs of a row, padding included."""
        return -(-num_tokens // self.size)

    def cut(self, row: Tensor) -> Tensor:
        """Return this rank's (n, ...) slice of the (N, ...) values of a row, padded with zeros."""
        length = self.slice_length(len(row))
        own = row[self.index * length : (self.index + 1) * length]
        return F.pad(own, (0, 0) * (row.ndim - 1) + (0, length - len(own)))

    def own(self, places: Tensor, num_tokens: int) -> Tensor:
        """Return a mask of the places in a row of ``num_tokens`` that are in this rank's slice."""
        return places // self.slice_length(num_tokens) == self.index

    def local(self, places: Tensor, num_tokens: int) -> Tensor:
        """Return the places in this rank's slice of places in the row that are in it."""
        return places - self.index * self.slice_length(num_tokens)


def token_group(model: PreTrainedModel) -> TokenGroup | None:
    """Return the ranks that divide the tokens of every row; None if the model runs on whole rows."""
    found: TokenGroup | None = vars(model).get("token_group")
    return found


def refuse_undivided(model: PreTrainedModel, packed: PackedBatch, tokens: TokenGroup) -> None:
    """Raise ConfigError for inputs of which a layer needs more than a rank's slice outside of attention."""
    name = type(model).__name__
    if packed.extras:
        raise ConfigError(
            f"{name} gets the further inputs {sorted(packed.extras)}, and cp={tokens.size} divides token ids alone; "
            f"give the call a layout with cp=1"
        )
    for kind, original in rotary_bounds(model.config):
        if packed.max_length > original:
            raise ConfigError(
                f"{name} has a {kind} rotary embedding whose frequencies depend on the row's longest sequence beyond "
                f"{original} tokens, and cp={tokens.size} divides the row ({packed.max_length} tokens); give the call "
                f"a layout with cp=1, or keep prompt and response within {original} tokens"
            )


def join_slices(values: Tensor, group: TokenGroup, num_tokens: int) -> Tensor:
    """Return the (N, ...) values of a row from each rank's (n, ...). A rank gets the gradient of its own values.

    The gradient of the result must be the same on every rank, as that of a loss which all compute.
    """
    return cast(Tensor, _JoinSlices.apply(values, group, num_tokens))


def sum_values(values: Tensor, group: TokenGroup) -> Tensor:
    """Return the sum of the ranks' values, of which each has its own and zeros. See `join_slices` for the gradient."""
    return cast(Tensor, SumOverRanks.apply(values, group))


class _JoinSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TokenGroup, num_tokens: int) -> Tensor:
        ctx.group = group
        return group.gather(values).flatten(0, 1)[:num_tokens]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return ctx.group.cut(gradient), None, None
