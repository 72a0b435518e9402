"""Prove after a reallocation that each rank holds the source's weights.

Every rank takes checksums of the boxes that it holds under the source, from its live weights, and sends them to the
ranks that need these boxes under the target. A receiving rank adds them up and compares them with checksums of its own
target tensors. The way of the weights themselves plays no part: they may have gone through shared memory, messages or
other ranks. The version of the weights goes with the checksums.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_realloc.errors import WeightMismatch, counted
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.realloc.families import Cell, Family, TargetShard, match_families
from lightning_realloc.realloc.plan import ReallocationPlan
from lightning_realloc.runtime.transfer.checksums import BoxFamily, Checksums, HeldBox, samples_per_box
from lightning_realloc.runtime.transfer.point_to_point import default_backend, exchange

_NUM_STAMPS = 2
"""Numbers before the checksums of a message: the version, and the runs of the reallocation."""


class CheckCount(NamedTuple):
    """Extent of one check on this rank."""

    num_tensors: int
    """Tensors that this rank compared."""
    seconds: float


class WeightSubject(NamedTuple):
    """Weights under check, as errors name them."""

    role: str
    source: Layout
    target: Layout
    rank: int
    way: str
    """Transport of the weights."""

    def mismatch(self, version: int, names: Sequence[str]) -> WeightMismatch:
        """Return the error of parameters that differ."""
        others = f", and so do {counted(len(names) - 1, 'other parameter')}" if len(names) > 1 else ""
        return self._error(f"{names[0]!r} differs from the source's{others}", version)

    def stale(self, version: int, theirs: int) -> WeightMismatch:
        """Return the error of another rank's stamp that differs."""
        return self._error(f"a source rank sent version {theirs}", version)

    def _error(self, fault: str, version: int) -> WeightMismatch:
        return WeightMismatch(
            f"rank {self.rank} does not hold version {version} of the weights of {self.role}: after they moved from "
            f"{self.source} to {self.target} ({self.way}), {fault}. Nothing was computed with them. Resume from the "
            f"last checkpoint, {_way_out(self.way)}, and report this message if it comes again; "
            "verify_weights='all' compares every element"
        )


class WeightCheck:
    """The check of one reallocation, which every rank of the source and the target has.

    Args:
        plan: The reallocation.
        source: Parameter name -> this rank's tensor under the source.
        target: Parameter name -> this rank's tensor under the target.
        aliased: Parameters whose target tensor is the source tensor, and is not compared.
        dtype: Dtype of the target's tensors.
        is_sampled: Whether a few elements of each tensor are compared, or all of them.
    """

    def __init__(
        self,
        plan: ReallocationPlan,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        aliased: Collection[str],
        *,
        subject: WeightSubject,
        dtype: torch.dtype,
        device: torch.device,
        is_sampled: bool,
    ) -> None:
        self._subject, self._device = subject, device
        self._num_runs = 0
        pieces = _Pieces(match_families(plan.source, plan.target), plan.source, subject.rank, dict(plan.nodes))
        self._names = pieces.received_names()
        compared = [name not in aliased for name in self._names]
        self._compared = torch.tensor(compared, dtype=torch.bool, device=device)
        self.num_tensors = sum(compared)
        """Tensors that this rank compares."""
        given, sent = pieces.given(are_own_needed=any(compared))
        self._sent = {peer: places.to(device) for peer, places in sent.items()}
        self._given = Checksums(given, source, dtype=dtype, is_sampled=is_sampled)
        self._held = Checksums(pieces.held(), target, dtype=dtype, is_sampled=is_sampled)
        self._received = {peer: places.to(device) for peer, places in pieces.received().items()}

    def run(self, version: int) -> CheckCount:
        """Compare this rank's target tensors with the source. Every rank calls it right after the weights moved.

        Raises:
            WeightMismatch: for a parameter that differs, or if another rank sent another version.
        """
        start = time.perf_counter()
        self.compare(version, self._exchange(self.messages(version)))
        return CheckCount(self.num_tensors, time.perf_counter() - start)

    def messages(self, version: int) -> dict[int, Tensor]:
        """Return rank -> version and checksums that it needs of this rank's source tensors, this rank included."""
        self._num_runs += 1
        stamps = torch.tensor([version, self._num_runs], device=self._device)
        given = self._given.compute(self._num_runs)
        return {peer: torch.cat([stamps, given[places]]) for peer, places in self._sent.items()}

    def compare(self, version: int, arrived: Mapping[int, Tensor]) -> None:
        """Compare this rank's target tensors with the messages of the ranks that sent one, this rank included.

        Raises:
            WeightMismatch: see `run`.
        """
        expected = torch.zeros(len(self._names), dtype=torch.int64, device=self._device)
        for sender, message in arrived.items():
            theirs, num_runs = message[:_NUM_STAMPS].tolist()
            if (theirs, num_runs) != (version, self._num_runs):
                raise self._subject.stale(version, theirs)
            expected.index_add_(0, self._received[sender], message[_NUM_STAMPS:])
        if not self.num_tensors:
            return
        differs = (expected != self._held.compute(self._num_runs)) & self._compared
        if differs.any():
            names = [name for name, is_wrong in zip(self._names, differs.tolist(), strict=True) if is_wrong]
            raise self._subject.mismatch(version, names)

    def _exchange(self, outgoing: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send messages to their ranks, and return those for this rank."""
        rank = self._subject.rank
        own = {rank: outgoing.pop(rank)} if rank in outgoing else {}
        wire = torch.device("cpu") if default_backend(self._device) == "gloo" else self._device
        incoming = {
            peer: torch.zeros(_NUM_STAMPS + len(places), dtype=torch.int64, device=wire)
            for peer, places in self._received.items()
            if peer != rank
        }
        exchange({peer: message.to(wire) for peer, message in outgoing.items()}, incoming, self._device)
        return own | {peer: message.to(self._device) for peer, message in incoming.items()}


class _Pieces:
    """Boxes whose checksums a rank gives and receives, worked out alike on every rank."""

    def __init__(self, families: Sequence[Family], source: ModelLayout, rank: int, node_of: Mapping[int, int]) -> None:
        self._families, self._source, self._rank, self._node_of = families, source, rank, node_of

    def given(self, *, are_own_needed: bool) -> tuple[list[BoxFamily], dict[int, Tensor]]:
        """Return the boxes of this rank's source tensors, and rank -> places of its checksums among theirs."""
        found, sent, start = list[BoxFamily](), dict[int, list[Tensor]](), 0
        for family in self._families:
            columns: dict[tuple[object, ...], int] = {}
            boxes: list[HeldBox] = []
            receivers: list[tuple[int, int]] = []
            for shard in family.shards:
                mine = [cell for cell in shard.cells if self._rank in cell.holders]
                for receiver in shard.ranks if mine else ():
                    cells = tuple(cell for cell in mine if self._owner(cell, receiver) == self._rank)
                    if not cells or (receiver == self._rank and not are_own_needed):
                        continue
                    key = (shard.shape, cells)
                    if key not in columns:  # ranks with equal shards receive equal checksums
                        columns[key] = len(columns)
                        held = self._source.local_shape(family.names[0], self._rank)
                        boxes += [_box(cell, shard, cell.source_offset, held, columns[key]) for cell in cells]
                    receivers.append((receiver, columns[key]))
            if boxes:
                places = torch.arange(len(family.names) * len(columns)).view(-1, len(columns)) + start
                start += places.numel()
                found.append(BoxFamily(family.names, tuple(boxes)))
                for receiver, column in receivers:
                    sent.setdefault(receiver, []).append(places[:, column])
        return found, {receiver: torch.cat(parts) for receiver, parts in sent.items()}

    def held(self) -> list[BoxFamily]:
        """Return the boxes of this rank's target tensors."""
        return [
            BoxFamily(
                family.names,
                tuple(_box(cell, shard, cell.target_offset, shard.shape, 0) for cell in shard.cells),
            )
            for family, shard in self._own_shards()
        ]

    def received_names(self) -> tuple[str, ...]:
        """Return the parameters of `held`, in its order."""
        return tuple(name for family, _ in self._own_shards() for name in family.names)

    def received(self) -> dict[int, Tensor]:
        """Return rank -> places of its checksums, as it sends them, among `received_names`."""
        found, start = dict[int, list[Tensor]](), 0
        for family, shard in self._own_shards():
            places = torch.arange(len(family.names)) + start
            start += len(places)
            for sender in dict.fromkeys(self._owner(cell, self._rank) for cell in shard.cells):
                found.setdefault(sender, []).append(places)
        return {sender: torch.cat(parts) for sender, parts in sorted(found.items())}

    def _own_shards(self) -> Iterable[tuple[Family, TargetShard]]:
        for family in self._families:
            for shard in family.shards:
                if self._rank in shard.ranks and shard.cells:
                    yield family, shard

    def _owner(self, cell: Cell, receiver: int) -> int:
        """Return the rank that gives a receiver the checksum of a cell: itself if it holds it, else a near holder."""
        if receiver in cell.holders:
            return receiver
        near = [rank for rank in cell.holders if self._node_of[rank] == self._node_of[receiver]]
        holders = near or cell.holders
        return holders[receiver % len(holders)]


def _box(
    cell: Cell, shard: TargetShard, held_offset: tuple[int, ...], held_shape: tuple[int, ...], column: int
) -> HeldBox:
    count = samples_per_box(len(shard.cells))
    return HeldBox(cell.shape, held_offset, held_shape, cell.target_offset, shard.shape, count, column)


def _way_out(way: str) -> str:
    return "with transport='direct'" if way == "push" else "with another plan or transport"
