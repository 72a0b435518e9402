"""Gradient norm and clipping for a model distributed over many ranks.

Every element counts once, whether it is sharded, cut or replicated. Ranks exchange one number each, and every rank
gets a bitwise equal result.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import AXES, ModelLayout
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.shards import local_tensor

MAX_UNEVENNESS = 0.01
"""Largest difference between gradient norms of equal parameters, over the norm. Raising it tolerates more rounding."""
MIN_COMPARED_SHARE = 1e-4
"""Smallest compared gradient norm, over the largest of a parameter. Raising it leaves out more rounding errors."""


def clip_gradients(model: nn.Module, model_layout: ModelLayout, meshes: MeshRegistry, max_norm: float | None) -> Tensor:
    """Scale the gradients in place so that their total norm is at most ``max_norm``; return the norm before scaling.

    Gives the same result as ``torch.nn.utils.clip_grad_norm_`` on one process. Gradients are not changed if
    ``max_norm`` is None or the norm is not finite. Collective over the layout's ranks.
    """
    if max_norm is not None and not max_norm > 0:
        raise LayoutError(f"max_norm={max_norm} must be positive; leave clipping out to keep gradients as they are")
    norm = global_grad_norm(model, model_layout, meshes)
    gradients = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    if gradients and max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's clip_grad_norm_ adds the same epsilon
        factor = torch.where(norm.isfinite(), factor, 1.0)  # on the device, without a synchronization
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def global_grad_norm(model: nn.Module, model_layout: ModelLayout, meshes: MeshRegistry) -> Tensor:
    """Return the 2-norm of the whole model's gradient as a float64 scalar, the same on every rank of the layout.

    Parameters without a gradient count as zero. Collective over the layout's ranks, with one all-reduce.
    """
    squares = torch.zeros((), dtype=torch.float64, device=meshes.device_type)
    groups: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            key = model_layout.num_holders(name, meshes.rank), parameter.grad.dtype
            groups.setdefault(key, []).append(local_tensor(parameter.grad))
    for (holders, _), gradients in groups.items():
        norms = torch.stack(_exact_norms(gradients)).to(torch.float64)
        squares += norms.square().sum().to(squares.device) / holders
    group = meshes.group(model_layout.layout, *AXES)
    if group is not None:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def first_bad_gradient(model: nn.Module, model_layout: ModelLayout, meshes: MeshRegistry) -> str | None:
    """Return the first parameter, in the model's order, whose gradient norm is not finite.

    Returns None if all norms are finite and only their sum overflows. Collective over the layout's ranks, with the
    same result on each. Waits for the device once per parameter, so call it only after a bad norm.
    """
    return _first_not_finite(((name, p.grad) for name, p in model.named_parameters()), model_layout, meshes)


def first_bad_weight(model: nn.Module, model_layout: ModelLayout, meshes: MeshRegistry) -> str | None:
    """Return the first parameter, in the model's order, whose norm is not finite; None if all are.

    Collective and waiting, like `first_bad_gradient`.
    """
    return _first_not_finite(((name, p.detach()) for name, p in model.named_parameters()), model_layout, meshes)


def _first_not_finite(
    tensors: Iterable[tuple[str, Tensor | None]], model_layout: ModelLayout, meshes: MeshRegistry
) -> str | None:
    names = [param.name for param in model_layout.model.params]
    bad = {
        model_layout.model.param(name).name
        for name, tensor in tensors
        if tensor is not None and not bool(_exact_norms([local_tensor(tensor)])[0].isfinite())
    }
    first = next((index for index, name in enumerate(names) if name in bad), len(names))
    found = torch.tensor(first, device=meshes.device_type)
    group = meshes.group(model_layout.layout, *AXES)
    if group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return names[int(found)] if int(found) < len(names) else None


def uneven_gradient(model: nn.Module, model_layout: ModelLayout, meshes: MeshRegistry) -> str | None:
    """Return the first parameter, whole on every tensor-parallel rank, whose gradients differ between these ranks.

    Each rank steps by its own gradient, so copies with different ones drift apart. A gradient differs if it lacks the
    contributions of other ranks: the parameter reads only this rank's features, and its style does not say so.
    Returns None if all agree. Collective over the layout's ranks, with the same result on each.
    """
    names = [param.name for param in model_layout.model.params]
    found = torch.tensor(len(names), device=meshes.device_type)
    group = meshes.tensor_group(model_layout.layout)
    whole = {
        model_layout.model.param(name).name: _exact_norms([local_tensor(parameter.grad)])[0].double()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and _is_whole(model_layout, name, meshes.rank)
    }
    if group is not None and whole:
        norms = torch.stack(list(whole.values()))
        largest, smallest = norms.clone(), norms.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
        is_noise = largest < MIN_COMPARED_SHARE * largest.max()
        differs = ((largest - smallest > MAX_UNEVENNESS * largest) & ~is_noise).tolist()
        found.fill_(min((names.index(n) for n, bad in zip(whole, differs, strict=True) if bad), default=len(names)))
    everyone = meshes.group(model_layout.layout, *AXES)
    if everyone is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=everyone)
    return names[int(found)] if int(found) < len(names) else None


def _is_whole(model_layout: ModelLayout, name: str, rank: int) -> bool:
    """Return whether modules on ``rank`` compute with a whole parameter."""
    shard = model_layout.gathered_shard(name, rank)
    return shard is not None and shard.shape == model_layout.model.param(name).shape


def _exact_norms(gradients: list[Tensor]) -> list[Tensor]:
    """Return the 2-norms of tensors of one dtype, computed in at least float32."""
    dtype = torch.float32 if gradients[0].dtype.itemsize < 4 else gradients[0].dtype
    return list(torch._foreach_norm(gradients, 2, dtype=dtype))
