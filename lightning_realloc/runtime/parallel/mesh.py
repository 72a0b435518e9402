"""Make the process groups that a rank takes part in, and the device meshes of FSDP.

All groups are made in one place, on all ranks and in one order: groups made in different orders deadlock. Those of
layouts live as long as the process, and serve the next fit too: every group over gloo has three threads, one of which
wakes a hundred times a second. The host group is not shared: messages of one fit must not reach another.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import AXES, Coordinate, Layout
from lightning_realloc.runtime.messages.objects import gather_objects

_GROUPED_AXES = (("pp",), ("dp",), ("fsdp",), ("tp",), ("dp", "fsdp"), AXES)
_Groups = dict[tuple[int, ...], dist.ProcessGroup | None]
_made: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()
"""Groups of fewer than all ranks, by the group of all and by their ordered ranks; the host group by ``_HOST``."""
_HOST: tuple[int, ...] = ()


def forget_groups() -> None:
    """Let the next fit make its own groups: a rank that failed may have left some in the middle of a collective."""
    _made.clear()


class MeshRegistry:
    """The groups of every layout in use, each made once and kept by its ordered ranks."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.rank = dist.get_rank()
        self._groups: _Groups = {}
        self._meshes: dict[tuple[tuple[int, ...], ...], DeviceMesh] = {}

    def create(self, layouts: Iterable[Layout]) -> None:
        """Make the groups that these layouts need and that are not there yet.

        Collective: every rank of the world calls it with the same layouts, those outside them too.
        """
        wanted = {ranks for layout in layouts for ranks in _rank_groups(layout)}
        everyone = tuple(range(dist.get_world_size()))
        if everyone in wanted:  # not among those made here, which it would keep alive beyond its end
            self._groups[everyone] = dist.group.WORLD
        missing = sorted(wanted - self._groups.keys())
        if not missing:
            return
        made = _made_everywhere()
        for ranks in missing:
            if ranks not in made:
                made[ranks] = self._new_group(ranks)
            self._groups[ranks] = made[ranks]

    def new_host_group(self) -> dist.ProcessGroup | None:
        """Return a new group of all ranks over gloo, for data in host memory; None for a single rank.

        Ends the one before: once all ranks ask for another, none of them waits in it any more. Collective.
        """
        if dist.get_world_size() == 1:
            return None
        made = _made_everywhere()
        before = made.pop(_HOST, None)
        if before is not None:
            dist.destroy_process_group(before)
        made[_HOST] = dist.new_group(backend="gloo")
        return made[_HOST]

    def is_host_group(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether ``group`` is the latest host group, so that it can still be used. Collective."""
        return group is None or _made_everywhere().get(_HOST) is group

    def group(self, layout: Layout, *axes: str) -> dist.ProcessGroup | None:
        """Return this rank's group along ``axes``, its ranks in the layout's order; None when it is alone in it.

        Raises LayoutError when this rank is not part of the layout or ``create`` has not seen it.
        """
        ranks = layout.group(self.rank, *axes)
        return None if len(ranks) == 1 else self._existing(ranks, layout)

    def fsdp_mesh(self, layout: Layout) -> DeviceMesh:
        """Return the mesh over which FSDP shards this rank's share of the model.

        ("fsdp",), or ("dp", "fsdp") when the shards are replicated. Raises LayoutError when ``dp * fsdp`` is 1.
        """
        dims, at = layout.dims, layout.coordinate(self.rank)
        if layout.data_parallel_size == 1:
            raise LayoutError(f"layout {layout} has dp=1 and fsdp=1, so there is nothing to shard; do not wrap it")
        rows = tuple(
            tuple(layout.rank_at(Coordinate(at.pp, dp, fsdp, at.tp)) for fsdp in range(dims.fsdp))
            for dp in range(dims.dp)
        )
        if rows not in self._meshes:
            self._meshes[rows] = self._new_mesh(layout, rows)
        return self._meshes[rows]

    def _new_mesh(self, layout: Layout, rows: tuple[tuple[int, ...], ...]) -> DeviceMesh:
        shards = self._existing(layout.group(self.rank, "fsdp"), layout)
        if len(rows) == 1:
            return DeviceMesh.from_group(shards, self.device_type, mesh_dim_names=("fsdp",))
        replicas = self._existing(layout.group(self.rank, "dp"), layout)
        return DeviceMesh.from_group(
            [replicas, shards], self.device_type, mesh=torch.tensor(rows), mesh_dim_names=("dp", "fsdp")
        )

    def _existing(self, ranks: tuple[int, ...], layout: Layout) -> dist.ProcessGroup:
        group = self._groups.get(ranks)
        if group is None:
            raise LayoutError(
                f"there is no process group for ranks {ranks} of layout {layout}; "
                "call MeshRegistry.create with every layout on all ranks first"
            )
        return group

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if list(ranks) == sorted(ranks):
            group = dist.new_group(list(ranks))
        else:  # FSDP and our own gathers take a rank's place in its group for its place in the layout
            group = dist.new_group(list(ranks), sort_ranks=False)
        return group if self.rank in ranks else None


def _made_everywhere() -> _Groups:
    """Return the groups that all ranks have made already, or none, where some have forgotten theirs. Collective."""
    assert dist.group.WORLD is not None, "there are ranks"
    made = _made.setdefault(dist.group.WORLD, {})
    if any(known != sorted(made) for known in gather_objects(sorted(made))):
        made.clear()
    return made


def _rank_groups(layout: Layout) -> Iterable[tuple[int, ...]]:
    for axes in _GROUPED_AXES:
        for ranks in layout.groups(*axes):
            # FSDP's mesh of replicas only (dp > 1, fsdp = 1) has groups of one rank along "fsdp".
            if len(ranks) > 1 or (axes == ("fsdp",) and layout.dims.dp > 1):
                yield ranks
