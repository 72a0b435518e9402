"""Divide the rows of packs over context-parallel ranks, which exchange tokens for heads inside attention (Ulysses).

Each rank runs the layers of a model on a contiguous slice of a row. Before attention, an all-to-all gives it the whole
row of some heads; after it, all heads of its slice. So attention itself is that of one rank, windows and shared prompts
included. Values per token are joined to whole rows, and a loss is computed on every rank alike. The gradient of a
parameter is then the part of the rank's tokens; FSDP adds the parts.

Source: Jacobs et al., arXiv:2309.14509.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.errors import ConfigError, LayoutError
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


def whole_rows(states: Tensor, group: TokenGroup, num_tokens: int, *, num_queries: int) -> Tensor:
    """Return (1, H / cp, N, D) states of this rank's heads from the (1, H, n, D) states of its tokens.

    Fewer key-value heads than ranks, or a number that cp does not divide, are repeated first: each rank gets heads of
    its own queries.

    Args:
        num_queries: Query heads of the layer, which cp divides.
    """
    if num_queries % group.size:
        raise LayoutError(f"cp={group.size} must divide the {num_queries} query heads of a rank; use another cp")
    repeats = group.size // math.gcd(states.shape[1], group.size)
    if repeats > 1:
        states = states.repeat_interleave(repeats, dim=1)
    parts = states[0].unflatten(0, (group.size, -1))  # (cp, heads, n, D)
    row = exchange(parts, group).transpose(0, 1).flatten(1, 2)  # (heads, cp * n, D)
    return row[None, :, :num_tokens]


def own_tokens(states: Tensor, group: TokenGroup) -> Tensor:
    """Return (1, n, H, D) states of this rank's tokens from the (1, N, H / cp, D) states of its heads."""
    num_tokens = states.shape[1]
    length = group.slice_length(num_tokens)
    padded = F.pad(states[0], (0, 0, 0, 0, 0, group.size * length - num_tokens))
    parts = exchange(padded.unflatten(0, (group.size, length)), group)  # (cp, n, heads, D)
    return parts.transpose(0, 1).flatten(1, 2)[None]


def exchange(parts: Tensor, group: TokenGroup) -> Tensor:
    """Send part i of (cp, ...) to rank i of the group; return the parts received, in the order of the ranks."""
    return cast(Tensor, _Exchange.apply(parts, group))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: TokenGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group.process_group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(gradients[0], ctx.group), None  # the gradient goes back the way it came


class _JoinSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TokenGroup, num_tokens: int) -> Tensor:
        ctx.group = group
        return group.gather(values).flatten(0, 1)[:num_tokens]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return ctx.group.cut(gradient), None, None
