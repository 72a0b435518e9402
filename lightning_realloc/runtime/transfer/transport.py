"""Transports that copy the pieces of a plan into the target's tensors.

Both transports give the same bits. `DirectTransport` sends point to point and works everywhere. `PushTransport` lets
the ranks of a node write into target tensors in shared memory, and sends between nodes only. Both are bound once to
tensors with fixed storage, and then loop over prepared lists. The executor chooses between them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_realloc.errors import ReallocError
from lightning_realloc.realloc.plan import Transfer
from lightning_realloc.runtime.transfer.point_to_point import Arena, CopyList, Messages, region_view
from lightning_realloc.runtime.transfer.shared_memory import (
    DISCARDS_WORD,
    SHORTAGES_WORD,
    FlagBarrier,
    SharedSegment,
)


class Transport(Protocol):
    """One plan bound to one rank's tensors."""

    bytes_moved: int
    """This rank's part of the bytes that a run brings to ranks without them. The parts of all ranks add up."""
    bytes_written: int
    """Bytes that this rank writes into shared memory in a run."""
    staging_bytes: int
    """Memory that this rank needs in addition to source and target."""

    def run(self) -> float:
        """Fill the target's tensors and return the seconds. Collective over the ranks of source and target."""

    def release(self) -> None:
        """Free memory until the next run. The target's contents are lost; its tensors stay bound."""


class DirectTransport:
    """Brings all pieces by messages from rank to rank, into memory of each rank's own."""

    bytes_written = 0

    def __init__(
        self,
        messages: Messages,
        kept: Iterable[Transfer],
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        *,
        device: torch.device,
        owned: Arena,
    ) -> None:
        """Bind this rank's local copies.

        Args:
            messages: Pieces from other ranks.
            kept: Local copies.
            owned: Memory of the tensors of ``target`` that `release` may free.
        """
        self._messages, self._device, self._owned = messages, device, owned
        self._is_released = False
        self._kept = CopyList()
        for transfer in kept:
            into = region_view(target[transfer.param], transfer.receiver_offset, transfer.shape)
            self._kept.add(into, region_view(source[transfer.param], transfer.sender_offset, transfer.shape))
        self.bytes_moved, self.staging_bytes = messages.bytes_received, messages.staging_bytes
        owned.restore()

    @torch.no_grad()
    def run(self) -> float:
        """See `Transport.run`."""
        start = time.perf_counter()
        if self._is_released:
            self._messages.restore()
            self._owned.restore()
            self._is_released = False
        self._messages.run(self._kept)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # otherwise the seconds would be those of the launches
        return time.perf_counter() - start

    def release(self) -> None:
        """See `Transport.release`."""
        self._messages.release()
        self._owned.release()
        self._is_released = True


class PushTransport:
    """Copies and casts this rank's pieces directly into the target's shards in its node's shared memory.

    Each distinct shard is stored once on a node, even if several ranks use it. They must not write to it. Pieces that
    no rank of the node holds arrive by messages, each once.
    """

    def __init__(
        self,
        segment: SharedSegment,
        copies: CopyList,
        messages: Messages | None,
        forwards: CopyList,
        *,
        rank: int,
        ranks: Sequence[int],
        bytes_moved: int,
        deadline_s: float,
    ) -> None:
        """Bind copies from this rank's source tensors into ``segment``, which all of ``ranks`` have mapped.

        Args:
            messages: Pieces from and to other nodes; None if the plan has a single node.
            forwards: Copies of arrived pieces into other shards of the segment.
            ranks: Ranks of the node.
        """
        index, names = ranks.index(rank), [f"rank {member}" for member in ranks]
        self._segment, self._copies, self._messages, self._forwards = segment, copies, messages, forwards
        self._barrier = FlagBarrier(segment, index, names, deadline_s=deadline_s)
        self._leaving = FlagBarrier(segment, index, names, deadline_s=deadline_s, channel=1)
        self._is_first = index == 0
        self._runs = self._discards_seen = self._shortages_seen = 0
        self.bytes_moved = bytes_moved
        arrived = 0 if messages is None else messages.bytes_received
        self.bytes_written = copies.num_bytes + arrived + forwards.num_bytes
        self.staging_bytes = 0 if messages is None else messages.staging_bytes

    @torch.no_grad()
    def run(self) -> float:
        """See `Transport.run`."""
        self._barrier.wait()  # no rank still reads the old weights
        start = time.perf_counter()
        if self._segment.words[DISCARDS_WORD] != self._discards_seen:
            self._reserve()
        if self._messages is None:
            self._copies.run()
        else:
            self._messages.restore()
            self._messages.run(self._copies)
            self._barrier.wait()
            self._forwards.run()
        self._barrier.wait()
        self._runs += 1
        return time.perf_counter() - start

    def release(self) -> None:
        """See `Transport.release`. Memory is freed once all ranks have called this since the last run."""
        if self._messages is not None:
            self._messages.release()
        if self._leaving.arrive(self._runs):
            self._segment.discard()
            self._segment.words[DISCARDS_WORD] += 1

    def _reserve(self) -> None:
        """Allocate the pages before any rank writes, because a full tmpfs would kill it. All ranks raise alike."""
        if self._is_first:
            try:
                self._segment.reserve()
            except OSError:
                self._segment.words[SHORTAGES_WORD] += 1
        self._barrier.wait()
        if self._segment.words[SHORTAGES_WORD] != self._shortages_seen:
            self._shortages_seen = self._segment.words[SHORTAGES_WORD]
            raise ReallocError(
                f"{self._segment.handle.size / 1e6:.0f} MB of shared memory were released and cannot be allocated "
                "again; free memory, keep the target's storage between runs, or use transport='direct'"
            )
        self._discards_seen = self._segment.words[DISCARDS_WORD]
