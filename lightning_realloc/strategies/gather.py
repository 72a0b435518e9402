"""A role's full weights in one place: the reallocation to the layout of a single rank, a few parameters at a time."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

import torch
from torch import Tensor

from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.runtime.executor import Reallocation
from lightning_realloc.runtime.shards import local_tensors
from lightning_realloc.strategies.replica import Replica

WINDOW_ELEMENTS = 1 << 28
"""How many elements are gathered at a time: what the first rank's device must hold besides its own share."""


def gather_weights(
    replica: Replica,
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    names: Set[str] | None = None,
    window_elements: int = WINDOW_ELEMENTS,
) -> dict[str, Tensor]:
    """Return name -> full tensor in host memory on rank 0, {} elsewhere, tied names included. Collective.

    Of all parameters, or of some ``names``, the same on all ranks.
    """
    spec = replica.model_layout.model
    if names is not None:
        spec = replace(spec, params=tuple(param for param in spec.params if param.name in names), aliases=())
    dtype = next(replica.model.parameters()).dtype  # known also on ranks that hold no weights of the role
    held = local_tensors(replica.model) if rank in replica.layout else {}
    full: dict[str, Tensor] = {}
    for window in _windows(spec, window_elements):
        inside = {param.name for param in window.params}
        reallocation = Reallocation(
            ModelLayout(window, replica.layout),
            {name: tensor for name, tensor in held.items() if name in inside},
            ModelLayout(window, Layout(ParallelDims(), (0,))),
            rank=rank,
            world_size=world_size,
            dtype=dtype,
            device=device,
        )
        reallocation.run()
        full |= {name: tensor.to("cpu", copy=True) for name, tensor in reallocation.target_tensors.items()}
        reallocation.release()
    return full | {alias: full[owner] for alias, owner in spec.aliases if owner in full}


def _windows(spec: ModelSpec, most_elements: int) -> Iterator[ModelSpec]:
    """Cut a model into runs of parameters, each of at most so many elements or of a single parameter."""
    begin, elements = 0, 0
    for index, param in enumerate(spec.params):
        if index > begin and elements + param.numel > most_elements:
            yield replace(spec, params=spec.params[begin:index], aliases=())
            begin, elements = index, 0
        elements += param.numel
    yield replace(spec, params=spec.params[begin:], aliases=())
