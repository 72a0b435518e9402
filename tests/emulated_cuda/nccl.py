"""Gloo in the place of NCCL: its collectives on tensors of the emulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def install() -> None:
    """Let process groups of NCCL be groups of gloo."""
    for name in ("init_process_group", "new_group"):
        replacement = _with_gloo(getattr(dist, name))
        for module in (dist, distributed_c10d):
            setattr(module, name, replacement)
    for module in (dist, distributed_c10d):
        module.is_nccl_available = lambda: True  # type: ignore[attr-defined]


def _with_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
    def create_with_gloo(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_renamed(value) for value in args)
        kwargs = {name: _renamed(value) for name, value in kwargs.items() if name != "device_id"}
        return create(*args, **kwargs)

    return create_with_gloo


def _renamed(value: Any) -> Any:
    return value.replace("nccl", "gloo") if isinstance(value, str) else value
