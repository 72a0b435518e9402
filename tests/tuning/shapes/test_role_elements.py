"""Elements of a role on a rank, compared with a count parameter by parameter."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout, ModelSpec, ParamSpec, TensorParallelCut, sharded
from lightning_realloc.layout.cuts import sharded_experts
from lightning_realloc.tuning.shapes.role_elements import RankElements, RoleElements
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

# Uneven sizes: 7 rows over 2, 3 or 4 ranks, different blocks, and one frozen parameter per block.
SPEC = ModelSpec(
    (
        ParamSpec("embed", (7, 3), sharded(TensorParallelCut(0)), section="input"),
        *(ParamSpec(f"block.{i}.in", (7, 2 + i % 2), sharded(TensorParallelCut(0)), block=i) for i in range(5)),
        *(ParamSpec(f"block.{i}.out", (2, 8), sharded(TensorParallelCut(1, num_units=4)), block=i) for i in range(5)),
        ParamSpec("norm", (5,), section="output"),
        ParamSpec("scale", (), section="output"),
    ),
    num_blocks=5,
)
ROLE = RoleMemory(model=SPEC, frozen_params=frozenset(f"block.{i}.in" for i in range(5)))
WITHOUT_SCALAR = RoleMemory(model=ModelSpec(SPEC.params[:-1], 5), frozen_params=ROLE.frozen_params)


@pytest.mark.parametrize("text", ["dp1", "tp2", "tp3", "tp4", "pp2.tp2", "pp3", "pp5.dp2"])
def test_whole_tensors_are_counted_as_the_layout_cuts_them(text: str) -> None:
    layout = Layout.parse(text)
    laid, elements = ModelLayout(SPEC, layout), RoleElements(ROLE)
    for rank in layout.ranks:
        sizes = {name: math.prod(laid.local_shape(name, rank)) for name in laid.names(rank)}
        blocks = [sizes[f"block.{i}.in"] + sizes[f"block.{i}.out"] for i in range(5) if f"block.{i}.in" in sizes]
        trained = {name: size for name, size in sizes.items() if name not in ROLE.frozen_params}
        found = elements.on_rank(layout, rank)
        assert found.num_sharded == sum(sizes.values())
        assert found.num_trained == found.num_trained_sharded == sum(trained.values())
        assert found.root == found.trained_root == sum(size for name, size in sizes.items() if "block" not in name)
        assert (found.num_blocks, found.largest_block) == (len(blocks), max(blocks))
        assert found.trained_block == max(size for name, size in trained.items() if "block" in name)


def test_shards_are_padded_to_equal_length() -> None:
    # Under tp2 rank 0 has 4 of 7 rows and rank 1 three: FSDP over three ranks cuts them into shards of two and one row.
    layout, elements = Layout.parse("fsdp3.tp2"), RoleElements(WITHOUT_SCALAR)
    # In the blocks 12 columns are cut like that, and 4 of 8 columns of two rows, with one row on two of three ranks.
    assert elements.on_rank(layout, 0).num_sharded == 2 * 3 + 2 * 12 + 5 * 1 * 4 + 2
    assert elements.on_rank(layout, 1).num_sharded == 1 * 3 + 1 * 12 + 5 * 1 * 4 + 2
    assert elements.on_rank(layout, 0).num_trained == 4 * 3 + 5 * 8 + 5


@pytest.mark.parametrize("text", ["dp2", "pp2.tp2", "pp3", "pp4", "pp5.dp2"])
def test_no_stage_holds_more_than_the_fullest_stages(text: str) -> None:
    layout, elements = Layout.parse(text), RoleElements(ROLE)
    firsts = [elements.on_rank(layout, rank) for rank in layout.groups("pp")[0]]
    fullest = elements.on_stages(layout.dims)
    assert fullest[0] == firsts[0] and fullest[-1] == firsts[-1] and len(fullest) <= len(firsts)
    for one in firsts[1:-1]:
        assert any(
            other.stage <= one.stage
            and all(mine <= theirs for mine, theirs in zip(_counts(one), _counts(other), strict=True))
            for other in fullest
        )


def _counts(sizes: RankElements) -> list[int]:
    return [getattr(sizes, item.name) for item in fields(sizes) if item.name not in ("dims", "stage")]


def test_an_invalid_layout_is_refused_every_time() -> None:
    elements = RoleElements(ROLE)
    for text, rule in (("tp5", "must not exceed the number of heads"), ("pp6", "pp=6"), ("fsdp2", "scalar")):
        for _ in range(2):
            with pytest.raises(LayoutError, match=rule):
                elements.on_rank(Layout.parse(text), 0)
    with pytest.raises(LayoutError, match="not part of"):
        elements.on_rank(Layout.parse("tp2"), 2)


@pytest.mark.parametrize(
    ("text", "other"), [("tp2", "pp2.tp2"), ("pp3", "dp5@1-5"), ("dp4", "fsdp2.tp2"), ("tp4", "tp2")]
)
def test_tensors_with_the_same_shard_in_both_layouts_are_not_counted(text: str, other: str) -> None:
    elements, layout, unlike = RoleElements(WITHOUT_SCALAR), Layout.parse(text), Layout.parse(other)
    laid, there = (ModelLayout(WITHOUT_SCALAR.model, one) for one in (layout, unlike))
    for rank in layout.ranks:
        sizes = {name: math.prod(laid.local_shape(name, rank)) for name in laid.names(rank)}
        assert elements.tensors(layout, rank) == sum(sizes.values())
        left = [size for name, size in sizes.items() if laid.shard(name, rank) != there.shard(name, rank)]
        assert elements.tensors(layout, rank, unlike=unlike) == sum(left)


@pytest.mark.parametrize(
    "text", ["dp2", "tp3", "fsdp3.tp2", "fsdp9", "dp2.fsdp2.cp2", "fsdp4.tp2.ep2", "dp4.fsdp2.ep4"]
)
def test_shards_are_those_that_the_layout_cuts(text: str) -> None:
    params = (  # of families of one, so that they come in this order
        ParamSpec("embed", (7, 3), sharded(TensorParallelCut(0)), section="input"),
        ParamSpec("in", (7, 2), sharded(TensorParallelCut(0)), block=0),
        ParamSpec("out", (3, 8), sharded(TensorParallelCut(1, num_units=4)), block=0),
        ParamSpec("keys", (6, 4), sharded(TensorParallelCut(0, num_units=2, replicate_units=True)), block=0),
        ParamSpec("fused", (12, 2), sharded(TensorParallelCut(0, block_sizes=(8, 4))), block=0),
        ParamSpec("experts", (4, 5, 6), sharded_experts(TensorParallelCut(2)), block=0),
        ParamSpec("norm", (5,), sharded(), section="output"),
    )
    model = ModelSpec(params, num_blocks=1, ep_refusal=None)
    layout = Layout.parse(text)
    laid, elements = ModelLayout(model, layout), RoleElements(RoleMemory(model=model))
    for param, shards in zip(params, elements.shards(layout.dims), strict=True):
        cut = [shard for rank in layout.ranks if (shard := laid.shard(param.name, rank)) is not None]
        assert len(cut) == len(layout.ranks)
        for rank, shard in enumerate(cut):
            number = shards.number[rank]
            found = {tuple(map(tuple, piece)) for piece in shards.bounds[number].tolist()}
            regions = (piece.region for piece in shard.pieces)
            wanted = {tuple(zip(one.starts, one.stops, strict=True)) for one in regions}
            assert {piece for piece in found if all(start < stop for start, stop in piece)} == wanted
            assert shards.sizes[number] == math.prod(shard.shape)
        held = [(rank, shard.pieces) for rank, shard in enumerate(cut) if shard.pieces]
        for rank, pieces in held:
            assert [shards.number[rank] == shards.number[other] for other, _ in held] == [
                pieces == others for _, others in held
            ]
