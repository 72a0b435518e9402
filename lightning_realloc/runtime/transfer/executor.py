"""Execute the reallocation of a model's weights between two layouts, repeatedly.

A `Reallocation` plans once, checks that all ranks have the same plan, chooses the transport and binds it to tensors
with fixed storage. Every run loops over prepared lists. The strategy decides when to run it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_realloc.errors import ReallocError
from lightning_realloc.layout import ClusterSpec, ModelLayout
from lightning_realloc.realloc.plan import ReallocationPlan
from lightning_realloc.realloc.publication import PublicationPlan
from lightning_realloc.realloc.schedule import schedule_transfers
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.transfer.agreement import (
    Agreement,
    Request,
    TransportName,
    agree_on_plan,
    agree_on_request,
)
from lightning_realloc.runtime.transfer.shared_memory import SharedSegment, align_up, share_segment
from lightning_realloc.runtime.transfer.transport import (
    PACK_BELOW_BYTES,
    Arena,
    CopyList,
    DirectTransport,
    PushTransport,
    Transport,
    region_view,
)

logger = logging.getLogger(__name__)

MAX_STAGING_BYTES = 32 << 20
"""Staging memory of the direct transport in each direction, in bytes; both together are one bucket of 64 MB.

Measured with 254M parameters over gloo, twice as much is no faster.
"""


@dataclass(frozen=True, slots=True)
class ReallocationReport:
    """Bytes and seconds of one run. Bytes are totals over all ranks."""

    bytes_moved: int
    """Bytes that reached a rank that did not hold them, counted from the bound messages or writes."""
    bytes_minimum: int
    """Bytes that the target's ranks need and do not hold. No plan can move less."""
    bytes_written: int
    """Bytes written into shared memory; 0 for the direct transport. Shards that several ranks share count once."""
    seconds: float
    """Wall time on this rank: since all ranks have started (push), or since this rank has started (direct)."""
    transport: str
    """Transport of the run: "push" or "direct"."""

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes moved per second, in units of 1e9."""
        return self.bytes_moved / self.seconds / 1e9 if self.seconds > 0 else 0.0


class Reallocation:
    """Copies one model's weights from one layout to another; `run` it when the target needs the source's values.

    Attributes:
        target_tensors: Parameter name -> local tensor on this rank, {} outside the target. The objects stay the same
            over runs and releases. Do not write to them. If rank, region and dtype are equal, a tensor is the *source
            tensor itself*. Under the push transport, other ranks of the host may share it.
        plan: The plan with this rank's transfers.
        transport: The chosen transport, "push" or "direct".
        staging_bytes: Memory that this rank needs in addition to source and target.
        shared_bytes: This rank's part of the target's shared memory, with each distinct shard divided equally among
            its holders. 0 under the direct transport and after `release`.
    """

    def __init__(
        self,
        source: ModelLayout,
        source_tensors: Mapping[str, Tensor],
        target: ModelLayout,
        *,
        rank: int,
        world_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        cluster: ClusterSpec | None = None,
        transport: TransportName = "auto",
        target_tensors: Mapping[str, Tensor] | None = None,
        max_staging_bytes: int = MAX_STAGING_BYTES,
        pack_below_bytes: int = PACK_BELOW_BYTES,
        deadline_s: float = 1800.0,
    ) -> None:
        """Plan and bind. Collective over all ranks of the default group, including those outside both layouts.

        Args:
            source_tensors: This rank's local tensors, whose storage must not change. They are cast to ``dtype``.
            target_tensors: Tensors to fill in place, given on every rank of the target or on none. Shared memory
                cannot fill them, so "auto" then means "direct".
            pack_below_bytes: Pieces below this size share messages (direct transport).
            deadline_s: Longest wait for another rank, in seconds (push transport).

        Raises:
            PlanError: on every rank, if ranks disagree or one made an invalid request.
            ReallocError: on every rank, if ``transport="push"`` cannot work here.
        """
        request = Request(
            source=source,
            source_tensors={name: tensor.detach() for name, tensor in source_tensors.items()},
            target=target,
            target_tensors=target_tensors and {name: tensor.detach() for name, tensor in target_tensors.items()},
            rank=rank,
            dtype=dtype,
            device=torch.device(device),
            transport=transport,
            max_staging_bytes=max_staging_bytes,
            pack_below_bytes=pack_below_bytes,
            cluster=cluster,
        )
        agreement = agree_on_request(request, world_size)
        self.plan, publication = agree_on_plan(request, agreement.wire_dtype.itemsize)
        self.transport, shards, segment = _choose_transport(request, agreement, self.plan, publication)
        self._transport: Transport | None = None
        self._shared_bytes = shards.bytes_on(rank, publication, request.dtype.itemsize)
        self._is_released = False
        self.target_tensors: dict[str, Tensor] = {}
        if segment is not None:
            self.target_tensors, self._transport = _bind_push(
                request, agreement, self.plan, publication, shards, segment, deadline_s
            )
        elif rank in self.plan.ranks:
            self.target_tensors, self._transport = _bind_direct(request, agreement, self.plan)
        local = (self._transport.bytes_moved, self._transport.bytes_written) if self._transport else (0, 0)
        by_rank = gather_objects(local)
        self._bytes_moved, self._bytes_written = (sum(counts[i] for counts in by_rank) for i in range(2))
        self.staging_bytes = self._transport.staging_bytes if self._transport else 0

    @property
    def shared_bytes(self) -> int:
        """See the class."""
        return self._shared_bytes if self.transport == "push" and not self._is_released else 0

    def run(self) -> ReallocationReport:
        """Copy the source's values into ``target_tensors``. Collective over the ranks of source and target.

        Other ranks return immediately. After `release`, the memory is allocated again first.
        """
        self._is_released = False
        seconds = self._transport.run() if self._transport else 0.0
        return ReallocationReport(
            self._bytes_moved, self.plan.bytes_minimum, self._bytes_written, seconds, self.transport
        )

    def release(self) -> None:
        """Free the target's memory and the staging memory until the next `run`. Not collective.

        ``target_tensors`` stay bound but must not be read meanwhile. Tensors given by the caller and source tensors
        keep their memory. Shared memory is freed once every rank of the run has called this.
        """
        self._is_released = True
        if self._transport is not None:
            self._transport.release()


@dataclass(frozen=True, slots=True)
class _SharedShards:
    """Offsets of the shared shards in a segment, the same on all ranks."""

    offsets: Mapping[int, int]
    """Shard index -> byte offset. Shards that all of their ranks alias are not stored."""
    receivers: Mapping[int, tuple[int, ...]]
    """Shard index -> ranks that read the shard."""
    num_bytes: int
    """Size of the segment."""

    @classmethod
    def from_publication(cls, request: Request, agreement: Agreement, publication: PublicationPlan) -> _SharedShards:
        aliased = {rank: agreement.aliased_names(request, rank) for rank in request.target.layout.ranks}
        offsets, receivers, end = {}, {}, 0
        for index, shard in enumerate(publication.shards):
            readers = tuple(rank for rank in shard.ranks if shard.param not in aliased[rank])
            if readers:
                offsets[index], receivers[index] = end, readers
                end += align_up(shard.numel * request.dtype.itemsize)
        return cls(offsets, receivers, end)

    def bytes_on(self, rank: int, publication: PublicationPlan, element_bytes: int) -> int:
        """Return a rank's part of the bytes, with each shard divided equally among its receivers."""
        num_receivers = {index: len(ranks) for index, ranks in self.receivers.items() if rank in ranks}
        return sum(publication.shards[i].numel * element_bytes // count for i, count in num_receivers.items())


def _choose_transport(
    request: Request, agreement: Agreement, plan: ReallocationPlan, publication: PublicationPlan
) -> tuple[str, _SharedShards, SharedSegment | None]:
    """Return the transport and, for push, the shared shards and (on ranks that map it) the segment. Collective."""
    shards, segment, reason = _SharedShards({}, {}, 0), None, None
    if request.transport == "direct":
        reason = "it was requested"
    elif agreement.has_given_target:
        reason = "the target's storage exists already"
    elif request.device.type != "cpu":
        reason = f"the tensors are on {request.device.type}"
    else:
        shards = _SharedShards.from_publication(request, agreement, publication)
        if request.transport == "auto" and (len(plan.ranks) == 1 or not shards.num_bytes):
            reason = "no rank needs anything from another"
        else:
            segment, reason = share_segment(shards.num_bytes, members=plan.ranks)
    if reason is not None and request.transport == "push":
        raise ReallocError(f"transport='push' cannot work here: {reason}; use transport='auto' or 'direct'")
    if request.rank == plan.ranks[0]:
        choice = "push" if reason is None else f"direct, because {reason}"
        logger.info("%s -> %s uses transport %s", request.source.layout, request.target.layout, choice)
    return ("push" if reason is None else "direct"), shards, segment


def _bind_direct(
    request: Request, agreement: Agreement, plan: ReallocationPlan
) -> tuple[dict[str, Tensor], DirectTransport]:
    aliased = agreement.aliased_names(request, request.rank)
    arena = Arena(request.device)
    targets: dict[str, Tensor] = {}
    for name in request.target.names(request.rank):
        if request.target_tensors is not None:
            targets[name] = request.target_tensors[name]
        elif name in aliased:
            targets[name] = request.source_tensors[name]
        else:
            targets[name] = arena.allocate(request.target.local_shape(name, request.rank), request.dtype)
    schedule = schedule_transfers(plan, max_staging_bytes=request.max_staging_bytes)
    transport = DirectTransport(
        schedule.rounds,
        [transfer for transfer in schedule.kept if transfer.param not in aliased],
        request.source_tensors,
        targets,
        rank=request.rank,
        wire_dtype=agreement.wire_dtype,
        pack_below_bytes=request.pack_below_bytes,
        device=request.device,
        owned=arena,
    )
    return targets, transport


def _bind_push(
    request: Request,
    agreement: Agreement,
    plan: ReallocationPlan,
    publication: PublicationPlan,
    shards: _SharedShards,
    segment: SharedSegment,
    deadline_s: float,
) -> tuple[dict[str, Tensor], PushTransport]:
    tensors = {
        index: segment.tensor(offset, publication.shards[index].shape, request.dtype)
        for index, offset in shards.offsets.items()
    }
    aliased = agreement.aliased_names(request, request.rank)
    copies, elements_moved = CopyList(), 0
    for write in publication.writes:
        if write.shard in tensors:
            copies.add(
                region_view(tensors[write.shard], write.shard_offset, write.shape),
                region_view(request.source_tensors[write.param], write.writer_offset, write.shape),
            )
            elements_moved += write.numel * len(shards.receivers[write.shard])
    # Every reader of a shard receives the written elements, except those that it held itself.
    elements_moved -= sum(t.numel for t in plan.transfers if t.sender == t.receiver and t.param not in aliased)
    indices = publication.shards_of(request.rank)
    targets = {
        name: request.source_tensors[name] if name in aliased else tensors[indices[name]]
        for name in request.target.names(request.rank)
    }
    transport = PushTransport(
        segment,
        copies,
        rank=request.rank,
        ranks=plan.ranks,
        bytes_moved=elements_moved * agreement.wire_dtype.itemsize,
        deadline_s=deadline_s,
    )
    return targets, transport
