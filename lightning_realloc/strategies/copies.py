"""What a copy of a model in another layout is made of: a skeleton, which a delivery fills with weights later."""

from __future__ import annotations

import torch
from torch import nn

from lightning_realloc.layout.model import ModelLayout
from lightning_realloc.runtime.mesh import MeshRegistry
from lightning_realloc.runtime.parallelize import parallelize, tensor_parallelize
from lightning_realloc.runtime.shards import bind_tensors
from lightning_realloc.runtime.stage import cut_stage
from lightning_realloc.runtime.twin import make_skeleton
from lightning_realloc.strategies.pool_options import PoolOptions


def prepare_copy(
    role: str, blank: nn.Module, target: ModelLayout, meshes: MeshRegistry, options: PoolOptions
) -> nn.Module:
    """Return this rank's part of a role's model under ``target``, a skeleton on ranks outside.

    Shards of FSDP's have memory at once, all others none before they are filled. Collective over the ranks inside.
    """
    skeleton = make_skeleton(blank).eval().requires_grad_(False)
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
