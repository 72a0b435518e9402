"""Divide the experts of each layer over ranks, which exchange the tokens routed to them (expert parallelism).

A rank sends every token to the ranks that hold its experts. Their outputs come back, and the token's rank adds them by
the router's weights, so that a layer computes and rounds as on one rank. No token is dropped. Ranks take part in each
exchange, with or without tokens, so that forward and backward passes are collective.

The gradient of an expert adds up the tokens of all ranks of a group, while that of other weights is a mean over these
ranks, by which losses are multiplied. So gradients are divided by the number of ranks on their way into experts, and
multiplied by it on their way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.runtime.forward.peer_group import PeerGroup
from lightning_realloc.runtime.model.structure import combined_class


def divide_experts(experts: nn.Module, group: PeerGroup) -> None:
    """Make a module of stacked experts run this rank's experts on the tokens of all ranks of ``group``.

    Does not change weights. Raises LayoutError if its forward was replaced on the instance.
    """
    if "forward" in vars(experts) or isinstance(experts, _ExpertParallel):
        raise LayoutError(f"{type(experts).__name__} has a forward that was replaced; divide experts first, and once")
    experts.__class__ = combined_class(_ExpertParallel, type(experts))
    vars(experts)["ep_group"] = group
    vars(experts)["num_experts"] //= group.size


class _ExpertParallel(nn.Module):
    """Base of divided experts, in front of the class whose forward runs this rank's."""

    ep_group: PeerGroup
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        outputs: Tensor = _uncompiled(super().forward, hidden_states, top_k_index, self.num_experts, self.ep_group)
        weighted = outputs * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)


def _run_away(
    experts: Callable[..., Tensor], states: Tensor, chosen: Tensor, num_local: int, group: PeerGroup
) -> Tensor:
    """Return (N, K, D) outputs of the (N, K) experts that the router has chosen for (N, D) states.

    A rank that receives no token runs one of zeros: FSDP reduces gradients of weights that every rank has.
    """
    route = _Route.for_pairs(chosen.flatten(), num_local, group)
    received = route.away(states[route.order // chosen.shape[1]])
    padding = 0 if len(received) else 1
    received, indices = F.pad(received, (0, 0, 0, padding)), F.pad(route.experts, (0, padding))
    outputs = experts(received, indices[:, None], received.new_ones(len(received), 1))
    return route.home(outputs[: len(outputs) - padding])[route.order.argsort()].view(*chosen.shape, -1)


_uncompiled: Any = torch.compiler.disable(_run_away)
"""Sizes of exchanges are known to the host alone, which ends a compiled program."""


class _Route(NamedTuple):
    """The way of a rank's pairs of token and expert to the experts' ranks, and back."""

    group: PeerGroup
    order: Tensor
    """Pairs sorted by expert, and so by the expert's rank."""
    sent: Sequence[int]
    """Pairs sent to each rank."""
    received: Sequence[int]
    """Pairs received from each rank."""
    experts: Tensor
    """Index among this rank's experts of each pair received."""

    @classmethod
    def for_pairs(cls, experts: Tensor, num_local: int, group: PeerGroup) -> _Route:
        """Exchange the numbers of pairs for each expert.

        Args:
            experts: Expert of each pair.
            num_local: Experts of a rank.
        """
        sent = torch.bincount(experts, minlength=num_local * group.size).view(group.size, num_local)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group.process_group)
        to_each, from_each = torch.stack((sent.sum(1), received.sum(1))).tolist()
        local = torch.arange(num_local, device=experts.device).repeat(group.size)
        order = experts.argsort(stable=True)
        return cls(group, order, to_each, from_each, local.repeat_interleave(received.flatten()))

    def away(self, rows: Tensor) -> Tensor:
        """Send sorted rows to the ranks of their experts, and return those received."""
        return cast(Tensor, _Exchange.apply(rows, self.group, self.sent, self.received, float(self.group.size)))

    def home(self, rows: Tensor) -> Tensor:
        """Send rows back, and return this rank's, sorted."""
        return cast(Tensor, _Exchange.apply(rows, self.group, self.received, self.sent, 1 / self.group.size))


class _Exchange(torch.autograd.Function):
    """Sends rows in the order of the ranks. Gradients go back the same way, multiplied by a factor."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: PeerGroup, sent: Sequence[int], received: Sequence[int], factor: float
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received, ctx.factor = group, sent, received, factor
        return _exchanged(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _exchanged(gradients[0], ctx.group, ctx.received, ctx.sent) * ctx.factor
        return gradient, None, None, None, None


def _exchanged(rows: Tensor, group: PeerGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=group.process_group)
    return result
