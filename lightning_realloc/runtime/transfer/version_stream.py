"""Weights that travel in the background, version after version, from ranks that train to ranks that generate.

The sender copies its pieces into host memory and goes on; gloo's threads transfer them. The receiver asks whether a
version has arrived, and writes it into its own tensors when that suits it. One version at a time is on its way: the
sender waits until the one before was sent. Each message has two frames (see `bulk_messages`), a header and the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.realloc.plan import ReallocationPlan, Transfer
from lightning_realloc.runtime.messages.bulk_messages import MARK, FrameReceiver, wait_for
from lightning_realloc.runtime.transfer.point_to_point import CopyList, region_view

_CLOSED = -1
"""Version in the header that ends a stream."""
_MOVING = "weights were on their way to or from it"
_MARK_BYTES = 8
"""Bytes after the pieces, which keep the frame aligned; the last one is the mark."""


class VersionSender:
    """Sends this rank's pieces of every version to the ranks that need them.

    Args:
        plan: Transfers of this rank, all of them from source tensors: planned for a single node.
        source: Parameter name -> this rank's local tensor, whose storage stays the same.
        dtype: Dtype of the pieces on their way.
        group: All ranks, over gloo, used by streams only.
        tag: Number that no other stream of the group has.
    """

    def __init__(
        self,
        plan: ReallocationPlan,
        source: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        tag: int,
    ) -> None:
        self._group, self._tag = group, tag
        self._copies = CopyList()
        self._frames: dict[int, Tensor] = {}
        frames: dict[tuple[object, ...], Tensor] = {}
        for receiver, transfers in _by_peer(plan, lambda transfer: (transfer.receiver, transfer.sender)).items():
            content = tuple((each.param, each.sender_offset, each.shape) for each in transfers)
            if content not in frames:  # replicas of the target need the same pieces
                frames[content], parts = _frame(transfers, dtype)
                frames[content][-1] = MARK
                for transfer, part in zip(transfers, parts, strict=True):
                    self._copies.add(part, region_view(source[transfer.param], transfer.sender_offset, transfer.shape))
            self._frames[receiver] = frames[content]
        self._works: list[tuple[dist.Work, Tensor]] = []

    @torch.no_grad()
    def send(self, version: int) -> None:
        """Copy the weights as they are now, and start to send them as ``version``, a number of at least 0.

        Waits until the version before was sent.

        Raises:
            RankLost: if a receiver is gone.
        """
        self.wait()
        self._copies.run()
        self._start(version, self._frames)

    def close(self) -> None:
        """End the stream: `VersionReceiver.receive` then returns None. Waits until everything was sent."""
        self.wait()
        self._start(_CLOSED, {})
        self.wait()

    def _start(self, version: int, frames: Mapping[int, Tensor]) -> None:
        header = torch.tensor([version, MARK])
        for receiver in self._frames:
            self._isend(header, receiver)
        for receiver, frame in frames.items():
            self._isend(frame, receiver)

    def _isend(self, frame: Tensor, receiver: int) -> None:
        work = dist.isend(frame, receiver, group=self._group, tag=self._tag)
        assert work is not None, "this rank is part of the group"
        self._works.append((work, frame))  # gloo's work does not keep the memory that it sends from alive

    def wait(self) -> None:
        """Return once the last version was sent. Raises RankLost if a receiver is gone."""
        while self._works:
            wait_for(self._works.pop(0)[0], meanwhile=_MOVING)


class VersionReceiver:
    """Receives versions and writes them into this rank's tensors.

    Args:
        plan: Transfers of this rank, all of them from source tensors: planned for a single node.
        target: Parameter name -> this rank's local tensor, whose storage stays the same.
        dtype: Dtype of the pieces on their way.
        group: All ranks, over gloo, used by streams only.
        tag: The sender's.
    """

    def __init__(
        self,
        plan: ReallocationPlan,
        target: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        tag: int,
    ) -> None:
        self._copies = CopyList()
        self._parcels: list[_Parcel] = []
        for sender, transfers in _by_peer(plan, lambda transfer: (transfer.sender, transfer.receiver)).items():
            frame, parts = _frame(transfers, dtype)
            self._parcels.append(_Parcel(frame, sender, group, tag))
            for transfer, part in zip(transfers, parts, strict=True):
                self._copies.add(region_view(target[transfer.param], transfer.receiver_offset, transfer.shape), part)
        self.senders = tuple(parcel.sender for parcel in self._parcels)
        """Ranks that send to this one."""

    def has_arrived(self) -> bool:
        """Return whether `receive` would return at once."""
        return all([parcel.has_arrived() for parcel in self._parcels])  # asks all, since asking starts the second frame

    def has_version(self) -> bool:
        """Return whether `receive` would return a version at once."""
        return self.has_arrived() and not any(parcel.is_end for parcel in self._parcels)

    def wait(self) -> None:
        """Return once `receive` would return at once. Raises RankLost if a sender is gone."""
        for parcel in self._parcels:
            parcel.wait()

    @torch.no_grad()
    def receive(self) -> int | None:
        """Write the next version into the target's tensors, and return it; None at the stream's end. Waits for it.

        Raises:
            RankLost: if a sender is gone.
        """
        versions = {parcel.wait() for parcel in self._parcels}
        assert len(versions) == 1, f"all ranks send the same versions, not {versions}"
        (version,) = versions
        if version == _CLOSED:
            return None
        self._copies.run()
        for parcel in self._parcels:
            parcel.begin()
        return version


class _Parcel(FrameReceiver):
    """The pieces of one version from one sender, as they arrive."""

    def __init__(self, frame: Tensor, sender: int, group: dist.ProcessGroup, tag: int) -> None:
        super().__init__(group, sender, tag, meanwhile=_MOVING)
        self.frame, self.sender = frame, sender
        self._header = torch.zeros(2, dtype=torch.int64)
        self.begin()

    def begin(self) -> None:
        """Start to receive the next version."""
        self._header.zero_()
        self.frame[-1] = 0
        self.start(self._header)

    def second_frame(self) -> Tensor | None:
        """See `FrameReceiver`."""
        return None if self.is_end else self.frame

    @property
    def is_end(self) -> bool:
        """Whether the header says that the stream ends."""
        return bool(self._header[0] == _CLOSED)

    def wait(self) -> int:
        """Return the version once it has arrived."""
        self.wait_for_frames()
        return int(self._header[0])


def _by_peer(plan: ReallocationPlan, ends: Callable[[Transfer], tuple[int, int]]) -> dict[int, list[Transfer]]:
    """Return peer -> the transfers between it and this rank; ``ends`` gives the peer and this rank of a transfer."""
    found: dict[int, list[Transfer]] = {}
    for transfer in plan.transfers:
        peer, rank = ends(transfer)
        if rank == plan.rank and peer != rank:
            assert transfer.hop == 0, "streams do not send pieces on"
            found.setdefault(peer, []).append(transfer)
    return dict(sorted(found.items()))


def _frame(transfers: Sequence[Transfer], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return a (bytes,) uint8 tensor on the host, and the views in it that hold the pieces, in their shapes."""
    sizes = [math.prod(transfer.shape) for transfer in transfers]
    num_bytes = sum(sizes) * dtype.itemsize
    frame = torch.zeros(-(-num_bytes // _MARK_BYTES) * _MARK_BYTES + _MARK_BYTES, dtype=torch.uint8)
    parts = torch.split(frame[:num_bytes].view(dtype), sizes)
    return frame, [part.view(transfer.shape) for part, transfer in zip(parts, transfers, strict=True)]
