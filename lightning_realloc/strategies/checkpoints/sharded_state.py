"""What of a role goes into a checkpoint's shards? Its weights, and its optimizer's state per parameter.

Both are described by regions of global tensors, the same way, so either is read into any other layout. Nothing is
stepped or initialised to look at an optimizer: saving never changes training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from lightning_realloc.errors import CheckpointError
from lightning_realloc.layout.region import Region
from lightning_realloc.layout.sharding import Piece
from lightning_realloc.runtime.parallel.shards import local_tensor, local_tensors, reshard
from lightning_realloc.strategies.checkpoints.sharded_tensors import ShardedTensor, StoredTensor
from lightning_realloc.strategies.pool.replan import state_room
from lightning_realloc.strategies.pool.replica import Replica

_SCALAR = Piece(Region((0,), (1,)), (0,))
_SEPARATOR = "//"  # between a parameter's name, which has dots, and a key of its optimizer state


def weight_key(role: str, name: str) -> str:
    """Return the name under which a checkpoint stores a weight."""
    return f"model/{role}/{name}"


def optimizer_key(role: str, name: str, key: str, *, kind: str = "optimizer") -> str:
    """Return the name under which a checkpoint stores an entry of an optimizer's state of a weight."""
    return f"{kind}/{role}/{name}{_SEPARATOR}{key}"


def weights_state(replica: Replica, rank: int, names: Set[str] | None = None) -> dict[str, ShardedTensor]:
    """Return a role's weights, or those of some ``names``, as this rank holds them, to be written or read in place."""
    locals_ = local_tensors(replica.model) if rank in replica.layout else {}
    return {
        weight_key(replica.role, param.name): ShardedTensor(
            param.shape,
            locals_[param.name].dtype if param.name in locals_ else torch.float32,
            replica.model_layout.pieces(param.name, rank),
            locals_.get(param.name),
        )
        for param in replica.model_layout.model.params
        if names is None or param.name in names
    }


def not_finite(replica: Replica, rank: int, names: Set[str] | None = None) -> list[str]:
    """Return which parameters, all or of some ``names``, hold NaN or infinity in what this rank holds of them."""
    start = weight_key(replica.role, "")
    return [
        key.removeprefix(start)
        for key, tensor in weights_state(replica, rank, names).items()
        if any(not _is_finite(tensor.view(piece.region.starts)) for piece in tensor.pieces if piece.region.numel)
    ]


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:  # neither is implemented for 8-bit floats
        return True
    # NaN is both the least and the greatest, so two numbers tell; isfinite would take a mask of the tensor's shape.
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def optimizer_state(replica: Replica, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, ShardedTensor]:
    """Return an optimizer's per-parameter tensors, ready to be written or read in place.

    Raises:
        CheckpointError: for a state entry that is neither a tensor of the parameter's shape, a scalar, nor None.
    """
    state = {}
    for name, parameter in _optimized(replica, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                kind = "optimizer_scalar" if _is_scalar(value) else "optimizer"
                state[optimizer_key(replica.role, name, key, kind=kind)] = _sharded(
                    replica, name, parameter, key, value, rank
                )
    return state


def prepare_optimizer_state(
    replica: Replica, optimizer: torch.optim.Optimizer, stored: Mapping[str, StoredTensor], rank: int
) -> dict[str, ShardedTensor]:
    """Give ``optimizer`` room for what a checkpoint holds of its state, and return that room, to be read in place.

    An optimizer that had not stepped when the checkpoint was written is left without state.
    """
    optimizer.state.clear()
    if rank not in replica.layout:
        return {}
    entries = _entries(replica.role, stored)
    options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in _optimized(replica, optimizer):
        for key, kind, dtype in entries.get(name, ()):
            scalar = None if kind == "optimizer" else 0.0
            optimizer.state[parameter][key] = state_room(parameter, options[id(parameter)], dtype=dtype, scalar=scalar)
    return optimizer_state(replica, optimizer, rank)


def _entries(role: str, stored: Mapping[str, StoredTensor]) -> dict[str, list[tuple[str, str, torch.dtype]]]:
    """Return parameter name -> (key, kind, dtype) of what is stored of the role's optimizer."""
    entries: defaultdict[str, list[tuple[str, str, torch.dtype]]] = defaultdict(list)
    for stored_name, tensor in stored.items():
        for kind in ("optimizer", "optimizer_scalar"):
            prefix = f"{kind}/{role}/"
            if stored_name.startswith(prefix):
                name, _, key = stored_name.removeprefix(prefix).partition(_SEPARATOR)
                entries[name].append((key, kind, tensor.dtype))
    return entries


def _optimized(replica: Replica, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    reshard(replica.model)  # a gathered root shows other parameters than the optimizer's
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return ((name, p) for name, p in replica.model.named_parameters() if id(p) in known)


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _sharded(replica: Replica, name: str, parameter: nn.Parameter, key: str, value: Any, rank: int) -> ShardedTensor:
    if _is_scalar(value):
        return ShardedTensor((1,), value.dtype, (_SCALAR,), value.view(1))
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        shape = replica.model_layout.model.param(name).shape
        return ShardedTensor(shape, value.dtype, replica.model_layout.pieces(name, rank), local_tensor(value))
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
    raise CheckpointError(
        f"optimizer state {key!r} of {replica.role} parameter {name}, which has shape {tuple(parameter.shape)}, is "
        f"{what}, and cannot be divided like the parameter; use an optimizer whose state is per element or a scalar"
    )
