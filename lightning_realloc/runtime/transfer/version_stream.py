"""Weights that travel in the background, version after version, from ranks that train to ranks that generate.

The sender copies its pieces into host memory and goes on; gloo's threads transfer them. The receiver asks whether a
version has arrived, and writes it into its own tensors when that suits it. One version at a time is on its way: the
sender waits until the one before was sent. Each message has two frames (see `bulk_messages`), a header and the pieces.
After the pieces come their version and checksums, taken from the sender's live weights; the receiver compares its
tensors with them before they are used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.realloc.plan import ReallocationPlan, Transfer
from lightning_realloc.runtime.messages.bulk_messages import MARK, FrameReceiver, wait_for
from lightning_realloc.runtime.transfer.agreement import WeightVerification
from lightning_realloc.runtime.transfer.checksums import BoxFamily, Checksums, HeldBox, samples_per_box
from lightning_realloc.runtime.transfer.point_to_point import CopyList, region_view
from lightning_realloc.runtime.transfer.weight_check import WeightSubject

_CLOSED = -1
"""Version in the header that ends a stream."""
_MOVING = "weights were on their way to or from it"
_WORD_BYTES = 8
"""Bytes of each number after the pieces: the version, the checksums, and a word whose last byte is the mark."""


class VersionSender:
    """Sends this rank's pieces of every version to the ranks that need them.

    Args:
        plan: Transfers of this rank, all of them from source tensors: planned for a single node.
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
        self._proofs: list[tuple[Checksums, Tensor]] = []
        frames: dict[tuple[object, ...], Tensor] = {}
        for receiver, transfers in _by_peer(plan, lambda transfer: (transfer.receiver, transfer.sender)).items():
            content = tuple((each.param, *_places(plan, each)) for each in transfers)
            if content not in frames:  # replicas of the target need the same pieces
                frame = _Frame(plan, transfers, dtype, verify_weights)
                frames[content] = frame.content
                frame.content[-1] = MARK
                for transfer, part in zip(transfers, frame.parts, strict=True):
                    self._copies.add(part, region_view(source[transfer.param], transfer.sender_offset, transfer.shape))
                self._proofs.append((frame.checksums(source, lambda transfer: transfer.sender_offset), frame.proof))
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
        for checksums, proof in self._proofs:
            proof[0] = version
            proof[1:] = checksums.compute(version)
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
        group: All ranks, over gloo.
        tag: The sender's.
        verify_weights: The sender's.
        role: Name of the weights in errors.
        version: Version that the tensors hold; only newer ones are accepted.
    """

    def __init__(
        self,
        plan: ReallocationPlan,
        target: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        tag: int,
        verify_weights: WeightVerification = "sampled",
        role: str = "the model",
        version: int = -1,
    ) -> None:
        self._copies = CopyList()
        self._parcels: list[_Parcel] = []
        self._proofs: list[tuple[Checksums, _Frame]] = []
        self._subject = WeightSubject(role, plan.source.layout, plan.target.layout, dist.get_rank(), "stream")
        self._latest = version
        for sender, transfers in _by_peer(plan, lambda transfer: (transfer.sender, transfer.receiver)).items():
            frame = _Frame(plan, transfers, dtype, verify_weights)
            self._parcels.append(_Parcel(frame.content, sender, group, tag))
            for transfer, part in zip(transfers, frame.parts, strict=True):
                self._copies.add(region_view(target[transfer.param], transfer.receiver_offset, transfer.shape), part)
            self._proofs.append((frame.checksums(target, lambda transfer: transfer.receiver_offset), frame))
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
            WeightMismatch: if the target's tensors differ from the senders' weights then, or are no newer version.
        """
        versions = [parcel.wait() for parcel in self._parcels]
        version = max(versions)
        if version == _CLOSED:
            return None
        self._copies.run()
        if min(versions) != version or version <= self._latest:
            raise self._subject.stale(max(version, self._latest + 1), min(versions))
        for checksums, frame in self._proofs:
            self._verify(version, checksums, frame)
        self._latest = version
        for parcel in self._parcels:
            parcel.begin()
        return version

    def _verify(self, version: int, checksums: Checksums, frame: _Frame) -> None:
        if int(frame.proof[0]) != version:
            raise self._subject.stale(version, int(frame.proof[0]))
        differs = (frame.proof[1:] != checksums.compute(version).cpu()).tolist()
        names = [name for name, is_wrong in zip(frame.checked, differs, strict=True) if is_wrong]
        if names:
            raise self._subject.mismatch(version, list(dict.fromkeys(names)))


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


def _places(plan: ReallocationPlan, transfer: Transfer) -> tuple[tuple[int, ...], ...]:
    """Return the shape of a piece, and where it lies in the tensors of both ranks."""
    held = plan.source.local_shape(transfer.param, transfer.sender)
    wanted = plan.target.local_shape(transfer.param, transfer.receiver)
    return transfer.shape, transfer.sender_offset, held, transfer.receiver_offset, wanted


class _Frame:
    """Pieces of one version for one rank in host memory, then their version and checksums, then a mark."""

    def __init__(
        self,
        plan: ReallocationPlan,
        transfers: Sequence[Transfer],
        dtype: torch.dtype,
        verify_weights: WeightVerification,
    ) -> None:
        self._dtype, self._verify_weights = dtype, verify_weights
        counts = Counter(transfer.param for transfer in transfers)
        families: dict[tuple[object, ...], list[Transfer]] = {}
        for transfer in transfers if verify_weights != "off" else ():
            geometry = (*_places(plan, transfer), counts[transfer.param])
            families.setdefault(geometry, []).append(transfer)
        self._families = [(members, samples_per_box(counts[members[0].param])) for members in families.values()]
        self.checked = [transfer.param for members, _ in self._families for transfer in members]
        """Parameter of each checksum."""
        sizes = [math.prod(transfer.shape) for transfer in transfers]
        num_bytes = sum(sizes) * dtype.itemsize
        num_words, end = 1 + len(self.checked), -(-num_bytes // _WORD_BYTES) * _WORD_BYTES
        self.content = torch.zeros(end + (num_words + 1) * _WORD_BYTES, dtype=torch.uint8)
        """(bytes,) uint8 tensor; the last byte is the mark."""
        self.proof = self.content[end : end + num_words * _WORD_BYTES].view(torch.int64)
        """Version and checksums."""
        parts = torch.split(self.content[:num_bytes].view(dtype), sizes)
        self.parts = [part.view(transfer.shape) for part, transfer in zip(parts, transfers, strict=True)]
        """Views that hold the pieces, in their shapes."""

    def checksums(self, held: Mapping[str, Tensor], offset: Callable[[Transfer], tuple[int, ...]]) -> Checksums:
        """Return the checksums of the pieces where ``held`` has them, from ``offset`` on."""
        found = []
        for members, num_samples in self._families:
            first, shape = members[0], tuple(held[members[0].param].shape)
            box = HeldBox(first.shape, offset(first), shape, (0,) * len(shape), first.shape, num_samples, 0)
            found.append(BoxFamily(tuple(each.param for each in members), (box,)))
        return Checksums(found, held, dtype=self._dtype, is_sampled=self._verify_weights == "sampled")
