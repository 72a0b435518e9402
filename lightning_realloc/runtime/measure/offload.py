"""Offload tensors to a slower memory and bring them back into the same storages.

Tensors of an accelerator go to pinned host memory, on a stream of their own. Tensors on the CPU go to a temporary
file, which the operating system may write to disk; a thread reads them back. Tensors and their views keep their
identity, because only their storages are emptied. Offloaded tensors must not be read: torch does not check this, and
the process crashes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from lightning_realloc.errors import ReallocError


class OffloadCopier(Protocol):
    """Copies between a device and a slower memory."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a (num_bytes,) uint8 tensor in the slower memory."""

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each first tensor into the second; the first may be freed afterwards."""

    def start_copy_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Start to copy each second tensor into the first."""

    def wait(self) -> None:
        """Make later operations see the results of all copies that `start_copy_back` started."""


def make_copier(device: torch.device) -> OffloadCopier:
    """Return the copier for a device's tensors."""
    return _StreamCopier(device) if device.type == "cuda" else _FileCopier()


class Offload:
    """A set of tensors that can be moved to the slower memory and back.

    Args:
        copier: Several objects may share one.
    """

    def __init__(self, copier: OffloadCopier) -> None:
        self._copier = copier
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        self._slow_memory: Tensor | None = None
        self._version: int | None = None
        self._is_returning = False
        self.is_offloaded = False
        """Whether the tensors have no memory on the device."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that were offloaded last; 0 before the first time."""
        return sum(size for _, size in self._storages)

    def move_out(self, tensors: Iterable[Tensor], *, version: int) -> None:
        """Free the tensors' memory on the device; copy them first unless ``version`` is that of the last copy.

        Does nothing if they are offloaded already.

        Raises:
            ReallocError: for memory that torch cannot free, and if there is no space for the copy.
        """
        if self.is_offloaded:
            return
        self.finish_return()
        found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        fixed = [storage for storage in found.values() if not storage.resizable()]
        if fixed:
            raise ReallocError(
                f"{len(fixed)} of {len(found)} tensors lie in memory that torch cannot free: a mapped file, or shared "
                f"with other processes; clone them before they are offloaded"
            )
        known = [storage._cdata for storage, _ in self._storages]
        if known != list(found) or version != self._version:
            self._storages = [(storage, storage.nbytes()) for storage in found.values()]
            if self._slow_memory is None or self._slow_memory.numel() != self.num_bytes:
                self._slow_memory = self._copier.allocate(self.num_bytes)
            self._copier.copy_out(self._pairs())
            self._version = version
        for storage in found.values():
            storage.resize_(0)
        self.is_offloaded = True

    def start_return(self) -> None:
        """Allocate the memory again and start to copy the content back; nothing if the tensors are on the device."""
        if not self.is_offloaded:
            return
        for storage, size in self._storages:
            storage.resize_(size)
        self._copier.start_copy_back(self._pairs())
        self.is_offloaded, self._is_returning = False, True

    def finish_return(self) -> None:
        """Make the tensors readable: start the return unless it was started, and wait for it."""
        self.start_return()
        if self._is_returning:
            self._copier.wait()
            self._is_returning = False

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the bytes of each storage, on the device and in the slower memory."""
        assert self._slow_memory is not None
        pairs, start = [], 0
        for storage, size in self._storages:
            fast = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            pairs.append((fast, self._slow_memory[start : start + size]))
            start += size
        return pairs


class _FileCopier:
    """Copies tensors on the CPU to a temporary file."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="realloc-offload")
        self._pending: list[Future[None]] = []

    def allocate(self, num_bytes: int) -> Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        with tempfile.NamedTemporaryFile(prefix="realloc-offload-") as file:  # deleted with the last tensor on it
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk would end the process at the first write
            except OSError as error:
                raise ReallocError(
                    f"no space to offload {num_bytes / 1e6:.0f} MB to {tempfile.gettempdir()}: {error}; free some, set "
                    f"TMPDIR to a folder on another disk, or shorten the plan's offload"
                ) from error
            return torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for fast, slow in pairs:
            slow.copy_(fast)

    def start_copy_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pending.append(self._thread.submit(_copy_back, pairs))

    def wait(self) -> None:
        while self._pending:
            self._pending.pop().result()


class _StreamCopier:
    """Copies tensors of an accelerator to pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for fast, slow in pairs:
                slow.copy_(fast, non_blocking=True)
        current.wait_stream(self._stream)  # later allocations reuse the freed memory only after the copy

    def start_copy_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        # Work in the current stream may still read the allocated memory.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _copy_back(pairs, non_blocking=True)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _copy_back(pairs: Sequence[tuple[Tensor, Tensor]], *, non_blocking: bool = False) -> None:
    for fast, slow in pairs:
        fast.copy_(slow, non_blocking=non_blocking)
