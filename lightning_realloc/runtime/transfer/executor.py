"""How do a model's weights get from one layout into another, again and again?

A `Reallocation` plans once, makes sure that all ranks planned alike, chooses the transport and binds it to tensors that
stay where they are. Every later run loops over prepared lists. Who moves when is the strategy's business.
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
from lightning_realloc.runtime.transfer.shared_memory import SharedSegment, aligned, share_segment
from lightning_realloc.runtime.transfer.transport import (
    PACK_BELOW_BYTES,
    Arena,
    Copies,
    DirectTransport,
    PushTransport,
    Transport,
    region_view,
)

logger = logging.getLogger(__name__)

MAX_STAGING_BYTES = 32 << 20
"""How much memory the direct transport may use in each direction besides source and target: 64 MB, one bucket, in all.

Measured with 254M parameters over gloo, twice as much is no faster.
"""


@dataclass(frozen=True, slots=True)
class ReallocationReport:
    """What one run did, all ranks together but for the time."""

    bytes_moved: int
    """Bytes that reached a rank which did not hold them, counted from the messages or writes that were bound."""
    bytes_minimum: int
    """Bytes that the target's ranks need and do not hold: no plan can move less."""
    bytes_written: int
    """Bytes written into shared memory, 0 for the direct transport. What several ranks share is written once."""
    seconds: float
    """Wall time on this rank: from when all ranks have come (push), or from when this rank begins (direct)."""
    transport: str
    """What carried it: push or direct."""

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes moved per second, in units of 1e9."""
        return self.bytes_moved / self.seconds / 1e9 if self.seconds > 0 else 0.0


class Reallocation:
    """One model's way from one layout to another, to be run whenever the target must hold the source's values.

    Attributes:
        target_tensors: parameter name to local tensor on this rank, {} outside the target; the same objects over runs
            and releases. Read them only: where rank, region and dtype are the same a tensor is the *source's own*, and
            under the push transport other ranks of the host may share it.
        plan: this rank's share of what moves.
        transport: "push" or "direct", as chosen.
        staging_bytes: memory that this rank needs besides source and target.
        shared_bytes: of the target's memory in segments that ranks share, what falls on this rank when each distinct
            shard is divided equally among its holders; 0 under the direct transport and after `release`.
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
        """Plan and bind. Collective over all ranks of the default group, also those that neither side uses.

        ``source_tensors`` are this rank's local tensors, which must stay where they are; they are cast to ``dtype``.
        ``target_tensors``, given on every rank of the target or on none, are filled in place; shared memory cannot do
        that, so "auto" then means "direct". There, pieces below ``pack_below_bytes`` share messages. ``deadline_s``
        bounds the push transport's wait for a rank.

        Raises PlanError on every rank when ranks disagree or one of them got something wrong, and ReallocError on
        every rank when ``transport="push"`` cannot work here.
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
        self.transport, shelf, segment = _choose_transport(request, agreement, self.plan, publication)
        self._transport: Transport | None = None
        self._shared_bytes, self._released = shelf.bytes_of(rank, publication, request.dtype.itemsize), False
        self.target_tensors: dict[str, Tensor] = {}
        if segment is not None:
            self.target_tensors, self._transport = _bind_push(
                request, agreement, self.plan, publication, shelf, segment, deadline_s
            )
        elif rank in self.plan.ranks:
            self.target_tensors, self._transport = _bind_direct(request, agreement, self.plan)
        mine = (self._transport.bytes_moved, self._transport.bytes_written) if self._transport else (0, 0)
        shares = gather_objects(mine)
        self._bytes_moved, self._bytes_written = (sum(share[i] for share in shares) for i in range(2))
        self.staging_bytes = self._transport.staging_bytes if self._transport else 0

    @property
    def shared_bytes(self) -> int:
        """See the class."""
        return self._shared_bytes if self.transport == "push" and not self._released else 0

    def run(self) -> ReallocationReport:
        """Bring the source's values into ``target_tensors``. Collective over the ranks of source and target.

        Ranks outside return at once. After `release` this has the memory again first.
        """
        self._released = False
        seconds = self._transport.run() if self._transport else 0.0
        return ReallocationReport(
            self._bytes_moved, self.plan.bytes_minimum, self._bytes_written, seconds, self.transport
        )

    def release(self) -> None:
        """Give the target's memory and the staging memory back until the next `run`; waits for nobody.

        ``target_tensors`` stay bound but must not be read meanwhile. Those given by the caller and those that are the
        source's own keep their memory. Shared memory is returned once every rank of the run has called this.
        """
        self._released = True
        if self._transport is not None:
            self._transport.release()


@dataclass(frozen=True, slots=True)
class _Shelf:
    """Where in a segment every shared shard lies, the same on all ranks."""

    offsets: Mapping[int, int]
    """Shard index to byte offset; a shard that is aliased by all of its ranks is not there."""
    receivers: Mapping[int, tuple[int, ...]]
    """Shard index to the ranks that read it."""
    num_bytes: int

    @classmethod
    def arrange(cls, request: Request, agreement: Agreement, publication: PublicationPlan) -> _Shelf:
        aliased = {rank: agreement.aliased(request, rank) for rank in request.target.layout.ranks}
        offsets, receivers, end = {}, {}, 0
        for index, shard in enumerate(publication.shards):
            readers = tuple(rank for rank in shard.ranks if shard.param not in aliased[rank])
            if readers:
                offsets[index], receivers[index] = end, readers
                end += aligned(shard.numel * request.dtype.itemsize)
        return cls(offsets, receivers, end)

    def bytes_of(self, rank: int, publication: PublicationPlan, element_bytes: int) -> int:
        """Return a rank's part of the bytes, each shard's divided equally among its receivers."""
        mine = {index: len(ranks) for index, ranks in self.receivers.items() if rank in ranks}
        return sum(publication.shards[i].numel * element_bytes // sharers for i, sharers in mine.items())


def _choose_transport(
    request: Request, agreement: Agreement, plan: ReallocationPlan, publication: PublicationPlan
) -> tuple[str, _Shelf, SharedSegment | None]:
    """Return the transport's name and, for push, where the shards lie; the segment on its ranks only. Collective."""
    shelf, segment, reason = _Shelf({}, {}, 0), None, None
    if request.transport == "direct":
        reason = "it was asked for"
    elif agreement.target_is_given:
        reason = "the target's storage exists already"
    elif request.device.type != "cpu":
        reason = f"the tensors are on {request.device.type}"
    else:
        shelf = _Shelf.arrange(request, agreement, publication)
        if request.transport == "auto" and (len(plan.ranks) == 1 or not shelf.num_bytes):
            reason = "no rank needs anything from another"
        else:
            segment, reason = share_segment(shelf.num_bytes, members=plan.ranks)
    if reason is not None and request.transport == "push":
        raise ReallocError(f"transport='push' cannot work here: {reason}; use transport='auto' or 'direct'")
    if request.rank == plan.ranks[0]:
        choice = "push" if reason is None else f"direct, because {reason}"
        logger.info("%s -> %s goes by %s", request.source.layout, request.target.layout, choice)
    return ("push" if reason is None else "direct"), shelf, segment


def _bind_direct(
    request: Request, agreement: Agreement, plan: ReallocationPlan
) -> tuple[dict[str, Tensor], DirectTransport]:
    aliased = agreement.aliased(request, request.rank)
    arena = Arena(request.device)
    targets: dict[str, Tensor] = {}
    for name in request.target.names(request.rank):
        if request.target_tensors is not None:
            targets[name] = request.target_tensors[name]
        elif name in aliased:
            targets[name] = request.source_tensors[name]
        else:
            targets[name] = arena.take(request.target.local_shape(name, request.rank), request.dtype)
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
    shelf: _Shelf,
    segment: SharedSegment,
    deadline_s: float,
) -> tuple[dict[str, Tensor], PushTransport]:
    shards = {
        index: segment.tensor(offset, publication.shards[index].shape, request.dtype)
        for index, offset in shelf.offsets.items()
    }
    aliased = agreement.aliased(request, request.rank)
    copies, elements_moved = Copies(), 0
    for write in publication.writes:
        if write.shard in shards:
            copies.add(
                region_view(shards[write.shard], write.shard_offset, write.shape),
                region_view(request.source_tensors[write.param], write.writer_offset, write.shape),
            )
            elements_moved += write.numel * len(shelf.receivers[write.shard])
    # Every reader of a shard gets what is written into it, less what it held itself.
    elements_moved -= sum(t.numel for t in plan.transfers if t.sender == t.receiver and t.param not in aliased)
    indices = publication.shards_of(request.rank)
    targets = {
        name: request.source_tensors[name] if name in aliased else shards[indices[name]]
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
