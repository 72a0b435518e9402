"""How do tensor-parallel ranks exchange activations, in the forward pass and in the backward pass?

One `TensorParallelGroup` per model and rank knows the peers; the functions below pair every collective with its
gradient. Sums are added in the same order on every rank, so that replicated values stay equal to the last bit.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_realloc.errors import LayoutError
from lightning_realloc.runtime.compat import all_gather_single

_GATHERED_SUM_BYTES = 256 * 1024
"""Up to this size CPU tensors are gathered and added here: an all-reduce of gloo takes twice as long as a gather."""


class FastSum(Protocol):
    """A quicker way to add small tensors over the same ranks, such as `SharedMemoryAllReduce`."""

    def accepts(self, tensor: Tensor) -> bool:
        """Tell whether ``sum_`` takes this tensor; the same answer on every rank."""

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by the sum over the ranks, to the same bits on every rank."""


class TensorParallelGroup:
    """The ranks that hold one copy of the weights between them, in the layout's order."""

    def __init__(self, process_group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int) -> None:
        if tuple(dist.get_process_group_ranks(process_group)) != ranks:
            raise LayoutError(
                f"the process group lists ranks {tuple(dist.get_process_group_ranks(process_group))} and the layout "
                f"{ranks}; create it with MeshRegistry, which keeps the layout's order"
            )
        self.process_group = process_group
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self.inference_sum: FastSum | None = None
        """Used for what it accepts when no gradient is recorded; set it on all ranks or on none."""
        self.shared_copy: tuple[Tensor, int, Tensor] | None = None
        """The activation that was last handed to a column-cut layer, its version, and the copy handed over."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelGroup:
        return self  # the peers are the same for a copy of the model

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, the same bits everywhere; ``tensor`` stays as it is."""
        if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= _GATHERED_SUM_BYTES:
            return self.gather(tensor).sum(0)
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.process_group)
        return total

    def sum_without_gradient(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks by the quickest way at hand; may overwrite ``tensor``."""
        if self.inference_sum is not None and self.inference_sum.accepts(tensor):
            return self.inference_sum.sum_(tensor)
        if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= _GATHERED_SUM_BYTES:
            return self.gather(tensor).sum(0)
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's ``tensor``, all of one shape, stacked along a new first dim."""
        gathered = tensor.new_empty(self.size * tensor.numel())
        all_gather_single(gathered, tensor.contiguous().view(-1), group=self.process_group)
        return gathered.view(self.size, *tensor.shape)

    def slice_of(self, width: int) -> tuple[int, int]:
        """Return where this rank's share of ``width`` begins and how long it is, as ``torch.chunk`` cuts."""
        chunk = -(-width // self.size)
        start = min(width, self.index * chunk)
        return start, min(width, start + chunk) - start


def copy_to_ranks(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Hand a replicated activation to each rank's share of a layer; its gradient is the sum over the shares.

    Layers that read the same activation (q, k and v; gate and up) get the same copy, so that their gradients are added
    here and summed over the ranks once.
    """
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    shared = group.shared_copy
    if shared is not None and shared[0] is tensor and shared[1] == tensor._version:
        return shared[2]
    copy: Tensor = _SumGradient.apply(tensor, group, 0, group.size)  # type: ignore[no-untyped-call]
    group.shared_copy = (tensor, tensor._version, copy)
    return copy


def sum_gradient_over(tensor: Tensor, group: TensorParallelGroup, first: int, count: int) -> Tensor:
    """Return ``tensor`` with a gradient that is summed over ``count`` ranks of the group from index ``first``.

    Collective over the whole group in the backward pass.
    """
    return _SumGradient.apply(tensor, group, first, count)  # type: ignore[no-any-return, no-untyped-call]


def sum_from_ranks(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Add up the ranks' partial activations; each of them gets the gradient of the sum. May overwrite ``tensor``."""
    group.shared_copy = None  # the layers that shared it are done: let go of the graph
    if not torch.is_grad_enabled():
        return group.sum_without_gradient(tensor)
    return _Sum.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_last_dim(tensor: Tensor, group: TensorParallelGroup, width: int) -> Tensor:
    """Join the ranks' shares of the last dim, which is ``width`` long in all; each rank keeps its share's gradient.

    The gradient of the result must be the same on every rank, as it is when what follows is replicated.
    """
    group.shared_copy = None
    return _GatherLastDim.apply(tensor, group, width)  # type: ignore[no-any-return, no-untyped-call]


def split_last_dim(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Keep this rank's share of the last dim of a replicated activation; the gradient is joined from all ranks."""
    return _SplitLastDim.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


def _joined(tensor: Tensor, group: TensorParallelGroup, width: int) -> Tensor:
    chunk = -(-width // group.size)
    padded = F.pad(tensor, (0, chunk - tensor.shape[-1])) if tensor.shape[-1] < chunk else tensor
    parts = group.gather(padded).movedim(0, -2)
    return parts.reshape(*tensor.shape[:-1], group.size * chunk)[..., :width]


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


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup) -> Tensor:
        return group.sum(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup, width: int) -> Tensor:
        ctx.share = group.slice_of(width)
        return _joined(tensor, group, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].narrow(-1, *ctx.share).contiguous(), None, None


class _SplitLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.group, ctx.width = group, tensor.shape[-1]
        return tensor.narrow(-1, *group.slice_of(ctx.width)).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _joined(gradients[0], ctx.group, ctx.width), None
