"""Gather a role's full weights on rank 0, by reallocating a few parameters at a time to the layout of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

import torch
from torch import Tensor

from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout, ModelSpec, ParamSpec
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.parallel.shards import local_tensors
from lightning_realloc.runtime.transfer.executor import Reallocation
from lightning_realloc.strategies.pool.replica import Replica

WINDOW_ELEMENTS = 1 << 28
"""Elements gathered at a time. Raising it makes fewer reallocations, and needs more memory on rank 0's device."""


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

    Args:
        names: Parameters to gather, the same on all ranks; None gathers all.
    """
    spec = replica.model_layout.model
    if names is not None:
        spec = replace(spec, params=tuple(param for param in spec.params if param.name in names), aliases=())
    dtypes = _agree_on_dtypes(replica)
    held = local_tensors(replica.model) if rank in replica.layout else {}
    full: dict[str, Tensor] = {}
    for window in _make_windows(spec, window_elements, dtypes):
        inside = {param.name for param in window.params}
        reallocation = Reallocation(
            ModelLayout(window, replica.layout),
            {name: tensor for name, tensor in held.items() if name in inside},
            ModelLayout(window, Layout(ParallelDims(), (0,))),
            rank=rank,
            world_size=world_size,
            dtype=dtypes[window.params[0].name],
            device=device,
        )
        reallocation.run()
        full |= {name: tensor.to("cpu", copy=True) for name, tensor in reallocation.target_tensors.items()}
        reallocation.release()
    return full | {alias: full[owner] for alias, owner in spec.aliases if owner in full}


def _agree_on_dtypes(replica: Replica) -> dict[str, torch.dtype]:
    """Return the dtype of every parameter, including those on other pipeline stages. Collective."""
    mine = {name: parameter.dtype for name, parameter in replica.model.named_parameters()}
    return {name: dtype for theirs in gather_objects(mine) for name, dtype in theirs.items()}


def _make_windows(spec: ModelSpec, max_elements: int, dtypes: Mapping[str, torch.dtype]) -> Iterator[ModelSpec]:
    """Cut a model into windows of one dtype, each of at most ``max_elements`` or of a single parameter."""
    for dtype in dict.fromkeys(dtypes[param.name] for param in spec.params):
        window, elements = list[ParamSpec](), 0
        for param in (param for param in spec.params if dtypes[param.name] == dtype):
            if window and elements + param.numel > max_elements:
                yield replace(spec, params=tuple(window), aliases=())
                window, elements = [], 0
            window.append(param)
            elements += param.numel
        yield replace(spec, params=tuple(window), aliases=())
