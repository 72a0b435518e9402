"""Exchange tokens for heads between context-parallel ranks (Ulysses).

Source: Jacobs et al., arXiv:2309.14509.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_realloc.errors import LayoutError
from lightning_realloc.runtime.forward.token_group import TokenGroup


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
