"""Shards equal those of fully_shard and DTensor; one process simulates every rank over torch's fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_realloc.layout import Layout, ModelLayout, ModelSpec, ParamSpec, TensorParallelCut, sharded

ODD_SHAPES = [(251, 6), (3, 5), (16, 7), (1, 4), (13,)]


@contextmanager
def playing(rank: int, world_size: int) -> Iterator[None]:
    """Initialize a process group in which this process is ``rank`` and no other process answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(layout: Layout, *axes: str) -> DeviceMesh:
    """Return the mesh of these axes; the layout has no others."""
    sizes = [getattr(layout.dims, axis) for axis in axes]
    return DeviceMesh("cpu", torch.tensor(layout.ranks).reshape(sizes), mesh_dim_names=axes, _rank=dist.get_rank())


def one_param(shape: tuple[int, ...], layout: Layout, cut: TensorParallelCut | None = None) -> ModelLayout:
    return ModelLayout(ModelSpec((ParamSpec("w", shape, sharded(cut), "output"),), 0), layout)


def assemble(layout: ModelLayout, rank: int, whole: Tensor) -> Tensor:
    """Return the local tensor that the pieces describe."""
    local = torch.full(layout.local_shape("w", rank), -1.0)
    for piece in layout.pieces("w", rank):
        source = whole[tuple(map(slice, piece.region.starts, piece.region.stops))]
        local[tuple(slice(at, at + n) for at, n in zip(piece.offset, piece.region.shape, strict=True))] = source
    return local


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def fsdp_local(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's local tensor of a parameter after ``fully_shard``."""
    module = nn.Module()
    module.weight = nn.Parameter(tensor.clone())
    fully_shard(module, mesh=mesh)
    assert isinstance(module.weight, DTensor)
    return module.weight.to_local().detach()


@pytest.mark.parametrize("text", ["fsdp4", "dp2.fsdp2", "dp2.fsdp3@1,3,5,0,2,4"])
def test_fsdp_and_hsdp_shards_are_those_of_fully_shard(text: str) -> None:
    layout = Layout.parse(text)
    axes = ("fsdp",) if layout.dims.dp == 1 else ("dp", "fsdp")
    for rank in layout.ranks:
        with playing(rank, len(layout.ranks)):
            for shape in ODD_SHAPES:
                local = fsdp_local(numbered(shape), mesh_of(layout, *axes))
                assert torch.equal(assemble(one_param(shape, layout), rank, numbered(shape)), local)


@pytest.mark.parametrize("text", ["tp4", "tp3@1,2,0", "dp2.tp2"])
def test_tensor_parallel_shards_are_those_of_dtensor(text: str) -> None:
    layout = Layout.parse(text)
    axes = ("tp",) if layout.dims.dp == 1 else ("dp", "tp")
    for rank in layout.ranks:
        with playing(rank, len(layout.ranks)):
            for shape in ODD_SHAPES:
                for dim in range(len(shape)):
                    placements = [Shard(dim)] if layout.dims.dp == 1 else [Replicate(), Shard(dim)]
                    expected = distribute_tensor(
                        numbered(shape), mesh_of(layout, *axes), placements, src_data_rank=None
                    ).to_local()
                    local = assemble(one_param(shape, layout, TensorParallelCut(dim)), rank, numbered(shape))
                    assert torch.equal(local, expected)


@pytest.mark.parametrize("text", ["fsdp2.tp2", "fsdp3.tp2@0,3,1,4,2,5"])
def test_fsdp_over_tensor_parallel_shards_are_fully_shard_of_the_local_tensor(text: str) -> None:
    layout = Layout.parse(text)
    for rank in layout.ranks:
        with playing(rank, len(layout.ranks)):
            mesh = mesh_of(layout, "fsdp", "tp")
            for shape in ODD_SHAPES:
                for dim in range(len(shape)):
                    cut = distribute_tensor(numbered(shape), mesh["tp"], [Shard(dim)], src_data_rank=None).to_local()
                    expected = fsdp_local(cut, mesh["fsdp"])
                    local = assemble(one_param(shape, layout, TensorParallelCut(dim)), rank, numbered(shape))
                    assert torch.equal(local.reshape(expected.shape), expected)


def test_fsdp_over_tensor_parallel_is_torchs_strided_sharding() -> None:
    """Compare with ``fully_shard`` of a tensor-parallel DTensor, torch's own composition of the two."""
    layout = Layout.parse("fsdp2.tp4")
    for rank in layout.ranks:
        with playing(rank, 8):
            mesh = mesh_of(layout, "fsdp", "tp")
            module = nn.Module()
            module.weight = nn.Parameter(
                distribute_tensor(numbered((16, 3)), mesh["tp"], [Shard(0)], src_data_rank=None)
            )
            fully_shard(module, mesh=mesh["fsdp"])
            local = assemble(one_param((16, 3), layout, TensorParallelCut(0)), rank, numbered((16, 3)))
            assert torch.equal(local, module.weight.to_local().detach())


@pytest.mark.parametrize(("blocks", "tp", "fsdp"), [((6, 6), 2, 3), ((7, 5), 2, 2), ((9, 9), 4, 2), ((3, 1, 2), 3, 4)])
def test_fused_blocks_are_chunked_one_by_one_then_joined_then_chunked_by_fsdp(
    blocks: tuple[int, ...], tp: int, fsdp: int
) -> None:
    layout, whole = Layout.parse(f"fsdp{fsdp}.tp{tp}"), numbered((sum(blocks), 3))
    for rank in layout.ranks:
        at = layout.coordinate(rank)
        chunks = [[*block.chunk(tp), *[whole[:0]] * tp] for block in whole.split(list(blocks))]
        joined = torch.cat([parts[at.tp] for parts in chunks])
        expected = [*joined.chunk(fsdp), *[whole[:0]] * fsdp][at.fsdp]
        cut = TensorParallelCut(0, block_sizes=blocks)
        assert torch.equal(assemble(one_param((sum(blocks), 3), layout, cut), rank, whole), expected)


def test_fully_shard_sorts_the_ranks_of_a_permuted_mesh() -> None:
    """Show why `MeshRegistry` makes the groups of meshes itself: torch sorts their ranks."""
    permuted, ascending = Layout.parse("fsdp3@2,0,1"), Layout.parse("fsdp3@0-2")
    with playing(2, 3):
        local = fsdp_local(numbered((6, 1)), mesh_of(permuted, "fsdp"))
    assert torch.equal(assemble(one_param((6, 1), ascending), 2, numbered((6, 1))), local)
