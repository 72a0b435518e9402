"""Collectives of tensor parallelism with their gradients.

One `TensorParallelGroup` per model and rank knows the peers. The functions below pair every collective with its
gradient. All ranks add in the same order, so replicated values stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_realloc.layout import chunk_bounds
from lightning_realloc.limits import GATHERED_SUM_BYTES
from lightning_realloc.runtime.forward.peer_group import PeerGroup, SumOverRanks

if TYPE_CHECKING:
    from lightning_realloc.runtime.transfer.collectives import SharedMemoryAllReduce


class TensorParallelGroup(PeerGroup):
    """The ranks that share one replica of the weights, in the layout's order."""

    def __init__(self, process_group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(process_group, ranks, rank)
        self.inference_sum: SharedMemoryAllReduce | None = None
        """Faster sum without gradients, for the tensors that it accepts. Set it on all ranks or on none."""
        self.shared_copy: tuple[Tensor, int, Tensor] | None = None
        """Last activation given to a column-cut layer, its version, and its copy; None if there is none."""
        self.has_uneven_features = False
        """Whether ranks hold different numbers of a layer's features, so that dropout draws different amounts."""

    @property
    def is_in_device_order(self) -> bool:
        """Whether collectives run in the order of the device's work, as NCCL's do, and can be part of a CUDA graph."""
        return dist.get_backend(self.process_group) == "nccl"

    def sum_without_gradient(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks by the fastest method available; may overwrite ``tensor``."""
        if self.inference_sum is not None and self.inference_sum.accepts(tensor):
            return self.inference_sum.sum_(tensor)
        if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= GATHERED_SUM_BYTES:
            return self.gather(tensor).sum(0)
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def largest(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Return the largest value over the ranks of each number; ranks with more heads hold larger caches."""
        largest: list[int] = self.gather(torch.tensor(numbers, device=device)).amax(0).tolist()
        return largest

    def align_random_numbers(self, device: torch.device) -> None:
        """Let all ranks draw the same random numbers again, after dropout of different numbers of features."""
        seed = torch.randint(1 << 62, (1,))
        if device.type == "cpu":  # the generator that dropout has drawn from; other devices have their own
            seed = self.gather(seed)[0]
            torch.default_generator.manual_seed(int(seed))
        else:
            torch.get_device_module(device).manual_seed(int(seed))

    def local_slice(self, width: int) -> tuple[int, int]:
        """Return start and length of this rank's chunk of ``width``, as ``torch.chunk`` cuts."""
        start, stop = chunk_bounds(width, self.size, self.index)
        return start, stop - start


def copy_to_ranks(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return a replicated activation as the input of a column-cut layer; its gradient is summed over the ranks.

    Layers that read the same activation (q, k and v; gate and up) get the same copy. Their gradients are added first
    and summed over the ranks once.
    """
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    shared = group.shared_copy
    if shared is not None and shared[0] is tensor and shared[1] == tensor._version:
        return shared[2]
    copy: Tensor = _SumGradient.apply(tensor, group, 0, group.size)
    group.shared_copy = (tensor, tensor._version, copy)
    return copy


def sum_gradient_over(tensor: Tensor, group: TensorParallelGroup, first: int, count: int) -> Tensor:
    """Return ``tensor`` with a gradient summed over ``count`` ranks of the group, starting at index ``first``.

    Collective over the whole group in the backward pass.
    """
    return cast(Tensor, _SumGradient.apply(tensor, group, first, count))


def sum_from_ranks(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Sum partial activations over the ranks; each gets the gradient of the sum. May overwrite ``tensor``."""
    group.shared_copy = None  # the layers that shared it have run: free the graph
    if not torch.is_grad_enabled():
        return group.sum_without_gradient(tensor)
    return cast(Tensor, SumOverRanks.apply(tensor, group))


def on_first_rank(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return ``tensor`` on the first rank and zeros on the others, for partial results that add it once.

    Each rank gets the gradient of the sum, as for a replicated tensor that is added to it.
    """
    return cast(Tensor, _OnFirstRank.apply(tensor, group))


def gather_last_dim(tensor: Tensor, group: TensorParallelGroup, width: int) -> Tensor:
    """Concatenate the ranks' slices of the last dim, of total size ``width``; each rank gets its slice's gradient.

    The gradient of the result must be the same on every rank, as it is if the following layers are replicated.
    """
    group.shared_copy = None
    return cast(Tensor, _GatherLastDim.apply(tensor, group, width))


def split_last_dim(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return this rank's slice of the last dim of a replicated activation; the gradient is gathered from all ranks."""
    return cast(Tensor, _SplitLastDim.apply(tensor, group))


def _concatenate(tensor: Tensor, group: TensorParallelGroup, width: int) -> Tensor:
    chunk = -(-width // group.size)
    padded = F.pad(tensor, (0, chunk - tensor.shape[-1])) if tensor.shape[-1] < chunk else tensor
    slices = group.gather(padded).movedim(0, -2)
    return slices.reshape(*tensor.shape[:-1], group.size * chunk)[..., :width]


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup, first: int, count: int) -> Tensor:
        ctx.group, ctx.first, ctx.count = group, first, count
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        group: TensorParallelGroup = ctx.group
        if ctx.count == group.size:
            return group.sum(gradient), None, None, None
        return group.gather(gradient)[ctx.first : ctx.first + ctx.count].sum(0), None, None, None


class _OnFirstRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup) -> Tensor:
        return tensor.view_as(tensor) if group.index == 0 else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup, width: int) -> Tensor:
        ctx.slice = group.local_slice(width)
        return _concatenate(tensor, group, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].narrow(-1, *ctx.slice).contiguous(), None, None


class _SplitLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.group, ctx.width = group, tensor.shape[-1]
        return tensor.narrow(-1, *group.local_slice(ctx.width)).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _concatenate(gradients[0], ctx.group, ctx.width), None
