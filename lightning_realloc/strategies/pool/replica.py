"""Replicas: a role's weights in one layout, the modules that hold them, and the copy that fills them.

A copy moves frozen weights once, and trained weights every time. With adapters over a frozen base, a base of gigabytes
stays where it is and megabytes of adapters move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelLayout
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.model.choice_biases import choice_biases, copy_biases
from lightning_realloc.runtime.model.structure import tied_names
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.parallelize import (
    context_parallelize,
    divide_modules,
    parallelize,
)
from lightning_realloc.runtime.parallel.shards import (
    allocate_weights,
    bind_tensors,
    local_tensors,
    move_buffers,
    take_weights,
    weightless_copy,
)
from lightning_realloc.runtime.parallel.stage import cut_stage
from lightning_realloc.runtime.transfer.checksums import box_checksum
from lightning_realloc.runtime.transfer.executor import Reallocation, ReallocationReport
from lightning_realloc.runtime.transfer.weight_check import WeightSubject
from lightning_realloc.strategies.pool.pool_options import PoolOptions


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """The copies from a home replica to another one."""

    frozen: Reallocation | None
    """For frozen parameters; None if there are none."""
    trained: Reallocation | None
    """For all other parameters; None if there are none."""
    copy_buffers: Callable[[], None]
    """Copies the biases of routers, after training; collective over all ranks."""

    @property
    def _parts(self) -> tuple[Reallocation, ...]:
        return tuple(part for part in (self.frozen, self.trained) if part is not None)

    @property
    def target_tensors(self) -> dict[str, Tensor]:
        """Parameter name -> local tensor of the target replica on this rank; see `Reallocation`."""
        return {name: tensor for part in self._parts for name, tensor in part.target_tensors.items()}

    @property
    def is_shared(self) -> bool:
        """Whether ranks of a node may read the same memory."""
        return any(part.transport == "push" for part in self._parts)

    @property
    def shared_bytes(self) -> int:
        """This rank's share of the bytes in memory shared with other ranks."""
        return sum(part.shared_bytes for part in self._parts)

    def run(self, home: Replica, *, frozen: bool, trained: bool) -> ReallocationReport | None:
        """Copy frozen or trained weights or both; None if there are none. Collective over all ranks.

        Raises:
            WeightMismatch: if this rank does not hold the weights of ``home`` then.
        """
        if trained:
            self.copy_buffers()
        due = (
            self.frozen.run(home.frozen_version) if frozen and self.frozen else None,
            self.trained.run(home.version) if trained and self.trained else None,
        )
        return added_reports(due)

    def release(self) -> None:
        """Release the target replica's memory; see `Reallocation.release`."""
        for part in self._parts:
            part.release()


@dataclass(slots=True)
class Replica:
    """One role's weights in one layout, as this rank sees them."""

    role: str
    """The role whose weights these are."""
    model_layout: ModelLayout
    """Where every parameter lies."""
    model: nn.Module
    """The module; without weights on a rank outside the layout."""
    rank: int
    """This process."""
    weight_copy: WeightCopy | None = None
    """Fills this replica from the home replica; None for the home replica, and before the first use."""
    version: int = 0
    """Version of the home replica's weights that it holds; 0 before the first use."""
    frozen_version: int = 0
    """Version of the weights that training leaves unchanged; 0 before the first use."""

    def forget(self) -> None:
        """Mark all weights as stale."""
        self.version = self.frozen_version = 0

    def held_tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors, see `local_tensors`; {} outside the layout."""
        return local_tensors(self.model) if self.is_inside else {}

    @property
    def layout(self) -> Layout:
        """Parallel degrees and ranks."""
        return self.model_layout.layout

    @property
    def is_inside(self) -> bool:
        """Whether this rank is one of the layout's."""
        return self.rank in self.layout


def prepare_copy(
    role: str, blank: nn.Module, target: ModelLayout, meshes: MeshRegistry, options: PoolOptions
) -> nn.Module:
    """Return this rank's part of a role's model under ``target``, without weights and with its buffers.

    Only FSDP's shards have memory at once. Collective over the ranks of ``target``.
    """
    model = weightless_copy(blank).eval().requires_grad_(False)
    tp_plan = options.tp_plans.get(role)
    if options.facts.rank not in target.layout.ranks:
        return model
    if target.layout.is_sharded:
        take_weights(model, dict.fromkeys(tied_names(model), options.copy_dtype))
        parallelize(model, target, meshes, tp_plan=tp_plan)
        allocate_weights(model, options.facts.device)
        return model
    divide_modules(model, target.layout, meshes, tp_plan=tp_plan)
    context_parallelize(model, target, meshes)
    if target.layout.dims.pp > 1:
        cut_stage(model, target, options.facts.rank)
    move_buffers(model, options.facts.device)
    return model


def connect_copy(
    home: Replica, target: Replica, frozen: Set[str], options: PoolOptions, *, is_shared: bool = True
) -> WeightCopy:
    """Prepare the copy that fills a replica from the home replica, and bind the replica's module to its memory.

    Collective over all ranks.

    Args:
        frozen: Parameters that training leaves unchanged, the same on all ranks.
        is_shared: Whether ranks of a node may read the same memory.
    """
    uses_storage = target.layout.is_sharded
    held, existing = home.held_tensors(), target.held_tensors() if uses_storage else {}

    def reallocation(chosen: Set[str]) -> Reallocation | None:
        if not chosen:
            return None
        source, there = home.model_layout.subset(chosen), target.model_layout.subset(chosen)
        sent = {name: tensor for name, tensor in held.items() if name in chosen}
        if not uses_storage:
            return options.reallocation(source, sent, there, role=home.role, transport=None if is_shared else "direct")
        # FSDP allocated its shards itself; they are filled in place, which shared memory cannot do.
        room = {name: existing[name] for name in there.names(target.rank)}
        return options.reallocation(source, sent, there, role=home.role, transport="direct", target_tensors=room)

    others = {param.name for param in home.model_layout.model.params} - frozen

    def copy_buffers() -> None:
        sync_biases(home, options)
        copy_biases(home.model, target.model)
        prove_biases(home, target, options)

    weight_copy = WeightCopy(reallocation(frozen), reallocation(others), copy_buffers)
    if target.is_inside and not uses_storage:
        bind_tensors(target.model, weight_copy.target_tensors)
    return weight_copy


def share_weights(home: Replica, target: Replica) -> None:
    """Bind a replica in the home layout to the home replica's storage."""
    if target.version == 0 and home.is_inside:
        bind_tensors(target.model, local_tensors(home.model))
    copy_biases(home.model, target.model)
    target.version, target.frozen_version = home.version, home.frozen_version


def sync_biases(home: Replica, options: PoolOptions) -> None:
    """Give ranks that do not train a role the biases of its routers, if training updates them. Collective."""
    if home.role not in options.biased or len(home.layout.ranks) == options.facts.world_size:
        return
    biases = choice_biases(home.model)
    trained = torch.stack(biases)
    dist.broadcast(trained, home.layout.ranks[0])
    torch._foreach_copy_(biases, list(trained))


def prove_biases(home: Replica, target: Replica, options: PoolOptions) -> None:
    """Compare the biases of a replica's routers with the home replica's, if training updates them. Collective.

    Raises:
        WeightMismatch: on every rank, if one has others.
    """
    if home.role not in options.biased or options.verify_weights == "off":
        return
    sums = [
        [int(box_checksum(bias, (0,), bias.shape)) for bias in choice_biases(replica.model)]
        for replica in (home, target)
    ]
    everyone = gather_objects(sums)
    right = everyone[home.layout.ranks[0]][0]
    for rank, (_, held) in enumerate(everyone):
        names = [
            f"router {number}'s bias" for number, pair in enumerate(zip(right, held, strict=True)) if len({*pair}) > 1
        ]
        if names:
            raise WeightSubject(home.role, home.layout, target.layout, rank, "broadcast").mismatch(home.version, names)


def undivided_like(blank: nn.Module, old: Replica) -> nn.Module:
    """Return an undivided model on the meta device. Collective if ``old`` is a pipeline.

    Args:
        old: The replica whose frozen parameters and training mode are taken over.
    """
    model = weightless_copy(blank)
    frozen = {name for name, parameter in old.model.named_parameters() if not parameter.requires_grad}
    if old.layout.dims.pp > 1:  # this rank may hold one stage of the old model
        frozen = set().union(*gather_objects(frozen))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model.train(old.model.training)


def refuse_thawed(role: str, model: nn.Module, frozen: Set[str]) -> None:
    """Refuse to train a parameter that was frozen when its role was laid out: other replicas would keep old values.

    Raises:
        PlanError: naming the first such parameter.
    """
    thawed = [name for name, p in model.named_parameters() if p.requires_grad and name in frozen] if frozen else []
    if thawed:
        raise PlanError(
            f"{role} parameter {thawed[0]} was frozen when {role} was laid out and is trained now; replicas in other "
            f"layouts would keep its old values; leave it trained in configure_model, and freeze it in on_train_start"
        )


def added_reports(reports: Iterable[ReallocationReport | None]) -> ReallocationReport | None:
    """Return the report of moves that ran one after the other; None if nothing moved."""
    moved = [report for report in reports if report is not None]
    return reduce(_added, moved) if moved else None


def _added(one: ReallocationReport, other: ReallocationReport) -> ReallocationReport:
    return ReallocationReport(
        bytes_moved=one.bytes_moved + other.bytes_moved,
        bytes_minimum=one.bytes_minimum + other.bytes_minimum,
        bytes_written=one.bytes_written + other.bytes_written,
        seconds=one.seconds + other.seconds,
        transport=one.transport if one.transport == other.transport else f"{one.transport}, {other.transport}",
        num_checked=one.num_checked + other.num_checked,
        check_s=one.check_s + other.check_s,
    )
