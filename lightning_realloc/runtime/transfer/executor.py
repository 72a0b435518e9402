"""Execute the reallocation of a model's weights between two layouts, repeatedly.

A `Reallocation` plans once, checks that all ranks have the same plan, chooses the transport and binds it to tensors
with fixed storage. Every run loops over prepared lists. The strategy decides when to run it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lightning_realloc.errors import ReallocError
from lightning_realloc.layout import ClusterSpec, ModelLayout
from lightning_realloc.limits import MAX_STAGING_BYTES, PACK_BELOW_BYTES
from lightning_realloc.realloc.plan import ReallocationPlan, Transfer
from lightning_realloc.realloc.publication import PublicationPlan, plan_publication
from lightning_realloc.realloc.schedule import schedule_transfers
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.transfer.agreement import (
    Agreement,
    Request,
    TransportName,
    WeightVerification,
    agree_on_plan,
    agree_on_request,
)
from lightning_realloc.runtime.transfer.point_to_point import Arena, CopyList, Messages, region_view
from lightning_realloc.runtime.transfer.shared_memory import SharedSegment, align_up, share_segment
from lightning_realloc.runtime.transfer.transport import DirectTransport, PushTransport, Transport
from lightning_realloc.runtime.transfer.weight_check import CheckCount, WeightCheck, WeightSubject

logger = logging.getLogger(__name__)


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
    num_checked: int = 0
    """Tensors of this rank that were compared with the source's afterwards."""
    check_s: float = 0.0
    """Seconds of comparing them on this rank, which ``seconds`` leaves out."""


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
        verify_weights: WeightVerification = "sampled",
        role: str = "the model",
    ) -> None:
        """Plan and bind. Collective over all ranks of the default group, including those outside both layouts.

        Args:
            source_tensors: This rank's local tensors, whose storage must not change. They are cast to ``dtype``.
            target_tensors: Tensors to fill in place, given on every rank of the target or on none. Shared memory
                cannot fill them, so "auto" then means "direct".
            pack_below_bytes: Pieces below this size share messages (direct transport).
            deadline_s: Longest wait for another rank, in seconds (push transport).
            verify_weights: Elements that each run compares with the source's: "sampled" ones, "all" or none ("off").
            role: Name of the weights in errors.

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
            verify_weights=verify_weights,
            role=role,
        )
        agreement = agree_on_request(request, world_size)
        self.plan = agree_on_plan(request, agreement.wire_dtype.itemsize)
        bound = _bind(request, agreement, self.plan, deadline_s)
        self.transport, self.target_tensors, self._transport, self._shared_bytes = bound
        self._is_released = False
        check = _bind_check(request, agreement, self.plan, self.target_tensors, self.transport)
        local = (self._transport.bytes_moved, self._transport.bytes_written) if self._transport else (0, 0)
        by_rank = gather_objects((*local, check.num_tensors if check else 0))
        self._bytes_moved, self._bytes_written, num_checked = (sum(counts[i] for counts in by_rank) for i in range(3))
        self._check = check if num_checked else None
        self.staging_bytes = self._transport.staging_bytes if self._transport else 0

    @property
    def shared_bytes(self) -> int:
        """See the class."""
        return self._shared_bytes if self.transport == "push" and not self._is_released else 0

    def run(self, version: int = 0) -> ReallocationReport:
        """Copy the source's values into ``target_tensors``. Collective over the ranks of source and target.

        Other ranks return immediately. After `release`, the memory is allocated again first.

        Args:
            version: Version of the source's weights as this rank knows it.

        Raises:
            WeightMismatch: if this rank does not hold the source's weights afterwards.
        """
        self._is_released = False
        seconds = self._transport.run() if self._transport else 0.0
        checked = self._check.run(version) if self._check else CheckCount(0, 0.0)
        return ReallocationReport(
            self._bytes_moved, self.plan.bytes_minimum, self._bytes_written, seconds, self.transport, *checked
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
    """Shards in the segments of all nodes, the same on all ranks."""

    publication: PublicationPlan
    offsets: Mapping[int, int]
    """Shard index -> byte offset in its node's segment. Shards that all of their ranks alias are not stored."""
    receivers: Mapping[int, tuple[int, ...]]
    """Shard index -> ranks that read the shard."""
    num_bytes: Mapping[int, int]
    """Node -> size of its segment."""

    @classmethod
    def from_request(cls, request: Request, agreement: Agreement) -> _SharedShards:
        publication = plan_publication(
            request.source, request.target, request.cluster, element_bytes=request.dtype.itemsize, rank=request.rank
        )
        aliased = {rank: agreement.aliased_names(request, rank) for rank in request.target.layout.ranks}
        offsets, receivers, ends = {}, {}, dict[int, int]()
        for index, shard in enumerate(publication.shards):
            readers = tuple(rank for rank in shard.ranks if shard.param not in aliased[rank])
            if readers:
                offsets[index], receivers[index] = ends.get(shard.node, 0), readers
                ends[shard.node] = offsets[index] + align_up(shard.numel * request.dtype.itemsize)
        return cls(publication, offsets, receivers, ends)

    def bytes_on(self, rank: int) -> int:
        """Return a rank's part of the bytes, with each shard divided equally among its receivers."""
        num_receivers = {index: len(ranks) for index, ranks in self.receivers.items() if rank in ranks}
        shards, element_bytes = self.publication.shards, self.publication.element_bytes
        return sum(shards[index].numel * element_bytes // count for index, count in num_receivers.items())


def _bind(
    request: Request, agreement: Agreement, plan: ReallocationPlan, deadline_s: float
) -> tuple[str, dict[str, Tensor], Transport | None, int]:
    """Return the transport's name, the target's tensors, the transport, and this rank's part of shared bytes."""
    name, shards, segment = _choose_transport(request, agreement, plan)
    shared_bytes = 0 if shards is None else shards.bytes_on(request.rank)
    if shards is not None and segment is not None:
        return name, *_bind_push(request, agreement, plan, shards, segment, deadline_s), shared_bytes
    if request.rank in plan.ranks:
        return name, *_bind_direct(request, agreement, plan), shared_bytes
    return name, {}, None, shared_bytes


def _choose_transport(
    request: Request, agreement: Agreement, plan: ReallocationPlan
) -> tuple[str, _SharedShards | None, SharedSegment | None]:
    """Return the transport and, for push, the shared shards and (on ranks that map it) the segment. Collective."""
    shards, segment, reason = None, None, None
    if request.transport == "direct":
        reason = "it was requested"
    elif agreement.has_given_target:
        reason = "the target's storage exists already"
    elif request.device.type != "cpu":
        reason = f"the tensors are on {request.device.type}"
    else:
        shards, teams = _SharedShards.from_request(request, agreement), plan.ranks_by_node()
        if request.transport == "auto" and (max(map(len, teams.values())) == 1 or not shards.offsets):
            reason = "no rank needs anything from another one of its node"
        else:
            mine = [node for node, members in teams.items() if request.rank in members]  # none outside both layouts
            size, members = (shards.num_bytes.get(mine[0], 0), teams[mine[0]]) if mine else (0, ())
            segment, reason = share_segment(size, members=members)
    if reason is not None and request.transport == "push":
        raise ReallocError(f"transport='push' cannot work here: {reason}; use transport='auto' or 'direct'")
    if request.rank == plan.ranks[0]:
        choice = "push" if reason is None else f"direct, because {reason}"
        logger.info("%s -> %s uses transport %s", request.source.layout, request.target.layout, choice)
    return ("direct", None, None) if reason is not None else ("push", shards, segment)


def _bind_direct(
    request: Request, agreement: Agreement, plan: ReallocationPlan
) -> tuple[dict[str, Tensor], DirectTransport]:
    aliased = agreement.aliased_names(request, request.rank)
    arena = Arena(request.device)
    targets: dict[str, Tensor] = {}
    # Weights come before biases: those of queries, keys and values then lie next to each other, and multiply as one.
    shapes = {name: request.target.local_shape(name, request.rank) for name in request.target.names(request.rank)}
    for name in sorted(shapes, key=lambda name: len(shapes[name]) < 2):
        if request.target_tensors is not None:
            targets[name] = request.target_tensors[name]
        elif name in aliased:
            targets[name] = request.source_tensors[name]
        else:
            targets[name] = arena.allocate(shapes[name], request.dtype)
    schedule = schedule_transfers(plan, max_staging_bytes=request.max_staging_bytes)
    transport = DirectTransport(
        _bind_messages(request, agreement, schedule.rounds, targets),
        [transfer for transfer in schedule.kept if transfer.param not in aliased],
        request.source_tensors,
        targets,
        device=request.device,
        owned=arena,
    )
    return targets, transport


def _bind_check(
    request: Request, agreement: Agreement, plan: ReallocationPlan, targets: Mapping[str, Tensor], transport: str
) -> WeightCheck | None:
    if request.verify_weights == "off" or request.rank not in plan.ranks:
        return None
    subject = WeightSubject(request.role, request.source.layout, request.target.layout, request.rank, transport)
    return WeightCheck(
        plan,
        request.source_tensors,
        targets,
        agreement.aliased_names(request, request.rank) if targets else (),
        subject=subject,
        dtype=request.dtype,
        device=request.device,
        is_sampled=request.verify_weights == "sampled",
    )


def _bind_messages(
    request: Request, agreement: Agreement, rounds: Iterable[Sequence[Transfer]], targets: Mapping[str, Tensor]
) -> Messages:
    return Messages(
        rounds,
        request.source_tensors,
        targets,
        rank=request.rank,
        wire_dtype=agreement.wire_dtype,
        pack_below_bytes=request.pack_below_bytes,
        device=request.device,
    )


def _bind_push(
    request: Request,
    agreement: Agreement,
    plan: ReallocationPlan,
    shards: _SharedShards,
    segment: SharedSegment,
    deadline_s: float,
) -> tuple[dict[str, Tensor], PushTransport]:
    node_of, rank, publication = dict(plan.nodes), request.rank, shards.publication
    mine = [index for index in shards.offsets if publication.shards[index].node == node_of[rank]]
    tensors = {
        index: segment.tensor(shards.offsets[index], publication.shards[index].shape, request.dtype) for index in mine
    }
    aliased = agreement.aliased_names(request, rank)
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
    indices = publication.shards_of(rank)
    targets = {
        name: request.source_tensors[name] if name in aliased else tensors[indices[name]]
        for name in request.target.names(rank)
    }
    messages, forwards = None, CopyList()
    if len(set(node_of.values())) > 1:
        schedule = schedule_transfers(plan, max_staging_bytes=request.max_staging_bytes)
        rounds = [[t for t in each if node_of[t.sender] != node_of[t.receiver]] for each in schedule.rounds]
        messages = _bind_messages(request, agreement, rounds, targets)
        arrived = [transfer for each in rounds for transfer in each if transfer.receiver == rank]
        for transfer in _forwards(plan, publication, rank):
            held = publication.shards_of(transfer.sender)[transfer.param]
            forwards.add(
                region_view(targets[transfer.param], transfer.receiver_offset, transfer.shape),
                region_view(tensors[held], transfer.sender_offset, transfer.shape),
            )
            arrived.append(transfer)
        elements_moved += sum(t.numel * len(shards.receivers[indices[t.param]]) for t in arrived)
    transport = PushTransport(
        segment,
        copies,
        messages,
        forwards,
        rank=rank,
        ranks=plan.ranks_by_node()[node_of[rank]],
        bytes_moved=elements_moved * agreement.wire_dtype.itemsize,
        deadline_s=deadline_s,
    )
    return targets, transport


def _forwards(plan: ReallocationPlan, publication: PublicationPlan, rank: int) -> Iterator[Transfer]:
    """Yield the transfers of pieces that arrived for another shard of the node; its first reader copies them."""
    shards_of = cache(publication.shards_of)
    for transfer in plan.transfers:
        if transfer.hop == 1 and transfer.receiver == rank:
            shard = shards_of(rank)[transfer.param]
            is_first = publication.shards[shard].ranks[0] == rank
            if is_first and shard != shards_of(transfer.sender)[transfer.param]:
                yield transfer
