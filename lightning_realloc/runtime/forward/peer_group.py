"""A process group of ranks that compute together, with sums and gathers in the layout's order."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import LayoutError
from lightning_realloc.limits import GATHERED_SUM_BYTES

_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers tensors of equal size into one; torch 2.13 deprecates its old name, ``all_gather_into_tensor``."""


class PeerGroup:
    """Ranks of a layout along some axes, in the layout's order."""

    def __init__(self, process_group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int) -> None:
        if tuple(dist.get_process_group_ranks(process_group)) != ranks:
            raise LayoutError(
                f"the process group lists ranks {tuple(dist.get_process_group_ranks(process_group))} and the layout "
                f"{ranks}; create it with MeshRegistry, which keeps the layout's order"
            )
        self.process_group = process_group
        self.size = len(ranks)
        self.index = ranks.index(rank)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of the model has the same peers

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, bitwise equal on all; leaves ``tensor`` unchanged."""
        if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= GATHERED_SUM_BYTES:
            return self.gather(tensor).sum(0)
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.process_group)
        return total

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape, stacked along a new first dim."""
        gathered = tensor.new_empty(self.size * tensor.numel())
        _all_gather_single(gathered, tensor.contiguous().view(-1), group=self.process_group)
        return gathered.view(self.size, *tensor.shape)


class SumOverRanks(torch.autograd.Function):
    """Sum of the ranks' tensors; each gets the gradient of the sum, which is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: PeerGroup) -> Tensor:
        return group.sum(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None
