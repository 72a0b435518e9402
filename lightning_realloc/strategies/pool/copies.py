"""Make modules without weights: a replica in another layout, and an undivided model that is filled later."""

from __future__ import annotations

import torch
from torch import nn

from lightning_realloc.layout.model import ModelLayout
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.parallelize import parallelize, tensor_parallelize
from lightning_realloc.runtime.parallel.shards import bind_tensors
from lightning_realloc.runtime.parallel.stage import cut_stage
from lightning_realloc.runtime.parallel.weightless import weightless_copy
from lightning_realloc.strategies.pool.pool_options import PoolOptions
from lightning_realloc.strategies.pool.replica import Replica


def prepare_copy(
    role: str, blank: nn.Module, target: ModelLayout, meshes: MeshRegistry, options: PoolOptions
) -> nn.Module:
    """Return this rank's part of a role's model under ``target``, without weights.

    Only FSDP's shards have memory at once. Collective over the ranks of ``target``.
    """
    model = weightless_copy(blank).eval().requires_grad_(False)
    tp_plan = options.tp_plans.get(role)
    if options.rank not in target.layout.ranks:
        return model
    if target.layout.dims.fsdp > 1:
        bind_tensors(model, {
            spec.name: torch.empty(spec.shape, dtype=options.copy_dtype, device=options.device)
            for spec in target.model.params
        })  # fmt: skip
        return parallelize(model, target, meshes, tp_plan=tp_plan)
    tensor_parallelize(model, target.layout, meshes, tp_plan=tp_plan)
    if target.layout.dims.pp > 1:
        cut_stage(model, target, options.rank)
    return model


def empty_model_like(blank: nn.Module, old: Replica, device: torch.device, *, has_weights: bool) -> nn.Module:
    """Return an undivided model like ``old``'s with undefined weights.

    Args:
        blank: The same model without weights.
        old: The replica whose frozen parameters and training mode are taken over. Collective if it is a pipeline.
        device: Device of the weights.
        has_weights: Whether to allocate memory for them.
    """
    model = weightless_copy(blank)
    tensors = {}
    for name, parameter in model.named_parameters():
        room = torch.empty(parameter.shape if has_weights else (1,), dtype=parameter.dtype, device=device)
        tensors[name] = room.expand(parameter.shape)
    bind_tensors(model, tensors)
    model.to(device)
    frozen = {name for name, parameter in old.model.named_parameters() if not parameter.requires_grad}
    if old.layout.dims.pp > 1:  # this rank may hold one stage of the old model
        frozen = set().union(*gather_objects(frozen))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model.train(old.model.training)
