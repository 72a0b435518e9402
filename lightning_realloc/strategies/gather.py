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
    source = local_tensors(replica.model) if rank in replica.layout else {}
    dtype = next(iter(source.values())).dtype if source else torch.float32
    target = ModelLayout(replica.model_layout.model, Layout(ParallelDims(), (0,)))
    reallocation = Reallocation(
        replica.model_layout, source, target, rank=rank, world_size=world_size, dtype=dtype, device=device,
        transport="direct",
    )  # fmt: skip
    reallocation.run()
    full = {name: tensor.clone() for name, tensor in reallocation.target_tensors.items()}
    reallocation.release()
    aliases = replica.model_layout.model.aliases if full else ()
    return full | {alias: full[owner] for alias, owner in aliases}
