"""Move weights and optimizer state of a role to a new home layout while training goes on.

The optimizer object, its groups and its settings stay. Only its parameters are exchanged for those of the new layout,
with their state. So schedules, Lightning and callbacks notice nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_realloc.errors import PlanError, WeightMismatch
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.parallel.shards import local_tensor, reshard
from lightning_realloc.strategies.pool.pool_options import PoolOptions
from lightning_realloc.strategies.pool.replica import Replica, sync_biases


def _move(
    what: str,
    old: Replica,
    new: Replica,
    held: Mapping[str, Tensor],
    room: dict[str, Tensor],
    dtype: torch.dtype,
    options: PoolOptions,
) -> None:
    """Fill tensors ``room`` in the new replica's layout from tensors ``held`` in the old one's. Collective.

    ``what`` names them in errors.

    Each names the same parameters on all ranks of its layout. Other parameters of the model stay.

    Raises:
        WeightMismatch: on every rank, if one does not hold the old replica's weights then.
    """
    names = {name for named in gather_objects([*held, *room]) for name in named}
    if names:
        source, target = old.model_layout.subset(names), new.model_layout.subset(names)
        move = options.reallocation(
            source, held, target, role=what, dtype=dtype, transport="direct", target_tensors=room
        )
        fault = None
        try:
            move.run(new.version)
        except WeightMismatch as error:
            fault = str(error)
        if faults := list(filter(None, gather_objects(fault))):
            raise WeightMismatch(faults[0])


def move_weights(old: Replica, new: Replica, options: PoolOptions) -> None:
    """Fill a new home replica from the old one. Collective over all ranks."""
    sync_biases(old, options)
    held, room = old.held_tensors(), new.held_tensors()
    mine = {parameter.dtype for parameter in new.model.parameters()}  # a pipeline stage may lack some
    for dtype in sorted(set().union(*gather_objects(mine)), key=str):
        sent = {name: tensor for name, tensor in held.items() if tensor.dtype == dtype}
        filled = {name: tensor for name, tensor in room.items() if tensor.dtype == dtype}
        _move(old.role, old, new, sent, filled, dtype, options)
    reshard(new.model)
    ours = dict(old.model.named_buffers())
    for name, buffer in new.model.named_buffers():
        if name in ours:  # else it belonged to another stage, and is as it was built
            buffer.copy_(ours[name])


class _Entry(NamedTuple):
    """One entry of an optimizer's state of one parameter, the same on every rank."""

    dtype: torch.dtype
    scalar: float | None
    """Value of a scalar, equal on all ranks; None for a tensor of the parameter's shape."""


def move_optimizer(old: Replica, new: Replica, optimizer: torch.optim.Optimizer, options: PoolOptions) -> None:
    """Replace an optimizer's parameters by the new replica's, with the same state. Collective over all ranks.

    Raises:
        PlanError: on every rank, for state that cannot be divided like the parameters.
    """
    reshard(old.model)
    reshard(new.model)
    before = {id(parameter): name for name, parameter in old.model.named_parameters()}
    after = dict(new.model.named_parameters())
    state = {before[id(p)]: values for p, values in optimizer.state.items()} if old.is_inside else {}
    entries = _agree_on_entries(old, state)
    groups: dict[str, dict[str, Any]] = {}
    for group, members in zip(optimizer.param_groups, _agree_on_members(optimizer, before), strict=True):
        names = [name for name in after if name in members]  # parameters of this rank's stage
        group["params"] = [after[name] for name in names]
        groups |= {name: group for name in names}
    optimizer.state = defaultdict(dict)
    for key in sorted({key for kept in entries.values() for key in kept}):
        named = {name: kept[key] for name, kept in entries.items() if key in kept}
        if new.is_inside:
            for name, entry in named.items():
                if name not in after:
                    continue  # of another stage
                room = state_room(after[name], groups[name], dtype=entry.dtype, scalar=entry.scalar)
                optimizer.state[after[name]][key] = room
        tensors = {name: entry for name, entry in named.items() if entry.scalar is None}
        for dtype in sorted({entry.dtype for entry in tensors.values()}, key=str):
            chosen = [name for name, entry in tensors.items() if entry.dtype == dtype]
            held = {name: local_tensor(state[name][key]) for name in chosen if name in state}
            mine = [name for name in chosen if name in after] if new.is_inside else []
            filled = {name: local_tensor(optimizer.state[after[name]][key]) for name in mine}
            _move(f"{old.role} optimizer {key}", old, new, held, filled, dtype, options)


def _agree_on_members(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[set[str]]:
    """Return the parameter names of every group; a pipeline stage knows its own alone. Collective."""
    mine = [{names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups]
    return [set().union(*theirs) for theirs in zip(*gather_objects(mine), strict=True)]


def _agree_on_entries(old: Replica, state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, _Entry]]:
    """Return parameter -> key -> entry on every rank, from the ranks of the old layout. Collective."""
    entries: dict[str, dict[str, _Entry]] = {}
    problem: str | None = None
    parameters = dict(old.model.named_parameters())
    for name, values in state.items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                entries.setdefault(name, {})[key] = _Entry(value.dtype, float(value))
            elif isinstance(value, Tensor) and value.shape == parameters[name].shape:
                entries.setdefault(name, {})[key] = _Entry(value.dtype, None)
            elif value is not None:
                problem = (
                    f"optimizer state {key!r} of {old.role} parameter {name} is neither a scalar nor of the "
                    f"parameter's shape, and cannot move to another layout; keep the plan, or use another optimizer"
                )
    merged: dict[str, dict[str, _Entry]] = {}
    for theirs, wrong in gather_objects((entries, problem)):
        if wrong is not None:
            raise PlanError(wrong)
        for name, kept in theirs.items():
            merged.setdefault(name, {}).update(kept)
    return merged


def state_room(
    parameter: nn.Parameter, group: Mapping[str, Any], *, dtype: torch.dtype, scalar: float | None
) -> Tensor:
    """Return a new entry of an optimizer's state: the scalar, or zeros in the parameter's layout if it is None."""
    if scalar is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    # Device of the step counts of torch's own optimizers.
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(scalar, dtype=dtype, device=parameter.device if on_device else "cpu")
