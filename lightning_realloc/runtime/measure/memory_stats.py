"""Measure the bytes of live tensors on this rank, and their peak.

On CUDA the allocator counts them. On CPU a dispatch mode watches every operation and counts each allocated storage
until it is freed. Measuring is slow; leave it off when you measure time.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_realloc.runtime.measure.usage import PeakMemory

_STORAGE_CLASS: Any = torch.UntypedStorage  # its resize_ is replaced: no dispatch mode sees it


class AllocatorMeter:
    """Bytes allocated by CUDA's caching allocator, without those that it holds in reserve."""

    def __init__(self, peak_memory: PeakMemory) -> None:
        self._peak_memory = peak_memory

    def start(self) -> None:
        """Reset the peak; the allocator always counts."""
        self.take_peak()

    def stop(self) -> None:
        """Do nothing: the allocator always counts."""

    def take_peak(self) -> int:
        """Return the peak bytes since the last call or `start`, and reset the peak."""
        return self._peak_memory.take(type(self).__name__) or 0


class StorageMeter(TorchDispatchMode):
    """Bytes of the storages of host tensors; views of one storage count once.

    Memory that torch did not allocate (segments that ranks share, buffers of other libraries) is not counted. Neither
    is memory that a kernel allocates and frees inside.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = 0
        """Bytes of live storages."""
        self._peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resize = torch.UntypedStorage.resize_

    def start(self) -> None:
        """Start counting, including the tensors that exist already."""
        gc.collect()
        found = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
        for tensor in found:
            for storage in _storages(tensor):
                self._count(storage)
        self._peak_bytes = self.current_bytes
        _STORAGE_CLASS.resize_ = lambda storage, size: self._resized(storage, size)
        self.__enter__()

    def stop(self) -> None:
        """Stop counting."""
        self.__exit__(None, None, None)
        _STORAGE_CLASS.resize_ = self._resize

    def take_peak(self) -> int:
        """Return the peak bytes since the last call or `start`, and reset the peak."""
        peak, self._peak_bytes = self._peak_bytes, self.current_bytes
        return peak

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count the storages of its results."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatched again for the local tensors
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            for storage in _storages(leaf):
                self._count(storage)
        return result

    def _resized(self, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        """Resize a storage, as FSDP does to free and restore weights, and count the difference."""
        result: torch.UntypedStorage = self._resize(storage, size)
        if storage.device.type == "cpu":
            self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._ends:
            self._ends[key] = weakref.ref(storage, partial(self._forget, key))
        self.current_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._peak_bytes = max(self._peak_bytes, self.current_bytes)

    def _forget(self, key: int, _: object) -> None:
        self.current_bytes -= self._sizes.pop(key)
        del self._ends[key]


MemoryMeter = AllocatorMeter | StorageMeter
"""Counts the bytes of tensors on this rank's device."""


def memory_meter(peak_memory: PeakMemory) -> MemoryMeter:
    """Return the meter for this rank's device."""
    return AllocatorMeter(peak_memory) if peak_memory.device.type == "cuda" else StorageMeter()


def _storages(value: object) -> list[torch.UntypedStorage]:
    if not isinstance(value, Tensor):
        return []
    if isinstance(value, DTensor):
        value = value._local_tensor
    if value.layout is not torch.strided:
        return []
    storage = value.untyped_storage()
    if storage.device.type != "cpu":  # not value.device: DTensor infers shapes with fake tensors, whose device differs
        return []
    return [storage] if storage.resizable() else []  # torch did not allocate the others
