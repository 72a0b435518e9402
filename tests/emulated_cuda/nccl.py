"""Gloo in the place of NCCL: its collectives on tensors of the emulated device, and on those alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast", "gather", "irecv", "isend",
    "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip
_groups: set[str] = set()
"""Names of the groups that the program takes for NCCL's."""


def install() -> None:
    """Let process groups of NCCL be groups of gloo."""
    get_backend = dist.get_backend

    def get_named_backend(group: dist.ProcessGroup | None = None) -> str:
        return "nccl" if (group or dist.group.WORLD).group_name in _groups else get_backend(group)  # type: ignore[union-attr]

    get_config = dist.get_backend_config

    def get_named_config(group: dist.ProcessGroup | None = None) -> str:
        return "cuda:nccl" if get_named_backend(group) == "nccl" else get_config(group)

    get_object_device = distributed_c10d._get_object_coll_device

    def get_device_of_objects(group: dist.ProcessGroup | None = None) -> str:
        return "cuda" if get_named_backend(group) == "nccl" else get_object_device(group)

    replacements: dict[str, Any] = {
        **{name: _on_device(getattr(dist, name)) for name in _COLLECTIVES},
        "init_process_group": _init_process_group(dist.init_process_group),
        "new_group": _new_group(dist.new_group),
        "get_backend": get_named_backend,
        "get_backend_config": get_named_config,
        "is_nccl_available": lambda: True,
        "all_reduce": _on_device(_all_reduce(dist.all_reduce)),
        "_get_object_coll_device": get_device_of_objects,
    }
    torch.cuda.nccl.version = lambda: (2, 28, 9)  # type: ignore[assignment, misc]
    for name, replacement in replacements.items():
        for module in (dist, distributed_c10d):
            setattr(module, name, replacement)


def _init_process_group(init: Callable[..., None]) -> Callable[..., None]:
    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        is_nccl = "nccl" in (backend or "")
        init((backend or "gloo").replace("nccl", "gloo"), *args, device_id=None if is_nccl else device_id, **kwargs)
        _groups.clear()
        if is_nccl:
            _groups.add(dist.group.WORLD.group_name)  # type: ignore[union-attr]

    return init_process_group


def _new_group(create: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        is_nccl = dist.get_backend() == "nccl" if backend is None else "nccl" in backend
        group = create(ranks, timeout, None if backend is None else backend.replace("nccl", "gloo"), *args, **kwargs)
        if is_nccl and isinstance(group, dist.ProcessGroup):
            _groups.add(group.group_name)
        return group

    return new_group


def _all_reduce(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        if op != dist.ReduceOp.AVG or tensor.is_floating_point():
            return reduce(tensor, op, *args, **kwargs)
        work = reduce(tensor, dist.ReduceOp.SUM, *args, **kwargs)  # gloo's own mean is for real numbers
        tensor.div_(dist.get_world_size(kwargs.get("group")), rounding_mode="floor")
        return work

    return all_reduce


def _on_device(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Let a collective refuse tensors of the host in groups of NCCL."""
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        tensors = [leaf for leaf in tree_leaves(list(given.values())) if isinstance(leaf, Tensor)]
        if dist.get_backend(given.get("group")) == "nccl" and any(tensor.is_cpu for tensor in tensors):
            raise RuntimeError("No backend type associated with device type cpu")
        return collective(*args, **kwargs)

    return checked
