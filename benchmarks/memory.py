"""Bytes of the live tensors of a rank, counted in the process rather than computed from layouts."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def live_bytes(*, num_sharing: int) -> int:
    """Return the bytes of all live tensors of this process; memory that ranks share is divided by ``num_sharing``."""
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found)
    storages = {s.data_ptr(): s.nbytes() for s in map(_host_storage, local) if s is not None}
    shared = shared_ranges(Path("/proc/self/maps").read_text().splitlines())
    return sum(size // (num_sharing if _is_within(at, shared) else 1) for at, size in storages.items())


def shared_ranges(maps: Sequence[str]) -> list[tuple[int, int]]:
    """Return the address ranges of the lines of ``/proc/self/maps`` that several processes write."""
    ranges = []
    for line in maps:
        addresses, permissions, *_ = line.split()
        if permissions.endswith("s"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            ranges.append((begin, end))
    return ranges


def available_bytes(meminfo: Sequence[str]) -> int:
    """Return the memory available without swapping, from the lines of ``/proc/meminfo``."""
    return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))


def _is_within(address: int, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(begin <= address < end for begin, end in ranges)


def _host_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory behind ``tensor``; None for those of devices, sparse ones, and fake ones, which have none."""
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    return storage if storage is not None and storage.device.type == "cpu" else None
