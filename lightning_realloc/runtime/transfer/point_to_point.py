"""Point-to-point messages that bring the pieces of a plan from rank to rank, and the views that they are copied from.

Sender and receiver bind the same transfers by the same rules, so their messages match.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import ReallocError
from lightning_realloc.realloc.plan import Transfer
from lightning_realloc.runtime.transfer.shared_memory import ALIGNMENT_BYTES

_TAG = 7411  # prevents gloo from matching these messages with others on the default group


class Arena:
    """Allocates tensors one after the other from one storage, which can be freed and restored under them."""

    def __init__(self, device: torch.device, *, alignment_bytes: int = ALIGNMENT_BYTES) -> None:
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self._device, self._alignment_bytes = device, alignment_bytes
        self._position = 0
        self.num_bytes = 0
        """Bytes of all allocations so far."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor at the current position."""
        end = self._position + math.prod(shape) * dtype.itemsize
        if end > self._storage.nbytes():
            self._storage.resize_(max(end, 2 * self._storage.nbytes()))
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        strides = torch.empty(shape, device="meta").stride()
        tensor.set_(self._storage, self._position // dtype.itemsize, tuple(shape), strides)
        self._position = -(-end // self._alignment_bytes) * self._alignment_bytes
        self.num_bytes = max(self.num_bytes, end)
        return tensor

    def rewind(self) -> None:
        """Return to the start. Later allocations share memory with earlier ones."""
        self._position = 0

    def restore(self) -> None:
        """Resize the storage to exactly ``num_bytes``. After `release` the contents are undefined."""
        if self._storage.nbytes() != self.num_bytes:
            self._storage.resize_(self.num_bytes)

    def release(self) -> None:
        """Free the memory. Tensors stay bound and must not be accessed before `restore`."""
        self._storage.resize_(0)


@dataclass(slots=True)
class CopyList:
    """Pairs of views that are copied together, with a cast if dtypes differ."""

    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)

    def add(self, target: Tensor, source: Tensor) -> None:
        """Add a pair of equal shape."""
        self.targets.append(target)
        self.sources.append(source)

    def run(self) -> None:
        """Copy all pairs."""
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)

    @property
    def num_bytes(self) -> int:
        """Bytes written by a run."""
        return sum(map(_num_bytes, self.targets))


@dataclass(slots=True)
class _Round:
    """Messages and copies of one rank in one round."""

    before: CopyList = field(default_factory=CopyList)
    """Copies that cast and pack outgoing data."""
    sends: list[tuple[Tensor, int]] = field(default_factory=list)
    receives: list[tuple[Tensor, int]] = field(default_factory=list)
    after: CopyList = field(default_factory=CopyList)
    """Copies from staging memory into the target."""

    def start(self, *, together: bool) -> list[dist.Work | None]:
        """Start all messages: in one launch for NCCL, whose single sends and receives wait for each other."""
        if together:
            self.before.run()
            operations = [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in self.receives]
            operations += [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in self.sends]
            return list(dist.batch_isend_irecv(operations)) if operations else []
        pending = [dist.irecv(tensor, peer, tag=_TAG) for tensor, peer in self.receives]
        self.before.run()  # receives start before the casts, so that peers need not wait for these
        return pending + [dist.isend(tensor, peer, tag=_TAG) for tensor, peer in self.sends]


class Messages:
    """Point-to-point messages on the default group that bring a rank's transfers, round by round.

    A large piece that is contiguous and in the wire dtype on both ranks is sent from storage to storage. Others are
    cast or copied through staging memory, once for all receivers of a round. Small pieces share one message per peer.
    """

    def __init__(
        self,
        rounds: Iterable[Sequence[Transfer]],
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        *,
        rank: int,
        wire_dtype: torch.dtype,
        pack_below_bytes: int,
        device: torch.device,
    ) -> None:
        """Bind this rank's transfers.

        Args:
            rounds: Transfers between this rank and others, in the same order on all ranks.
            pack_below_bytes: Must be equal on all ranks, because messages would not match otherwise.
        """
        backend = default_backend(device)
        self._launches_together = backend == "nccl"
        wire_device = torch.device("cpu") if backend == "gloo" else device  # gloo sends from host memory only
        self._outgoing, self._incoming = (Arena(wire_device, alignment_bytes=wire_dtype.itemsize) for _ in range(2))
        binder = _RoundBinder(
            rank, source, target, wire_dtype, pack_below_bytes, wire_device, self._outgoing, self._incoming
        )
        self._rounds = [binder.bind(transfers) for transfers in rounds]
        self.bytes_received = sum(_num_bytes(tensor) for round_ in self._rounds for tensor, _ in round_.receives)
        self.staging_bytes = self._outgoing.num_bytes + self._incoming.num_bytes
        self.restore()

    def run(self, kept: CopyList) -> None:
        """Send and receive all rounds, and make local copies during the first one."""
        if not self._rounds:
            kept.run()
        for index, round_ in enumerate(self._rounds):
            pending = round_.start(together=self._launches_together)
            if index == 0:
                kept.run()
            _wait(pending)
            round_.after.run()

    def release(self) -> None:
        """Free the staging memory until `restore`."""
        self._outgoing.release()
        self._incoming.release()

    def restore(self) -> None:
        """Allocate the staging memory again."""
        self._outgoing.restore()
        self._incoming.restore()


@dataclass(frozen=True, slots=True)
class _RoundBinder:
    """Converts transfers to views and messages. Sender and receiver use the same rules, so their messages match."""

    rank: int
    source: Mapping[str, Tensor]
    target: Mapping[str, Tensor]
    dtype: torch.dtype
    pack_below_bytes: int
    device: torch.device
    outgoing: Arena
    incoming: Arena

    def bind(self, transfers: Sequence[Transfer]) -> _Round:
        self.outgoing.rewind()
        self.incoming.rewind()
        round_ = _Round()
        staged: dict[tuple[object, ...], Tensor] = {}
        small_out: dict[int, list[Tensor]] = {}
        small_in: dict[int, list[Tensor]] = {}
        for transfer in transfers:
            is_small = transfer.numel * self.dtype.itemsize < self.pack_below_bytes
            if transfer.sender == self.rank:
                holder = self.source if transfer.hop == 0 else self.target
                view = region_view(holder[transfer.param], transfer.sender_offset, transfer.shape)
                if is_small:
                    small_out.setdefault(transfer.receiver, []).append(view)
                    continue
                key = (transfer.param, transfer.hop, transfer.sender_offset, transfer.shape)
                if key not in staged:
                    staged[key] = self._send_from([view], round_)
                round_.sends.append((staged[key], transfer.receiver))
            else:
                view = region_view(self.target[transfer.param], transfer.receiver_offset, transfer.shape)
                if is_small:
                    small_in.setdefault(transfer.sender, []).append(view)
                else:
                    round_.receives.append((self._receive_into([view], round_), transfer.sender))
        for peer, views in sorted(small_out.items()):
            round_.sends.append((self._send_from(views, round_), peer))
        for peer, views in sorted(small_in.items()):
            round_.receives.append((self._receive_into(views, round_), peer))
        return round_

    def _send_from(self, views: list[Tensor], round_: _Round) -> Tensor:
        message, staged = self._message(views, self.outgoing)
        for view, staging in staged:
            round_.before.add(staging, view)
        return message

    def _receive_into(self, views: list[Tensor], round_: _Round) -> Tensor:
        message, staged = self._message(views, self.incoming)
        for view, staging in staged:
            round_.after.add(view, staging)
        return message

    def _message(self, views: list[Tensor], arena: Arena) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the tensor to send or receive, and the views to copy with their places in it.

        The tensor is a single view itself if it is contiguous in the wire dtype, else staging memory.
        """
        first = views[0]
        is_ready = first.dtype == self.dtype and first.device.type == self.device.type and first.is_contiguous()
        if len(views) == 1 and is_ready:
            return first, []
        sizes = [view.numel() for view in views]
        message = arena.allocate((sum(sizes),), self.dtype)
        places = torch.split(message, sizes)
        return message, [(view, place.view(view.shape)) for view, place in zip(views, places, strict=True)]


def exchange(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], device: torch.device) -> None:
    """Send a tensor to each rank in ``outgoing``, and fill those of ``incoming``; on the default group.

    The tensors are on ``device``, or in host memory if its backend is gloo. Collective over these ranks.
    """
    round_ = _Round(
        sends=[(tensor, peer) for peer, tensor in outgoing.items()],
        receives=[(tensor, peer) for peer, tensor in incoming.items()],
    )
    _wait(round_.start(together=default_backend(device) == "nccl"))


def _wait(pending: Iterable[dist.Work | None]) -> None:
    for work in pending:
        if work is not None:
            work.wait()


def region_view(tensor: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a view of the box of ``tensor`` with the given first index and shape."""
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def default_backend(device: torch.device) -> str:
    """Return the default group's backend for tensors on ``device``; "none" in a process without a group."""
    if not dist.is_initialized():
        return "none"
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    by_device = {kind: backend for kind, _, backend in pairs}
    if device.type not in by_device:
        raise ReallocError(
            f"the default process group has no backend for {device.type} tensors, only for {', '.join(by_device)}; "
            "initialize it with one, such as backend='cpu:gloo,cuda:nccl'"
        )
    return by_device[device.type]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
