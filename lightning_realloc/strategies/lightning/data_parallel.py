"""Plain data parallelism for a LightningModule that declares no calls: equal weights, averaged gradients."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn


def broadcast_module(module: nn.Module) -> None:
    """Give every rank the first rank's parameters and buffers. Collective over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, 0)


def average_gradients(module: nn.Module) -> None:
    """Replace every gradient by its mean over all ranks. Collective over all ranks.

    A parameter that took no part in this rank's step but did in another's counts as zero here, so that all ranks
    reduce the same tensors.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        return
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=trained[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    by_kind: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter, anybody in zip(trained, used.tolist(), strict=True):
        if anybody:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_kind[parameter.grad.dtype].append(parameter.grad)
    for gradients in by_kind.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])
