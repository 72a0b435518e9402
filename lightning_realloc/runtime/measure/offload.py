"""Tensors that leave a device for a slower memory, and come back to where they were.

An accelerator's tensors go to pinned host memory; copies in both directions have a stream of their own. Tensors on the
CPU go to a temporary file, from which a thread reads them back: what is away the operating system may write to disk.
Tensors, and views of them, keep their identity; only the storage under them is emptied, so whatever was bound to them
stays bound. While it is away nobody may read it: torch does not check, and a process that does ends.
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


class Carrier(Protocol):
    """Copies between a device and a slower memory."""

    def room(self, num_bytes: int) -> Tensor:
        """Return (num_bytes,) uint8 of the slower memory."""

    def take_away(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each first tensor into the second; the first may be freed afterwards."""

    def start_bringing(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy each second tensor into the first."""

    def wait(self) -> None:
        """Let what follows see everything that `start_bringing` began."""


def carrier(device: torch.device) -> Carrier:
    """Return what carries a device's tensors."""
    return _StreamCarrier(device) if device.type == "cuda" else _FileCarrier()


class Offload:
    """Some tensors' way out and back.

    Args:
        carrier: Which several of these may share.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        self._room: Tensor | None = None
        self._version: int | None = None
        self._is_returning = False
        self.is_away = False
        """Whether the tensors have no memory on the device."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are away, or were at last."""
        return sum(size for _, size in self._storages)

    def leave(self, tensors: Iterable[Tensor], *, version: int) -> None:
        """Free the tensors' memory on the device, after a copy where ``version`` is not that of the last one.

        Nothing where they are away.

        Raises:
            ReallocError: for memory that torch cannot free, and when there is no room for the copy.
        """
        if self.is_away:
            return
        self.finish_return()
        found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        fixed = [storage for storage in found.values() if not storage.resizable()]
        if fixed:
            raise ReallocError(
                f"{len(fixed)} of {len(found)} tensors lie in memory that torch cannot free, of a file or shared with "
                f"other processes; clone them before they are offloaded"
            )
        known = [storage._cdata for storage, _ in self._storages]
        if known != list(found) or version != self._version:
            self._storages = [(storage, storage.nbytes()) for storage in found.values()]
            if self._room is None or self._room.numel() != self.num_bytes:
                self._room = self._carrier.room(self.num_bytes)
            self._carrier.take_away(self._pairs())
            self._version = version
        for storage in found.values():
            storage.resize_(0)
        self.is_away = True

    def start_return(self) -> None:
        """Have the memory again, and begin to copy the content back. Nothing where the tensors are present."""
        if not self.is_away:
            return
        for storage, size in self._storages:
            storage.resize_(size)
        self._carrier.start_bringing(self._pairs())
        self.is_away, self._is_returning = False, True

    def finish_return(self) -> None:
        """Make the tensors readable: wait for a return that was begun, or do all of it."""
        self.start_return()
        if self._is_returning:
            self._carrier.wait()
            self._is_returning = False

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each storage's bytes on the device beside those in the slower memory."""
        assert self._room is not None
        pairs, at = [], 0
        for storage, size in self._storages:
            there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            pairs.append((there, self._room[at : at + size]))
            at += size
        return pairs


class _FileCarrier:
    """For the CPU's tensors."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="realloc-offload")
        self._begun: list[Future[None]] = []

    def room(self, num_bytes: int) -> Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        with tempfile.NamedTemporaryFile(prefix="realloc-offload-") as file:  # gone with the last tensor on it
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk would end the process at the first write
            except OSError as error:
                raise ReallocError(
                    f"no room to offload {num_bytes / 1e6:.0f} MB to {tempfile.gettempdir()}: {error}; free some, set "
                    f"TMPDIR to a folder on another disk, or shorten the plan's offload"
                ) from error
            return torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)

    def take_away(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for there, away in pairs:
            away.copy_(there)

    def start_bringing(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._begun.append(self._thread.submit(_copy_back, pairs))

    def wait(self) -> None:
        while self._begun:
            self._begun.pop().result()


class _StreamCarrier:
    """For an accelerator's tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def room(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def take_away(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for there, away in pairs:
                away.copy_(there, non_blocking=True)
        current.wait_stream(self._stream)  # what is allocated in the freed memory is written after the copy

    def start_bringing(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        # The memory may be one that work in the current stream still reads.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _copy_back(pairs, non_blocking=True)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _copy_back(pairs: Sequence[tuple[Tensor, Tensor]], *, non_blocking: bool = False) -> None:
    for there, away in pairs:
        there.copy_(away, non_blocking=non_blocking)
