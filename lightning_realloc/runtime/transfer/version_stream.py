"""Weights that travel in the background, version after version, from ranks that train to ranks that generate.

The sender copies its pieces into host memory and goes on; gloo's threads transfer them. On the other end they land in
memory that the ranks of a host share, each once. A receiver asks whether a version has landed, and writes it into its
own tensors when that suits it. One version at a time is on its way: the sender waits until the one before was sent.
After the pieces come their version and checksums, taken from the sender's live weights; the receiver compares its
tensors with them before they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.realloc.delivery import messages_from
from lightning_realloc.realloc.plan import ReallocationPlan
from lightning_realloc.runtime.messages.bulk_messages import wait_for
from lightning_realloc.runtime.transfer.agreement import WeightVerification
from lightning_realloc.runtime.transfer.landing import ENDS, FOLLOWS, MOVING, HostMemory, Landing
from lightning_realloc.runtime.transfer.point_to_point import CopyList, region_view
from lightning_realloc.runtime.transfer.shared_memory import SharedSegment
from lightning_realloc.runtime.transfer.version_frames import FrameLayout, HostFrames, MessageFrame, PieceChecksums
from lightning_realloc.runtime.transfer.weight_check import WeightSubject


class VersionSender:
    """Sends this rank's pieces of every version to the ranks where they land.

    Args:
        plan: Transfers of this rank.
        source: Parameter name -> this rank's local tensor, whose storage stays the same.
        dtype: Dtype of the pieces on their way.
        group: All ranks, over gloo.
        tag: Number that no other messages of the group have.
        verify_weights: Elements of each piece whose checksum goes with it.
    """

    def __init__(
        self,
        plan: ReallocationPlan,
        source: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        tag: int,
        verify_weights: WeightVerification = "sampled",
    ) -> None:
        self._group, self._tag = group, tag
        self._copies = CopyList()
        self._frames: dict[int, Tensor] = {}
        self._proofs: list[tuple[PieceChecksums, Tensor]] = []
        frames: dict[tuple[object, ...], MessageFrame] = {}
        for message in messages_from(plan, dist.get_rank()):
            content = tuple((each.param, each.shape, each.sender_offset) for each in message.transfers)
            if content not in frames:  # other replicas of the target need the same pieces
                layout = FrameLayout(message, dtype, verify_weights)
                frame = frames[content] = layout.view(torch.zeros(layout.num_bytes, dtype=torch.uint8))
                for transfer, piece in zip(message.transfers, frame.pieces, strict=True):
                    self._copies.add(piece, region_view(source[transfer.param], transfer.sender_offset, transfer.shape))
                offsets = {index: transfer.sender_offset for index, transfer in enumerate(message.transfers)}
                self._proofs.append((layout.checksums(source, offsets), frame.proof))
            self._frames[message.receiver] = frames[content].content
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
        for checksums, proof in self._proofs:
            checksums.write(version, proof)
        self._start(FOLLOWS)
        for receiver, frame in self._frames.items():
            self._isend(frame, receiver)

    def close(self) -> None:
        """End the stream: `VersionReceiver.receive` then returns None. Waits until everything was sent."""
        self.wait()
        self._start(ENDS)
        self.wait()

    def _start(self, header: int) -> None:
        for receiver in self._frames:
            self._isend(torch.tensor([header]), receiver)

    def _isend(self, frame: Tensor, receiver: int) -> None:
        work = dist.isend(frame, receiver, group=self._group, tag=self._tag)
        assert work is not None, "this rank is part of the group"
        self._works.append((work, frame))  # gloo's work does not keep the memory that it sends from alive

    def wait(self) -> None:
        """Return once the last version was sent. Raises RankLost if a receiver is gone."""
        while self._works:
            wait_for(self._works.pop(0)[0], meanwhile=MOVING)


class _Slot(NamedTuple):
    """The pieces that this rank reads in one slot of its host's memory."""

    copies: CopyList
    proofs: list[tuple[PieceChecksums, Tensor]]


class VersionReceiver:
    """Lands this rank's messages on its host, and writes versions into its tensors.

    Args:
        frames: Messages that land on this host.
        target: Parameter name -> this rank's local tensor, whose storage stays the same.
        group: All ranks, over gloo.
        tag: The sender's.
        segment: Memory that the readers of this host have mapped, see `HostMemory`.
        subject: Name of the weights in errors.
        version: Version that the tensors hold; only newer ones are accepted.
    """

    def __init__(
        self,
        frames: HostFrames,
        target: Mapping[str, Tensor],
        *,
        group: dist.ProcessGroup,
        tag: int,
        segment: SharedSegment | None,
        subject: WeightSubject,
        version: int = -1,
    ) -> None:
        self._memory = HostMemory(frames, segment)
        self._slots = [_Slot(CopyList(), []) for _ in self._memory.slots]
        self._subject, self._latest, self._num_taken = subject, version, 0
        own: dict[int, list[Tensor]] = {}
        read = [landed for landed in frames.landed if landed.reads]
        for message, layout, begin, reads in read:
            views = [layout.view(memory[begin:]) for memory in self._memory.slots]
            checksums = layout.checksums(target, reads)
            for slot, frame in zip(self._slots, views, strict=True):
                for index, offset in reads.items():
                    param, shape = message.transfers[index].param, message.transfers[index].shape
                    slot.copies.add(region_view(target[param], offset, shape), frame.pieces[index])
                slot.proofs.append((checksums, frame.proof))
            if message.receiver == frames.rank:
                own[message.sender] = [frame.content for frame in views]
        self._receivers = sorted({landed.message.receiver for landed in read})
        self.senders = tuple(sorted({landed.message.sender for landed in read}))
        """Ranks that send the pieces of this one."""
        self._landing = Landing(self._memory, own, group, tag) if own else None

    def has_arrived(self) -> bool:
        """Return whether `receive` would return at once. Raises RankLost if a sender is gone."""
        return self._memory.has_landed(self._num_taken + 1, self._receivers)

    def has_version(self) -> bool:
        """Return whether `receive` would return a version at once. Raises RankLost if a sender is gone."""
        return self.has_arrived() and not self._memory.has_ended(self._num_taken + 1, self._receivers)

    def wait(self) -> None:
        """Return once `receive` would return at once. Raises RankLost if another rank fails or is gone."""
        self._memory.wait_until(self.has_arrived, what="newer weights")

    @torch.no_grad()
    def receive(self) -> int | None:
        """Write the next version into the target's tensors, and return it; None at the stream's end. Waits for it.

        Raises:
            RankLost: if another rank fails or is gone.
            WeightMismatch: if the target's tensors differ from the senders' weights then, or are no newer version.
        """
        self.wait()
        if not self.has_version():
            if self._landing is not None:
                self._landing.join()
            return None
        slot = self._slots[self._num_taken % len(self._slots)]
        slot.copies.run()
        versions = [int(proof[0]) for _, proof in slot.proofs]
        version = max(versions)
        if min(versions) != version or version <= self._latest:
            raise self._subject.stale(max(version, self._latest + 1), min(versions))
        differing = [name for checksums, proof in slot.proofs for name in checksums.differing(version, proof)]
        if differing:
            raise self._subject.mismatch(version, list(dict.fromkeys(differing)))
        self._latest, self._num_taken = version, self._num_taken + 1
        self._memory.record_taken()
        return version
