"""Describe a role's weights and optimizer state as sharded tensors of a checkpoint.

Both are described by regions of global tensors, so both can be read into any other layout. Reading an optimizer's
state neither steps nor initializes it: saving never changes training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor, nn

from lightning_realloc.errors import CheckpointError
from lightning_realloc.layout.region import Region
from lightning_realloc.layout.sharding import Piece
from lightning_realloc.runtime.parallel.shards import local_tensor, reshard
from lightning_realloc.strategies.checkpoints.sharded_tensors import ShardedTensor
from lightning_realloc.strategies.checkpoints.stored_metadata import StoredTensor
from lightning_realloc.strategies.pool.replan import state_room
from lightning_realloc.strategies.pool.replica import Replica

_SCALAR = Piece(Region((0,), (1,)), (0,))
"""Region of a scalar, which is stored as a tensor of one element."""
_SEPARATOR = "//"
"""Separates a parameter's name, which contains dots, from a key of its optimizer state."""


def weight_key(role: str, name: str) -> str:
    """Return a weight's name in a checkpoint."""
    return f"model/{role}/{name}"


def optimizer_key(role: str, name: str, key: str, *, kind: str = "optimizer") -> str:
    """Return the name in a checkpoint of one entry of a weight's optimizer state."""
    return f"{kind}/{role}/{name}{_SEPARATOR}{key}"


def weights_state(replica: Replica, names: Set[str] | None = None) -> dict[str, ShardedTensor]:
    """Return this rank's shards of a role's weights, or of those in ``names``, to write or to fill in place."""
    held = replica.held_tensors()
    return {
        weight_key(replica.role, param.name): ShardedTensor(
            param.shape,
            held[param.name].dtype if param.name in held else torch.float32,
            replica.model_layout.pieces(param.name, replica.rank),
            held.get(param.name),
        )
        for param in replica.model_layout.model.params
        if names is None or param.name in names
    }


def non_finite_parameters(replica: Replica, names: Set[str] | None = None) -> list[str]:
    """Return the parameters, out of ``names`` or of all, whose shards on this rank hold NaN or infinity."""
    start = weight_key(replica.role, "")
    return [
        key.removeprefix(start)
        for key, tensor in weights_state(replica, names).items()
        if any(not _is_finite(tensor.view(piece.region.starts)) for piece in tensor.pieces if piece.region.numel)
    ]


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:  # aminmax and isfinite do not support 8-bit floats
        return True
    # aminmax propagates NaN; isfinite on the whole tensor would allocate a mask of its shape.
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def optimizer_state(replica: Replica, optimizer: torch.optim.Optimizer) -> dict[str, ShardedTensor]:
    """Return this rank's shards of an optimizer's per-parameter state, to write or to fill in place.

    Raises:
        CheckpointError: for an entry that is not None, a scalar, or a tensor of the parameter's shape.
    """
    state = {}
    for name, parameter in _optimized_parameters(replica, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                kind = "optimizer_scalar" if _is_scalar(value) else "optimizer"
                stored = optimizer_key(replica.role, name, key, kind=kind)
                state[stored] = _shard_entry(replica, name, parameter, key, value)
    return state


def prepare_optimizer_state(
    replica: Replica, optimizer: torch.optim.Optimizer, stored: Mapping[str, StoredTensor]
) -> dict[str, ShardedTensor]:
    """Allocate the optimizer state that a checkpoint holds, and return its shards, to fill in place.

    State that had the dtype of its weight has it again, also in another precision than that of the checkpoint. An
    optimizer that had not stepped when the checkpoint was written has no state afterwards.
    """
    optimizer.state.clear()
    if not replica.is_inside:
        return {}
    entries = _stored_entries(replica.role, stored)
    options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in _optimized_parameters(replica, optimizer):
        weight = stored.get(weight_key(replica.role, name))
        for key, kind, dtype in entries.get(name, ()):
            scalar = None if kind == "optimizer" else 0.0
            if scalar is None and weight is not None and weight.dtype == dtype:
                dtype = parameter.dtype
            optimizer.state[parameter][key] = state_room(parameter, options[id(parameter)], dtype=dtype, scalar=scalar)
    return optimizer_state(replica, optimizer)


def _stored_entries(role: str, stored: Mapping[str, StoredTensor]) -> dict[str, list[tuple[str, str, torch.dtype]]]:
    """Return parameter name -> (key, kind, dtype) of each stored entry of the role's optimizer."""
    entries: defaultdict[str, list[tuple[str, str, torch.dtype]]] = defaultdict(list)
    for stored_name, tensor in stored.items():
        for kind in ("optimizer", "optimizer_scalar"):
            prefix = f"{kind}/{role}/"
            if stored_name.startswith(prefix):
                name, _, key = stored_name.removeprefix(prefix).partition(_SEPARATOR)
                entries[name].append((key, kind, tensor.dtype))
    return entries


def _optimized_parameters(replica: Replica, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    reshard(replica.model)  # while FSDP's root is gathered, its parameters are not the optimizer's
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return ((name, p) for name, p in replica.model.named_parameters() if id(p) in known)


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _shard_entry(replica: Replica, name: str, parameter: nn.Parameter, key: str, value: object) -> ShardedTensor:
    if isinstance(value, Tensor) and value.dim() == 0:
        return ShardedTensor((1,), value.dtype, (_SCALAR,), value.view(1))
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        shape, pieces = replica.model_layout.model.param(name).shape, replica.model_layout.pieces(name, replica.rank)
        return ShardedTensor(shape, value.dtype, pieces, local_tensor(value))
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
    raise CheckpointError(
        f"optimizer state {key!r} of {replica.role} parameter {name}, which has shape {tuple(parameter.shape)}, is "
        f"{kind} and cannot be sharded like the parameter; use an optimizer whose state is per element or a scalar"
    )
