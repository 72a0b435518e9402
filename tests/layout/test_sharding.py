"""Local shards of hand-worked cases; ``test_agreement`` compares with torch."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import (
    Layout,
    LocalShard,
    ModelLayout,
    ModelSpec,
    ParamSpec,
    Region,
    Share,
    TensorParallelCut,
    chunk_bounds,
    local_shard,
    sharded,
    sharded_experts,
    tiles,
)
from tests.layout.examples import JointCut, allows, cut_params, layouts


def shard_at(
    shape: tuple[int, ...], cut: TensorParallelCut | None, tp: int, tp_index: int, fsdp: int, fsdp_index: int
) -> LocalShard:
    """Return the shard of a parameter that tensor parallelism and FSDP cut."""
    shares = Share(tp, tp_index), Share(fsdp, fsdp_index)
    return local_shard(shape, sharded(cut), shares if cut is not None else shares[1:])


def rows(shape: tuple[int, ...], cut: TensorParallelCut | None, *coordinate: int) -> list[tuple[int, int]]:
    """Return (start, stop) along dim 0 of every piece at (tp, tp index, fsdp, fsdp index)."""
    return [(p.region.starts[0], p.region.stops[0]) for p in shard_at(shape, cut, *coordinate).pieces]


def test_chunks_are_ceil_sized_and_the_last_may_be_empty() -> None:
    # torch.chunk(arange(9), 4) gives 3, 3, 3 and no fourth; DTensor gives the fourth rank an empty tensor.
    assert [chunk_bounds(9, 4, index) for index in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 9)]
    assert [chunk_bounds(2, 4, index) for index in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_tensor_parallelism_cuts_before_fsdp() -> None:
    # 16 rows, fsdp 2 x tp 4. tp rank 1 has rows 4-7; the second half of those is 6-7.
    assert rows((16,), TensorParallelCut(0), 4, 1, 2, 1) == [(6, 8)]


def test_a_row_wise_weight_is_cut_along_both_dims() -> None:
    shard = shard_at((6, 8), TensorParallelCut(1), 2, 1, 3, 2)
    assert shard.shape == (2, 4)
    assert [piece.region for piece in shard.pieces] == [Region((4, 4), (6, 8))]


def test_an_empty_shard_has_a_shape_and_no_pieces() -> None:
    shard = shard_at((3, 5), None, 1, 0, 4, 3)
    assert shard.shape == (0, 5)
    assert shard.pieces == ()


def test_fused_blocks_are_cut_one_by_one() -> None:
    # gate rows 0-5, up rows 6-11: tp rank 1 of 2 has 3-5 and 9-11, one after the other.
    cut = TensorParallelCut(0, block_sizes=(6, 6))
    shard = shard_at((12, 2), cut, 2, 1, 1, 0)
    assert rows((12, 2), cut, 2, 1, 1, 0) == [(3, 6), (9, 12)]
    assert [piece.offset for piece in shard.pieces] == [(0, 0), (3, 0)]
    # FSDP over it: local rows 2-3 are the last of gate and the first of up.
    assert rows((12, 2), cut, 2, 1, 3, 1) == [(5, 6), (9, 10)]


def test_blocks_that_are_not_cut_make_one_piece() -> None:
    assert rows((12,), TensorParallelCut(0, block_sizes=(6, 6)), 1, 0, 1, 0) == [(0, 12)]


def test_key_value_heads_are_shared_when_tensor_parallelism_exceeds_them() -> None:
    # Two heads of three rows over tp 4: ranks 0 and 1 hold head 0, ranks 2 and 3 head 1.
    cut = TensorParallelCut(0, 2, replicate_units=True)
    assert [rows((6,), cut, 4, index, 1, 0) for index in range(4)] == [[(0, 3)], [(0, 3)], [(3, 6)], [(3, 6)]]


def test_fused_heads_share_key_values_and_split_queries() -> None:
    # q has 4 heads, k and v have 2 each, 1 row a head: tp rank 3 of 4 has query head 3 and kv head 1.
    cut = TensorParallelCut(0, 8, replicate_units=True, block_sizes=(4, 2, 2), num_groups=2)
    assert rows((8,), cut, 4, 3, 1, 0) == [(3, 4), (5, 6), (7, 8)]
    assert rows((8,), cut, 2, 0, 1, 0) == [(0, 2), (4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("heads", "tp", "queries", "keys"),
    [
        ((9, 3), 2, [6, 3], [(0, 2), (2, 3)]),
        ((9, 3), 3, [3, 3, 3], [(0, 1), (1, 2), (2, 3)]),
        ((14, 2), 4, [4, 3, 4, 3], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        ((14, 2), 3, [7, 4, 3], [(0, 1), (1, 2), (1, 2)]),
        ((6, 2), 4, [2, 1, 2, 1], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        ((5, 5), 2, [3, 2], [(0, 3), (3, 5)]),
        ((7, 1), 4, [2, 2, 2, 1], [(0, 1)] * 4),
    ],
)
def test_heads_that_the_degree_does_not_divide_are_shared_unevenly(
    heads: tuple[int, int], tp: int, queries: list[int], keys: list[tuple[int, int]]
) -> None:
    num_heads, num_groups = heads
    query = TensorParallelCut(0, num_heads, num_groups=num_groups)
    key = TensorParallelCut(0, num_groups, replicate_units=True)
    assert [shard_at((2 * num_heads,), query, tp, index, 1, 0).shape for index in range(tp)] == [
        (2 * count,) for count in queries
    ]
    assert [rows((num_groups,), key, tp, index, 1, 0) for index in range(tp)] == [[bounds] for bounds in keys]


def dealt(count: int, shares: int) -> list[int]:
    """Return the sizes of shares to which ``count`` items are dealt one by one."""
    sizes = [0] * shares
    for item in range(count):
        sizes[item % shares] += 1
    return sizes


@given(num_groups=st.integers(1, 9), size=st.integers(1, 9), data=st.data())
def test_ranks_hold_every_query_head_once_with_the_key_value_head_that_it_reads(
    num_groups: int, size: int, data: st.DataObject
) -> None:
    num_heads = num_groups * size
    tp = data.draw(st.integers(1, num_heads))
    query = TensorParallelCut(0, num_heads, num_groups=num_groups)
    key = TensorParallelCut(0, num_groups, replicate_units=True)
    held = [(query.unit_bounds(num_heads, tp, i), key.unit_bounds(num_groups, tp, i)) for i in range(tp)]
    queries, keys = ([range(*one) for one in side] for side in zip(*held, strict=True))

    assert [head for heads in queries for head in heads] == list(range(num_heads))
    for own, read in zip(queries, keys, strict=True):
        assert own and {head // size for head in own} == set(read)
    assert len(queries[0]) == max(map(len, queries)) and len(keys[0]) == max(map(len, keys))
    if tp <= num_groups:
        assert list(map(len, keys)) == dealt(num_groups, tp)
    else:
        sharing = [[i for i in range(tp) if group in keys[i]] for group in range(num_groups)]
        assert sorted(map(len, sharing), reverse=True) == dealt(tp, num_groups)
        for ranks in sharing:
            assert [len(queries[rank]) for rank in ranks] == dealt(size, len(ranks))
    for index in range(tp):
        ranks = key.shared_by(tp, index)
        equal = [other for other in range(tp) if keys[other] == keys[index]]
        assert list(range(index, index + 1) if ranks is None else ranks) == equal
        assert (ranks is None) == (tp <= num_groups) and query.shared_by(tp, index) is None
    assert query.refusal((num_heads,), tp) is None and query.refusal((num_heads,), num_heads + 1) is not None
    assert key.refusal((num_groups,), num_heads) is None


@settings(max_examples=100, deadline=None)
@given(cut_params("w", "output", None), st.sampled_from([1, 2, 3, 4]), st.integers(1, 4))
def test_distinct_pieces_tile_the_tensor_and_pieces_tile_each_shard(param: ParamSpec, tp: int, fsdp: int) -> None:
    model, layout = ModelSpec((param,), 0), Layout.parse(f"fsdp{fsdp}.tp{tp}")
    assume(allows(model, layout))
    laid_out = ModelLayout(model, layout)
    shards = {shard for shard, _ in laid_out.holders("w")}
    distinct = {piece.region for shard in shards for piece in shard.pieces}
    assert tiles(distinct, param.shape)
    for shard in shards:
        placed = [
            Region(piece.offset, tuple(map(sum, zip(piece.offset, piece.region.shape, strict=True))))
            for piece in shard.pieces
        ]
        assert tiles(placed, shard.shape)


@pytest.mark.parametrize(
    ("arguments", "shape", "words"),
    [
        ({"dim": 2}, (4, 4), ["along dim 2", "(4, 4)"]),
        ({"dim": 0, "num_units": 3}, (4, 4), ["num_units=3", "divide 4"]),
        ({"dim": 0, "block_sizes": (2, 3)}, (4, 4), ["(2, 3)", "add up to 4"]),
        ({"dim": 0, "num_units": 2, "block_sizes": (3, 1)}, (4, 4), ["whole units of 2", "(3, 1)"]),
        ({"dim": -1}, (4,), ["dim=-1", "count dims from the first"]),
        ({"dim": 0, "num_units": 0}, (4,), ["num_units=0", "None"]),
        ({"dim": 0, "block_sizes": (4, 0)}, (4,), ["(4, 0)", "leave empty blocks out"]),
        ({"dim": 0, "replicate_units": True}, (4,), ["replicate_units=True needs num_units"]),
        ({"dim": 0, "num_groups": 2}, (4,), ["num_groups=2 needs num_units"]),
        ({"dim": 0, "num_units": 6, "num_groups": 4}, (6,), ["num_groups=4", "(6,)", "key-value heads"]),
        ({"dim": 0, "num_units": 4, "num_groups": 2, "block_sizes": (3, 1)}, (4,), ["num_groups=2", "(3, 1)"]),
    ],
)
def test_a_cut_that_does_not_fit_its_parameter_is_refused(
    arguments: dict[str, object], shape: tuple[int, ...], words: list[str]
) -> None:
    with pytest.raises(LayoutError) as refusal:
        TensorParallelCut(**arguments).check_shape(shape)  # type: ignore[arg-type]
    for word in words:
        assert word in str(refusal.value)


def test_the_ranks_of_two_axes_divide_one_dim_together() -> None:
    # 5 rows over fsdp2 x tp2 (and cp1), in shares of 2, 1, 1 and 1; the second replica holds the same.
    model = ModelSpec((ParamSpec("w", (5, 3), (JointCut(0),), "output"),), 0)
    layout = ModelLayout(model, Layout.parse("dp2.fsdp2.tp2@0-3,5,4,6,7"))
    starts = [layout.pieces("w", rank)[0].region.starts[0] for rank in range(8)]
    assert starts == [0, 2, 3, 4, 2, 0, 3, 4]
    assert [layout.num_holders("w", rank) for rank in range(8)] == [2] * 8
    assert layout.layout.group(1, *JointCut.axes) == (0, 1, 2, 3)
    with pytest.raises(LayoutError, match=r"w: 8 ranks exceed the rows \(5\); use fsdp\*cp\*tp in \(1, .*, 5\)"):
        ModelLayout(model, Layout.parse("fsdp4.tp2"))


@pytest.mark.parametrize(
    ("text", "holders"),
    [
        # Experts 0-1 lie on even ranks; of these, FSDP shards over two.
        ("fsdp4.ep2", {(0, 1): [0], (1, 2): [2], (2, 3): [1], (3, 4): [3]}),
        ("dp2.fsdp2.ep2", {(0, 2): [0, 2], (2, 4): [1, 3]}),
        ("dp2.fsdp2.ep4", {(0, 1): [0], (1, 2): [1], (2, 3): [2], (3, 4): [3]}),
        ("dp4.ep2", {(0, 2): [0, 2], (2, 4): [1, 3]}),
        ("fsdp2.cp2.ep2", {(0, 1): [0], (1, 2): [1], (2, 3): [2], (3, 4): [3]}),
        ("fsdp2.tp2.ep2", {(0, 2): [0, 1], (2, 4): [2, 3]}),
        ("pp2.fsdp2.ep2", {(0, 2): [2], (2, 4): [3]}),
    ],
)
def test_experts_are_divided_over_the_data_parallel_ranks(text: str, holders: dict[tuple[int, int], list[int]]) -> None:
    model = ModelSpec((ParamSpec("w", (4, 3), sharded_experts(), "output"),), 0, ep_refusal=None)
    if text.startswith("pp"):
        blocks = tuple(ParamSpec(f"b{index}", (1,), block=index) for index in range(2))
        model = ModelSpec((*blocks, *model.params), 2, ep_refusal=None)
    layout = ModelLayout(model, Layout.parse(text))
    found = {piece.region: list(ranks) for shard, ranks in layout.holders("w") for piece in shard.pieces}
    assert found == {Region((start, 0), (stop, 3)): ranks for (start, stop), ranks in holders.items()}
    for ranks in holders.values():
        assert [layout.num_holders("w", rank) for rank in ranks] == [len(ranks)] * len(ranks)


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_the_axes_of_experts_fill_the_ranks_of_a_stage(layout: Layout) -> None:
    axes = (*layout.expert_replica_axes, *layout.expert_shard_axes, *layout.expert_axes, *layout.tensor_axes)
    stages = layout.groups("pp", *axes)
    assert [sorted(stage) for stage in stages] == [sorted(layout.ranks)]
    groups = layout.groups(*layout.expert_axes)
    assert all(set(group) <= set(layout.batch_group(group[0])) for group in groups)
    copies = layout.groups(*layout.weight_axes)
    for part in (layout.expert_axes, layout.expert_shard_axes, layout.shard_axes):
        assert all(any(set(group) <= set(copy) for copy in copies) for group in layout.groups(*part))
