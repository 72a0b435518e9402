"""Exchange tokens for heads between context-parallel ranks (Ulysses), and keys of rows where heads do not suffice.

A rank attends with a share of the query heads and, if ranks do not divide them all, with a share of the row's queries.
It receives the keys and values that these heads read, of the whole row, in one all-to-all with all ranks.

Sources: Jacobs et al., arXiv:2309.14509; Llama Team, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_realloc.runtime.forward.token_group import RowDivision, TokenGroup


def exchanged_queries(states: Tensor, division: RowDivision) -> Tensor:
    """Return the (1, H / head_shares, T, D) queries of this rank's heads and row share from (1, H, n, D)."""
    if division.group.head_shares == 1:
        return states[:, :, : division.num_queries]
    own = _exchange(_by_head_share(states, division.group), division.group, division.group.row_peers)
    return _one_after_another(own)[:, :, : division.num_queries]


def exchanged_keys(states: Tensor, division: RowDivision) -> Tensor:
    """Return (1, H_kv', cp * n, D) keys or values that this rank's heads read from (1, H_kv, n, D).

    Slices lie one after another in the ranks' order. Fewer key-value heads than head shares, or a number that these do
    not divide, are repeated first: each rank gets heads of its own queries.
    """
    group = division.group
    repeats = group.head_shares // math.gcd(states.shape[1], group.head_shares)
    if repeats > 1:
        states = states.repeat_interleave(repeats, dim=1)
    parts = _by_head_share(states, group).repeat(group.row_shares, 1, 1, 1)
    return _one_after_another(_exchange(parts, group, range(group.size)))


def own_tokens(states: Tensor, division: RowDivision) -> Tensor:
    """Return (1, n, H, D) states of this rank's tokens from the (1, T, H / head_shares, D) of its heads."""
    group, length = division.group, division.slice_length
    padded = F.pad(states[0], (0, 0, 0, 0, 0, group.head_shares * length - states.shape[1]))
    if group.head_shares == 1:
        return padded[None]
    parts = _exchange(padded.unflatten(0, (group.head_shares, length)), group, group.row_peers)
    return _one_after_another(parts)


def _by_head_share(states: Tensor, group: TokenGroup) -> Tensor:
    """Return (head_shares, heads, n, D) from (1, H, n, D)."""
    parts: Tensor = states[0].unflatten(0, (group.head_shares, -1))
    return parts


def _one_after_another(parts: Tensor) -> Tensor:
    """Return (1, A, parts * B, D) from (parts, A, B, D)."""
    return parts.transpose(0, 1).flatten(1, 2)[None]


def _exchange(parts: Tensor, group: TokenGroup, peers: range) -> Tensor:
    """Send part i of (peers, ...) to the i-th of ``peers``; return the parts received, in the order of the ranks."""
    return cast(Tensor, _Exchange.apply(parts, group, peers))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: TokenGroup, peers: range) -> Tensor:
        ctx.ranks = group, peers
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        counts = None if len(peers) == group.size else [int(index in peers) for index in range(group.size)]
        dist.all_to_all_single(received, parts.contiguous(), counts, counts, group=group.process_group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(gradients[0], *ctx.ranks), None, None  # the gradient goes back the way it came
