"""Gather a role's full weights on rank 0, by reallocating a few parameters at a time to the layout of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor

from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout, ParamSpec
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.transfer.executor import Reallocation
from lightning_realloc.strategies.pool.pool_options import RunFacts
from lightning_realloc.strategies.pool.replica import Replica

WINDOW_ELEMENTS = 1 << 28
"""Elements gathered at a time. Raising it makes fewer reallocations, and needs more memory on rank 0's device."""


def gather_weights(
    replica: Replica, facts: RunFacts, *, names: Set[str] | None = None, window_elements: int = WINDOW_ELEMENTS
) -> dict[str, Tensor]:
    """Return name -> full tensor in host memory on rank 0, {} elsewhere, tied names included. Collective.

    Args:
        names: Parameters to gather, the same on all ranks, without tied names; None gathers all.
    """
    model = replica.model_layout.model
    chosen = [param for param in model.params if names is None or param.name in names]
    dtypes, held = _agree_on_dtypes(replica), replica.held_tensors()
    full: dict[str, Tensor] = {}
    for window in _make_windows(chosen, window_elements, dtypes):
        source = replica.model_layout.subset(window)
        reallocation = Reallocation(
            source,
            {name: held[name] for name in window if name in held},
            ModelLayout(source.model, Layout(ParallelDims(), (0,))),
            rank=facts.rank,
            world_size=facts.world_size,
            dtype=dtypes[window[0]],
            device=facts.device,
            role=replica.role,
        )
        reallocation.run(replica.version)
        full |= {name: tensor.to("cpu", copy=True) for name, tensor in reallocation.target_tensors.items()}
        reallocation.release()
    return full | {alias: full[owner] for alias, owner in model.aliases if names is None and owner in full}


def _agree_on_dtypes(replica: Replica) -> dict[str, torch.dtype]:
    """Return the dtype of every parameter, including those on other pipeline stages. Collective."""
    mine = {name: parameter.dtype for name, parameter in replica.model.named_parameters()}
    return {name: dtype for theirs in gather_objects(mine) for name, dtype in theirs.items()}


def _make_windows(
    params: Sequence[ParamSpec], max_elements: int, dtypes: Mapping[str, torch.dtype]
) -> Iterator[list[str]]:
    """Yield the names of parameters of one dtype that have at most ``max_elements`` together, or of a single one."""
    for dtype in dict.fromkeys(dtypes[param.name] for param in params):
        window, elements = list[str](), 0
        for param in (param for param in params if dtypes[param.name] == dtype):
            if window and elements + param.numel > max_elements:
                yield window
                window, elements = [], 0
            window.append(param.name)
            elements += param.numel
        yield window
