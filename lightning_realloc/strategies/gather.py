"""A role's full weights in one place: the reallocation to the layout of a single rank."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout
from lightning_realloc.runtime.executor import Reallocation
from lightning_realloc.runtime.shards import local_tensors, reshard
from lightning_realloc.strategies.model_pool import Replica


def gather_weights(replica: Replica, rank: int, world_size: int, device: torch.device) -> dict[str, Tensor]:
    """Return name -> full tensor on rank 0, {} elsewhere, tied names included. Collective over all ranks."""
    reshard(replica.model)
    spec = replica.model_layout.model
    dtype = next(replica.model.parameters()).dtype  # also on ranks that hold no weights of the role
    full = {p.name: torch.empty(p.shape, dtype=dtype, device=device) for p in spec.params} if rank == 0 else {}
    Reallocation(
        replica.model_layout,
        local_tensors(replica.model) if rank in replica.layout else {},
        ModelLayout(spec, Layout(ParallelDims(), (0,))),
        rank=rank,
        world_size=world_size,
        dtype=dtype,
        device=device,
        transport="direct",
        target_tensors=full,
    ).run()
    return full | {alias: full[owner] for alias, owner in spec.aliases} if full else full
