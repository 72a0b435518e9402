"""What a checkpoint of several models holds, and how it comes back into any layout.

A folder: every rank's regions of weights and optimizer state (see ``distributed_checkpoint``), and ``meta.pt`` with
Lightning's loops, callbacks and schedules, each role's parameter names and shapes, and its Hugging Face config.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_realloc.errors import CheckpointError
from lightning_realloc.layout.region import Region
from lightning_realloc.layout.sharding import Piece
from lightning_realloc.runtime.shards import local_tensor, local_tensors
from lightning_realloc.strategies import distributed_checkpoint as distributed
from lightning_realloc.strategies.distributed_checkpoint import ShardedTensor
from lightning_realloc.strategies.model_pool import ModelPool, Replica

META_FILE = "meta.pt"
ROLES_KEY = "realloc"
_SCALAR = Piece(Region((0,), (1,)), (0,))


def save_folder(
    folder: Path, checkpoint: dict[str, Any], state: Mapping[str, ShardedTensor], *, is_writer: bool, barrier: Any
) -> None:
    """Write a checkpoint folder, replacing whatever was there. Collective over all ranks."""
    if is_writer:
        if folder.is_dir():
            shutil.rmtree(folder)  # shards of a larger world would stay behind and be read again
        elif folder.exists():
            folder.unlink()
        folder.mkdir(parents=True)
    barrier()
    distributed.save(state, folder)
    if is_writer:
        torch.save(checkpoint, folder / META_FILE)
    barrier()


def read_meta(folder: Path, *, weights_only: bool) -> dict[str, Any]:
    """Return Lightning's part of a checkpoint folder.

    Raises:
        CheckpointError: for a path that is not such a folder.
    """
    if not (folder / META_FILE).is_file():
        kind = "a file" if folder.is_file() else "a folder without it" if folder.is_dir() else "missing"
        raise CheckpointError(
            f"a checkpoint of this strategy is a folder with {META_FILE}; {folder} is {kind}. "
            f"Weights in Hugging Face format are given as a model's path, not as ckpt_path"
        )
    meta: dict[str, Any] = torch.load(folder / META_FILE, map_location="cpu", weights_only=weights_only)
    if ROLES_KEY not in meta:
        raise CheckpointError(f"{folder} was written by another strategy; resume it with the one that wrote it")
    return meta


def describe_roles(pool: ModelPool) -> dict[str, Any]:
    """Return, per role, what a later run needs to check that it continues the same model."""
    roles = {}
    for role in pool.roles:
        home = pool.home(role)
        config = getattr(home.model, "config", None)
        roles[role] = {
            "parameters": {param.name: list(param.shape) for param in home.model_layout.model.params},
            "layout": str(home.layout),
            "config": config.to_dict() if config is not None else None,
            "architecture": _architecture(home.model),
        }
    return roles


def check_roles(stored: Mapping[str, Any], pool: ModelPool, folder: Path) -> None:
    """Refuse a checkpoint of other models, naming the first difference.

    Raises:
        CheckpointError: for a role, a parameter or a shape that differs.
    """
    for role in pool.roles:
        if role not in stored:
            raise CheckpointError(f"{folder} holds no role {role!r}; it holds {', '.join(stored) or 'none'}")
        ours = {param.name: list(param.shape) for param in pool.home(role).model_layout.model.params}
        theirs = stored[role]["parameters"]
        for name in sorted(ours.keys() ^ theirs.keys()):
            where = "only in the checkpoint" if name in theirs else "missing from the checkpoint"
            raise CheckpointError(
                f"{folder} is of another model: {role} parameter {name} is {where}; "
                f"resume with the model it was saved from"
            )
        for name, shape in ours.items():
            if shape != theirs[name]:
                raise CheckpointError(
                    f"{folder} is of another model: {role} parameter {name} has shape {theirs[name]} there and "
                    f"{shape} here; resume with the model it was saved from"
                )


def weights_state(replica: Replica, rank: int) -> dict[str, ShardedTensor]:
    """Return a role's weights as this rank holds them, ready to be written or read in place."""
    inside = rank in replica.layout
    locals_ = local_tensors(replica.model) if inside else {}
    return {
        f"model/{replica.role}/{param.name}": ShardedTensor(
            param.shape,
            locals_[param.name].dtype if inside else torch.float32,
            replica.model_layout.pieces(param.name, rank) if inside else (),
            locals_.get(param.name),
        )
        for param in replica.model_layout.model.params
    }


def optimizer_state(replica: Replica, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, ShardedTensor]:
    """Return an optimizer's per-parameter tensors; nothing is stepped or initialised to get them.

    Raises:
        CheckpointError: for a state entry that is neither a tensor of the parameter's shape, a scalar, nor None.
    """
    state = {}
    for name, parameter in _optimized(replica, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            state[_optimizer_key(replica.role, name, key, value)] = _sharded_state(
                replica, name, parameter, key, value, rank
            )
    return state


def prepare_optimizer_state(
    replica: Replica,
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    rank: int,
) -> dict[str, ShardedTensor]:
    """Give ``optimizer`` room for what a checkpoint holds of its state and return it, to be read in place.

    An optimizer that had not stepped when the checkpoint was written stays without state.
    """
    optimizer.state.clear()
    for name, parameter in _optimized(replica, optimizer):
        for stored_key, (_, dtype) in stored.items():
            kind, role, key_name = (*stored_key.split("/", 2), "")[:3]
            param_name, _, key = key_name.partition("//")
            if role != replica.role or param_name != name:
                continue
            if kind == "optimizer_scalar":
                optimizer.state[parameter][key] = torch.zeros((), dtype=dtype)
            elif kind == "optimizer":
                optimizer.state[parameter][key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return optimizer_state(replica, optimizer, rank)


def _optimized(replica: Replica, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return ((name, p) for name, p in replica.model.named_parameters() if id(p) in known)


def _optimizer_key(role: str, name: str, key: str, value: Any) -> str:
    kind = "optimizer_scalar" if isinstance(value, Tensor) and value.dim() == 0 else "optimizer"
    return f"{kind}/{role}/{name}//{key}"


def _sharded_state(
    replica: Replica, name: str, parameter: nn.Parameter, key: str, value: Any, rank: int
) -> ShardedTensor:
    if isinstance(value, Tensor) and value.dim() == 0:
        return ShardedTensor((1,), value.dtype, (_SCALAR,), value.view(1))
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        shape = replica.model_layout.model.param(name).shape
        return ShardedTensor(shape, value.dtype, replica.model_layout.pieces(name, rank), local_tensor(value))
    raise CheckpointError(
        f"optimizer state {key!r} of {replica.role} parameter {name} is a {type(value).__name__}, neither a scalar "
        f"tensor nor of the parameter's shape, so it cannot be sharded; use an optimizer whose state is per element"
    )


def _architecture(model: nn.Module) -> str:
    """Return the class that the model had before sharding gave it a new one."""
    name = type(model).__name__
    return name.removeprefix("FSDP")
