"""Create the process groups of layouts, and the device meshes of FSDP.

All ranks create all groups here in one order, because groups created in different orders deadlock. Over gloo, a rank
outside a group only counts it, without a message: torch names groups by that count. The alternatives are in
docs/internals/reallocation.md. Groups of layouts live as long as the process and are reused by the next fit, because
every gloo group has three threads, and one wakes a hundred times a second. The host group is not reused: messages of
one fit must not reach another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import AXES, Layout
from lightning_realloc.runtime.messages.objects import gather_objects

_AXES_OF_EXPERTS = (Layout.expert_axes, Layout.expert_replica_axes, Layout.expert_shard_axes)
_AXES_OF_FSDP = (Layout.batch_axes, Layout.replica_axes, Layout.shard_axes)
_GROUPED_AXES = (*((axis,) for axis in AXES), *_AXES_OF_FSDP, *_AXES_OF_EXPERTS, AXES)
_Groups = dict[tuple[int, ...], dist.ProcessGroup | None]
_groups_by_world: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()
"""Default group -> ordered ranks -> group, without groups of all ranks. The key of the host group is ``_HOST``."""
_HOST: tuple[int, ...] = ()


def forget_groups() -> None:
    """Make the next fit create new groups, because a failed rank may have left some inside a collective."""
    _groups_by_world.clear()


class MeshRegistry:
    """The process groups and meshes of all layouts in use. Each is created once."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.rank = dist.get_rank()
        self._groups: _Groups = {}
        self._meshes: dict[tuple[tuple[int, ...], ...], DeviceMesh] = {}

    def create(self, layouts: Iterable[Layout]) -> None:
        """Create the groups that these layouts need and that do not exist yet.

        Collective: every rank of the world calls it with the same layouts, including ranks outside the layouts.
        """
        wanted = {ranks for layout in layouts for ranks in rank_groups(layout)}
        everyone = tuple(range(dist.get_world_size()))
        if everyone in wanted:  # not cached by world: the cache would keep the default group alive
            self._groups[everyone] = dist.group.WORLD
        missing = sorted(wanted - self._groups.keys())
        if not missing:
            return
        existing = _common_groups()
        for ranks in missing:
            if ranks not in existing:
                # FSDP and the gathers here assume that a group has the layout's order.
                group = dist.new_group(list(ranks), sort_ranks=False)
                existing[ranks] = group if self.rank in ranks else None
            self._groups[ranks] = existing[ranks]

    def new_host_group(self) -> dist.ProcessGroup | None:
        """Return a new group of all ranks over gloo, for data in host memory; None for a single rank.

        Collective. Destroys the previous host group, in which no rank can still be waiting.
        """
        if dist.get_world_size() == 1:
            return None
        existing = _common_groups()
        before = existing.pop(_HOST, None)
        if before is not None:
            dist.destroy_process_group(before)
        existing[_HOST] = dist.new_group(backend="gloo")
        return existing[_HOST]

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The latest host group; only with several ranks, after `new_host_group`."""
        group = _common_groups()[_HOST]
        assert group is not None, "every rank is in it"
        return group

    def is_host_group(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether ``group`` is the latest host group, and so still usable. Collective."""
        return group is None or _common_groups().get(_HOST) is group

    def group(self, layout: Layout, *axes: str) -> dist.ProcessGroup | None:
        """Return this rank's group along ``axes``, in the layout's order; None if this rank is its only member.

        Raises LayoutError if this rank is not part of the layout, or if ``create`` was not called with the layout.
        """
        ranks = layout.group(self.rank, *axes)
        return None if len(ranks) == 1 else self._existing(ranks, layout)

    def batch_group(self, layout: Layout) -> dist.ProcessGroup | None:
        """Return the group of `Layout.batch_group`, as `group` does."""
        return self.group(layout, *layout.batch_axes)

    def tensor_group(self, layout: Layout) -> dist.ProcessGroup | None:
        """Return the group of `Layout.tensor_group`, as `group` does."""
        return self.group(layout, *layout.tensor_axes)

    def token_group(self, layout: Layout) -> dist.ProcessGroup | None:
        """Return the group along `Layout.token_axes`, as `group` does."""
        return self.group(layout, *layout.token_axes)

    def fsdp_mesh(self, layout: Layout) -> DeviceMesh:
        """Return the mesh over which FSDP shards this rank's stage and tensor-parallel slice of the model.

        Its dims are those of `Layout.shard_axes`, after those of `Layout.replica_axes` if shards are replicated. Raises
        LayoutError if there are neither shards nor replicas.
        """
        if not (layout.is_sharded or layout.has_replicas):
            raise LayoutError(f"layout {layout} has one copy of the weights and nothing to shard; do not wrap it")
        return self._mesh(layout, layout.replica_axes, layout.shard_axes)

    def expert_mesh(self, layout: Layout) -> DeviceMesh:
        """Return the mesh over which FSDP shards this rank's experts, as `fsdp_mesh` does; it may have one rank."""
        return self._mesh(layout, layout.expert_replica_axes, layout.expert_shard_axes)

    def _mesh(self, layout: Layout, replica_axes: tuple[str, ...], shard_axes: tuple[str, ...]) -> DeviceMesh:
        replicas = layout.group(self.rank, *replica_axes)
        rows = tuple(layout.group(rank, *shard_axes) for rank in replicas)
        if rows in self._meshes:
            return self._meshes[rows]
        names = ".".join(replica_axes), ".".join(shard_axes)
        shards = self._existing(layout.group(self.rank, *shard_axes), layout)
        if len(rows) == 1:
            mesh = DeviceMesh.from_group(shards, self.device_type, mesh_dim_names=names[1:])
        else:
            both = [self._existing(replicas, layout), shards]
            mesh = DeviceMesh.from_group(both, self.device_type, mesh=torch.tensor(rows), mesh_dim_names=names)
        self._meshes[rows] = mesh
        return mesh

    def _existing(self, ranks: tuple[int, ...], layout: Layout) -> dist.ProcessGroup:
        group = self._groups.get(ranks)
        if group is None:
            raise LayoutError(
                f"there is no process group for ranks {ranks} of layout {layout}; "
                "call MeshRegistry.create with every layout on all ranks first"
            )
        return group


def _common_groups() -> _Groups:
    """Return the existing groups; clear them if ranks do not have the same ones. Collective."""
    assert dist.group.WORLD is not None, "the default group is initialized"
    groups = _groups_by_world.setdefault(dist.group.WORLD, {})
    digest = hashlib.sha256(repr(sorted(groups)).encode()).digest()  # the keys grow with the number of ranks
    if any(theirs != digest for theirs in gather_objects(digest)):
        groups.clear()
    return groups


def rank_groups(layout: Layout) -> Iterable[tuple[int, ...]]:
    """Yield the ranks of every group that a layout needs; layouts share groups of the same ranks."""
    # For dp > 1 and fsdp = 1, FSDP's mesh has groups of one rank along "fsdp", and that of experts may have.
    of_one = [layout.shard_axes] * layout.has_replicas + [layout.expert_shard_axes] * (layout.dims.ep > 1)
    for axes in _GROUPED_AXES:
        for ranks in layout.groups(*axes):
            if len(ranks) > 1 or axes in of_one:
                yield ranks
