"""How do the pieces of a plan get into the target's tensors: through sockets and links, or through shared memory?

Two transports, the same bits. `DirectTransport` sends point to point and works everywhere; `PushTransport` lets the
ranks of one host write into target tensors that lie in shared memory. Both are bound once, to tensors that stay where
they are, and then loop over prepared lists. Which of the two is used, and for which plan, is the executor's choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import ReallocError
from lightning_realloc.realloc.plan import Transfer
from lightning_realloc.runtime.transfer.shared_memory import (
    ALIGNMENT_BYTES,
    DISCARDS,
    SHORTAGES,
    FlagBarrier,
    SharedSegment,
)

PACK_BELOW_BYTES = 64 << 10
"""Pieces below this are packed, one message per peer and round: there a message costs more than a copy."""

_TAG = 7411  # keeps gloo from matching our messages with somebody else's on the default group


class Transport(Protocol):
    """One plan bound to one rank's tensors."""

    name: str
    bytes_moved: int
    """This rank's share of the bytes that a run brings to ranks that did not hold them; add the shares of all ranks."""
    bytes_written: int
    """Bytes that this rank writes into shared memory in a run."""
    staging_bytes: int
    """Memory that this rank needs besides source and target."""

    def run(self) -> float:
        """Fill the target's tensors and return the seconds. Collective over the ranks of source and target."""

    def release(self) -> None:
        """Give memory back until the next run; the target's contents are lost, its tensors stay bound."""


class Arena:
    """Tensors cut one after the other out of one storage that can be given back and had again under them."""

    def __init__(self, device: torch.device, *, alignment_bytes: int = ALIGNMENT_BYTES) -> None:
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self._device, self._alignment_bytes = device, alignment_bytes
        self._at = 0
        self.num_bytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next piece as a contiguous tensor."""
        end = self._at + math.prod(shape) * dtype.itemsize
        if end > self._storage.nbytes():
            self._storage.resize_(max(end, 2 * self._storage.nbytes()))
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        tensor.set_(self._storage, self._at // dtype.itemsize, tuple(shape), contiguous_strides(shape))
        self._at = -(-end // self._alignment_bytes) * self._alignment_bytes
        self.num_bytes = max(self.num_bytes, end)
        return tensor

    def rewind(self) -> None:
        """Begin again at the front: what is taken from now on shares memory with what was taken before."""
        self._at = 0

    def restore(self) -> None:
        """Make the memory exist, exactly as much as was taken; contents are undefined after `release`."""
        if self._storage.nbytes() != self.num_bytes:
            self._storage.resize_(self.num_bytes)

    def release(self) -> None:
        """Free the memory; tensors stay bound to it and must not be touched before `restore`."""
        self._storage.resize_(0)


@dataclass(slots=True)
class Copies:
    """Pairs of views that are copied together; a copy casts."""

    into: list[Tensor] = field(default_factory=list)
    out_of: list[Tensor] = field(default_factory=list)

    def add(self, into: Tensor, out_of: Tensor) -> None:
        """Add a pair of equal shape."""
        self.into.append(into)
        self.out_of.append(out_of)

    def run(self) -> None:
        """Copy all pairs."""
        if self.into:
            torch._foreach_copy_(self.into, self.out_of)

    @property
    def num_bytes(self) -> int:
        """Bytes that are written."""
        return sum(map(_num_bytes, self.into))


@dataclass(slots=True)
class _Round:
    """What one rank does between two waits: lists made once and looped over ever after."""

    before: Copies = field(default_factory=Copies)
    """Casts and packs what is sent."""
    sends: list[tuple[Tensor, int]] = field(default_factory=list)
    receives: list[tuple[Tensor, int]] = field(default_factory=list)
    after: Copies = field(default_factory=Copies)
    """Puts into place what could not be received there."""

    def start_receives(self) -> list[dist.Work | None]:
        return [dist.irecv(tensor, peer, tag=_TAG) for tensor, peer in self.receives]

    def start_sends(self) -> list[dist.Work | None]:
        return [dist.isend(tensor, peer, tag=_TAG) for tensor, peer in self.sends]

    def start_together(self) -> list[dist.Work | None]:
        """Start everything in one launch, as NCCL needs it: there single sends and receives wait for each other."""
        operations = [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in self.receives]
        operations += [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in self.sends]
        return list(dist.batch_isend_irecv(operations)) if operations else []


class DirectTransport:
    """Point-to-point messages on the default group, round by round.

    A large piece that is contiguous in the wire's dtype at both ends travels from storage into storage. Otherwise it is
    cast or copied through staging memory, once for all receivers of a round. Small pieces share one message per peer.
    """

    name = "direct"
    bytes_written = 0

    def __init__(
        self,
        rounds: Iterable[Sequence[Transfer]],
        kept: Iterable[Transfer],
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        *,
        rank: int,
        wire_dtype: torch.dtype,
        pack_below_bytes: int,
        device: torch.device,
        owned: Arena | None,
    ) -> None:
        """``kept`` stay on this rank; ``rounds`` hold this rank's other transfers, in the same order on all ranks.

        ``pack_below_bytes`` must be the same on all ranks, else messages would not match; ``owned`` is the memory of
        ``target`` if it may be released.
        """
        backend = backend_of(device)
        self._together = backend == "nccl"
        wire_device = torch.device("cpu") if backend == "gloo" else device  # gloo sends from host memory only
        self._outgoing, self._incoming = (Arena(wire_device, alignment_bytes=wire_dtype.itemsize) for _ in range(2))
        self._device, self._owned, self._released = device, owned, False
        binder = _RoundBinder(
            rank, source, target, wire_dtype, pack_below_bytes, wire_device, self._outgoing, self._incoming
        )
        self._kept = Copies()
        for transfer in kept:
            into = region_view(target[transfer.param], transfer.receiver_offset, transfer.shape)
            self._kept.add(into, region_view(source[transfer.param], transfer.sender_offset, transfer.shape))
        self._rounds = [binder.bind(transfers) for transfers in rounds]
        self.bytes_moved = sum(_num_bytes(tensor) for round_ in self._rounds for tensor, _ in round_.receives)
        self.staging_bytes = self._outgoing.num_bytes + self._incoming.num_bytes
        self._restore()

    @torch.no_grad()
    def run(self) -> float:
        """See `Transport.run`."""
        start = time.perf_counter()
        if self._released:
            self._restore()
        if not self._rounds:
            self._kept.run()
        for index, round_ in enumerate(self._rounds):
            if self._together:
                round_.before.run()
                pending = round_.start_together()
            else:  # receives are posted before anything is cast, so that no peer waits for our casting
                pending = round_.start_receives()
                round_.before.run()
                pending += round_.start_sends()
            if index == 0:
                self._kept.run()
            for work in pending:
                if work is not None:
                    work.wait()
            round_.after.run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # rare enough, and without it the time would be that of the launches
        return time.perf_counter() - start

    def release(self) -> None:
        """See `Transport.release`."""
        self._outgoing.release()
        self._incoming.release()
        if self._owned is not None:
            self._owned.release()
        self._released = True

    def _restore(self) -> None:
        for arena in (self._outgoing, self._incoming, self._owned):
            if arena is not None:
                arena.restore()
        self._released = False


class _RoundBinder:
    """Turns transfers into views and messages, on both sides alike: so messages match in size and order."""

    def __init__(
        self,
        rank: int,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        wire_dtype: torch.dtype,
        pack_below_bytes: int,
        wire_device: torch.device,
        outgoing: Arena,
        incoming: Arena,
    ) -> None:
        self._rank, self._source, self._target = rank, source, target
        self._dtype, self._pack_below_bytes, self._device = wire_dtype, pack_below_bytes, wire_device
        self._outgoing, self._incoming = outgoing, incoming

    def bind(self, transfers: Sequence[Transfer]) -> _Round:
        self._outgoing.rewind()
        self._incoming.rewind()
        round_ = _Round()
        staged: dict[tuple[object, ...], Tensor] = {}
        small_out: dict[int, list[Tensor]] = {}
        small_in: dict[int, list[Tensor]] = {}
        for transfer in transfers:
            is_small = math.prod(transfer.shape) * self._dtype.itemsize < self._pack_below_bytes
            if transfer.sender == self._rank:
                holder = self._source if transfer.hop == 0 else self._target
                view = region_view(holder[transfer.param], transfer.sender_offset, transfer.shape)
                if is_small:
                    small_out.setdefault(transfer.receiver, []).append(view)
                    continue
                key = (transfer.param, transfer.hop, transfer.sender_offset, transfer.shape)
                if key not in staged:
                    staged[key] = self._ready_to_send(view, round_)
                round_.sends.append((staged[key], transfer.receiver))
            else:
                view = region_view(self._target[transfer.param], transfer.receiver_offset, transfer.shape)
                if is_small:
                    small_in.setdefault(transfer.sender, []).append(view)
                else:
                    round_.receives.append((self._place_to_receive(view, round_), transfer.sender))
        for peer, views in sorted(small_out.items()):
            round_.sends.append((self._pack(views, round_.before, self._outgoing, sending=True), peer))
        for peer, views in sorted(small_in.items()):
            round_.receives.append((self._pack(views, round_.after, self._incoming, sending=False), peer))
        return round_

    def _ready_to_send(self, view: Tensor, round_: _Round) -> Tensor:
        if self._is_wire_ready(view):
            return view
        staging = self._outgoing.take(view.shape, self._dtype)
        round_.before.add(staging, view)
        return staging

    def _place_to_receive(self, view: Tensor, round_: _Round) -> Tensor:
        if self._is_wire_ready(view):
            return view
        staging = self._incoming.take(view.shape, self._dtype)
        round_.after.add(view, staging)
        return staging

    def _pack(self, views: list[Tensor], copies: Copies, arena: Arena, *, sending: bool) -> Tensor:
        message = arena.take((sum(view.numel() for view in views),), self._dtype)
        at = 0
        for view in views:
            part = message[at : at + view.numel()].view(view.shape)
            at += view.numel()
            copies.add(part, view) if sending else copies.add(view, part)
        return message

    def _is_wire_ready(self, view: Tensor) -> bool:
        return view.dtype == self._dtype and view.device.type == self._device.type and view.is_contiguous()


class PushTransport:
    """Every rank writes its pieces, cast, straight into the target's shards in shared memory: barrier, copy, barrier.

    Each distinct shard lies there once, however many ranks hold it; they must not write to it.
    """

    name = "push"
    staging_bytes = 0

    def __init__(
        self,
        segment: SharedSegment,
        copies: Copies,
        *,
        rank: int,
        ranks: Sequence[int],
        bytes_moved: int,
        deadline_s: float,
    ) -> None:
        """``copies`` lead from this rank's source tensors into ``segment``, which all of ``ranks`` have mapped."""
        index, names = ranks.index(rank), [f"rank {member}" for member in ranks]
        self._segment, self._copies = segment, copies
        self._barrier = FlagBarrier(segment, index, names, deadline_s=deadline_s)
        self._leaving = FlagBarrier(segment, index, names, deadline_s=deadline_s, channel=1)
        self._is_first = index == 0
        self._runs = self._discards_seen = self._shortages_seen = 0
        self.bytes_moved = bytes_moved
        self.bytes_written = copies.num_bytes

    @torch.no_grad()
    def run(self) -> float:
        """See `Transport.run`."""
        self._barrier.wait()  # nobody still reads the old weights
        start = time.perf_counter()
        if self._segment.words[DISCARDS] != self._discards_seen:
            self._reserve()
        self._copies.run()
        self._barrier.wait()
        self._runs += 1
        return time.perf_counter() - start

    def release(self) -> None:
        """See `Transport.release`. Memory goes back when all ranks have called this since the last run."""
        if self._leaving.arrive(self._runs):
            self._segment.discard()
            self._segment.words[DISCARDS] += 1

    def _reserve(self) -> None:
        """Have the pages again before anybody writes: a full tmpfs would kill the writer. All ranks raise alike."""
        if self._is_first:
            try:
                self._segment.reserve()
            except OSError:
                self._segment.words[SHORTAGES] += 1
        self._barrier.wait()
        if self._segment.words[SHORTAGES] != self._shortages_seen:
            self._shortages_seen = self._segment.words[SHORTAGES]
            raise ReallocError(
                f"{self._segment.handle.size / 1e6:.0f} MB of shared memory were released and are not to be had again; "
                "free memory, keep the target's storage between runs, or use transport='direct'"
            )
        self._discards_seen = self._segment.words[DISCARDS]


def region_view(tensor: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the box of ``tensor`` that begins at ``offset``; a view."""
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of ``shape``."""
    return tuple(math.prod(max(1, extent) for extent in shape[dim + 1 :]) for dim in range(len(shape)))


def backend_of(device: torch.device) -> str:
    """Return the default group's backend for tensors on ``device``, "none" in a process without a group."""
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
