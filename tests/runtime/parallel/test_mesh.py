from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import AXES, Layout
from lightning_realloc.runtime.parallel.mesh import MeshRegistry, forget_groups
from tests.workers import WorkerPool


def _groups_of(layout_text: str) -> dict[str, object]:
    meshes = MeshRegistry("cpu")
    layout = Layout.parse(layout_text)
    meshes.create([layout])
    ranks: dict[str, object] = {}
    for axes in (("tp",), ("fsdp",), ("dp", "fsdp"), AXES):
        group = meshes.group(layout, *axes)
        ranks[".".join(axes)] = None if group is None else dist.get_process_group_ranks(group)
    assert meshes.tensor_group(layout) is meshes.group(layout, "tp")
    assert meshes.batch_group(layout) is meshes.group(layout, "dp", "fsdp")
    mesh = meshes.fsdp_mesh(layout)
    gathered = torch.empty(mesh.size(-1), dtype=torch.int64)
    dist.all_gather_into_tensor(gathered, torch.tensor([dist.get_rank()]), group=mesh.get_group(mesh.ndim - 1))
    ranks["mesh"], ranks["names"], ranks["gathered"] = mesh.mesh.tolist(), mesh.mesh_dim_names, gathered.tolist()
    ranks["cached"] = meshes.fsdp_mesh(layout) is mesh
    return ranks


def test_groups_and_meshes_keep_the_order_of_the_layout(workers: WorkerPool) -> None:
    # (fsdp, tp) coordinates: rank 3 at (0, 0), 1 at (0, 1), 2 at (1, 0), 0 at (1, 1).
    third = workers.run(_groups_of, "fsdp2.tp2@3,1,2,0")[3]

    assert third["tp"] == [3, 1]
    assert third["fsdp"] == third["dp.fsdp"] == third["mesh"] == third["gathered"] == [3, 2]
    assert third[".".join(AXES)] == [3, 1, 2, 0]
    assert third["names"] == ("fsdp.cp",)
    assert third["cached"]


def test_replicated_shards_get_a_mesh_of_two_dims(workers: WorkerPool) -> None:
    replicas_of_shards, replicas_only = (
        workers.run(_groups_of, "dp2.fsdp2@1,0,3,2")[2],
        workers.run(_groups_of, "dp4")[2],
    )

    assert replicas_of_shards["mesh"] == [[1, 0], [3, 2]]
    assert replicas_of_shards["gathered"] == [3, 2]
    assert replicas_of_shards["names"] == ("dp", "fsdp.cp")
    assert replicas_of_shards["tp"] is None
    assert replicas_only["mesh"] == [[0], [1], [2], [3]]
    assert replicas_only["gathered"] == [2]


def _many_layouts() -> tuple[bool, bool, int, float | None]:
    meshes = MeshRegistry("cpu")
    left, right, whole = Layout.parse("tp2@0,1"), Layout.parse("fsdp2@2,3"), Layout.parse("dp2.tp2@0-3")
    meshes.create([left, right])
    before = meshes.group(left, "tp") if dist.get_rank() in left else None
    meshes.create([whole, right, left])  # creates only new groups, in the same order on every rank
    mine = left if dist.get_rank() in left else right
    group = meshes.group(mine, *AXES)
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=group)  # the two halves run at once
    same = before is None or (meshes.group(left, "tp") is before and meshes.group(whole, "tp") is before)
    return same, meshes.group(whole, *AXES) is dist.group.WORLD, len(meshes._groups), total.item()


def test_every_group_is_made_once_and_subsets_work_in_parallel(workers: WorkerPool) -> None:
    answers = workers.run(_many_layouts)

    assert all(same and is_world for same, is_world, _, _ in answers)
    # (0, 1) and (2, 3) serve both; dp2.tp2 adds (0, 2) and (1, 3), the world, and four groups of one rank for "fsdp".
    assert {count for _, _, count, _ in answers} == {9}
    assert [total for *_, total in answers] == [1.0, 1.0, 5.0, 5.0]


def _groups_of_one_rank_of_many(num_ranks: int) -> tuple[int, int, int]:
    """Return the groups that a rank of a world without peers is in, has made, and has counted."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=num_ranks, store=FakeStore())
    try:
        meshes = MeshRegistry("cpu")
        texts = (f"dp{num_ranks // 64}.fsdp64", f"dp{num_ranks // 4}.tp4", f"pp2.dp{num_ranks // 2}", f"dp{num_ranks}")
        meshes.create([Layout.parse(text) for text in texts])
        made = dist.distributed_c10d._world.pg_names
        return sum(group is not None for group in meshes._groups.values()), len(made), len(meshes._groups)
    finally:
        dist.destroy_process_group()


def test_a_rank_of_thousands_makes_only_its_own_groups(workers: WorkerPool) -> None:
    ((own, made, known),) = workers.run(_groups_of_one_rank_of_many, 4096, world_size=1, init_process_group=False)

    # fsdp 64, dp 64, tp 4, dp 1,024, pp 2, dp 2,048, and the one of rank 5 alone that FSDP's mesh needs; and the world.
    assert own == made == 8
    # 64 + 64, 1,024 + 4, 2,048 + 2, 4,096 groups of one rank, and the world.
    assert known == 7303


def _groups_that_ranks_lost() -> tuple[int, int]:
    meshes, layout = MeshRegistry("cpu"), Layout.parse("dp2.tp2")
    meshes.create([layout])
    if dist.get_rank() == 2:
        forget_groups()  # as after an exception on this rank alone
    again = MeshRegistry("cpu")
    again.create([layout])
    total = torch.ones(1)
    dist.all_reduce(total, group=again.group(layout, "tp"))
    return again.group(layout, "tp") is meshes.group(layout, "tp"), total.item()


def test_groups_that_one_rank_lost_are_made_anew_on_all(workers: WorkerPool) -> None:
    assert workers.run(_groups_that_ranks_lost) == [(False, 2.0)] * 4


def _misuse() -> list[str]:
    meshes = MeshRegistry("cpu")
    known, unknown, elsewhere = Layout.parse("tp2@0,1"), Layout.parse("tp2@1,0"), Layout.parse("tp1@1")
    meshes.create([known])
    messages = []
    for action in (
        lambda: meshes.group(unknown, "tp"),
        lambda: meshes.fsdp_mesh(known),
        lambda: meshes.group(elsewhere if dist.get_rank() == 0 else Layout.parse("tp1@0"), "tp"),
    ):
        with pytest.raises(LayoutError) as error:
            action()
        messages.append(str(error.value))
    return messages


def test_the_error_of_a_missing_group_names_the_way_out(workers: WorkerPool) -> None:
    unknown, nothing_to_shard, outside = workers.run(_misuse, world_size=2)[0]

    assert "call MeshRegistry.create with every layout on all ranks first" in unknown
    assert "nothing to shard" in nothing_to_shard
    assert "rank 0 is not part of layout" in outside
