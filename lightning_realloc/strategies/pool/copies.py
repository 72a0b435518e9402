"""What models without weights of their own are made of: copies in another layout, and those that are to be filled."""

from __future__ import annotations

import torch
from torch import nn

from lightning_realloc.layout.model import ModelLayout
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.parallelize import parallelize, tensor_parallelize
from lightning_realloc.runtime.parallel.shards import bind_tensors
from lightning_realloc.runtime.parallel.stage import cut_stage
from lightning_realloc.runtime.parallel.twin import weightless_copy
from lightning_realloc.strategies.pool.pool_options import PoolOptions
from lightning_realloc.strategies.pool.replica import Replica


def prepare_copy(
    role: str, blank: nn.Module, target: ModelLayout, meshes: MeshRegistry, options: PoolOptions
) -> nn.Module:
    """Return this rank's part of a role's model under ``target``, a skeleton on ranks outside.

    Shards of FSDP's have memory at once, all others none before they are filled. Collective over the ranks inside.
    """
    skeleton = weightless_copy(blank).eval().requires_grad_(False)
    tp_plan = options.tp_plans.get(role)
    if options.rank not in target.layout.ranks:
        return skeleton
    if target.layout.dims.fsdp > 1:
        bind_tensors(skeleton, {
            spec.name: torch.empty(spec.shape, dtype=options.copy_dtype, device=options.device)
            for spec in target.model.params
        })  # fmt: skip
        return parallelize(skeleton, target, meshes, tp_plan=tp_plan)
    tensor_parallelize(skeleton, target.layout, meshes, tp_plan=tp_plan)
    if target.layout.dims.pp > 1:
        cut_stage(skeleton, target, options.rank)
    return skeleton


def blank_model(blank: nn.Module, old: Replica, device: torch.device, *, has_weights: bool) -> nn.Module:
    """Return an undivided model like ``old``'s, its weights undefined; without memory unless it ``has_weights``.

    Args:
        blank: A skeleton of it.
        old: Says what is frozen, and in which mode it is. Collective over all ranks where it is a pipeline's.
        device: Of the weights.
        has_weights: Whether there is room for them.
    """
    model = weightless_copy(blank)
    tensors = {}
    for name, parameter in model.named_parameters():
        room = torch.empty(parameter.shape if has_weights else (1,), dtype=parameter.dtype, device=device)
        tensors[name] = room.expand(parameter.shape)
    bind_tensors(model, tensors)
    model.to(device)
    frozen = {name for name, parameter in old.model.named_parameters() if not parameter.requires_grad}
    if old.layout.dims.pp > 1:  # this rank may know one stage of the old model
        frozen = set().union(*gather_objects(frozen))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model.train(old.model.training)
