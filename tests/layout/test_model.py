"""Model layouts: local shards of every rank, and errors for impossible layouts."""

from __future__ import annotations

import itertools
import pickle
import re
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import (
    FsdpCut,
    Layout,
    ModelLayout,
    ModelSpec,
    ParallelDims,
    ParamSpec,
    TensorParallelCut,
    sharded,
)
from lightning_realloc.layout.cuts import share_bounds
from lightning_realloc.layout.model import balanced_stages
from tests.layout.examples import EXPERTS, SMALL, layout_pairs

FOUR_BLOCKS = ModelSpec(tuple(ParamSpec(f"blocks.{i}.weight", (4, 4), block=i) for i in range(4)), num_blocks=4)
AXES_THAT_RUN = ("pp", "vpp", "dp", "fsdp", "cp", "tp", "ep")
"""Axes along which models run. All others exist in texts alone."""


def lay(text: str, model: ModelSpec = SMALL) -> ModelLayout:
    return ModelLayout(model, Layout.parse(text))


@pytest.mark.parametrize("axis", [field.name for field in fields(ParallelDims)])
def test_an_axis_runs_or_is_refused(axis: str) -> None:
    try:
        lay(*{"ep": ("fsdp2.ep2", EXPERTS), "vpp": ("pp2.vpp2", FOUR_BLOCKS)}.get(axis, (f"{axis}2",)))
    except LayoutError:
        assert axis not in AXES_THAT_RUN
    else:
        assert axis in AXES_THAT_RUN, (
            f"ModelLayout must refuse {axis}=2 until models run along {axis}; see 'Add an axis to layouts' in "
            f"CONTRIBUTING.md"
        )


def test_any_number_of_ranks_divides_rows_of_a_model_with_attention() -> None:
    assert SMALL.context_parallel_degrees(3) == (1, 2, 3)
    assert replace(SMALL, attention_heads=()).context_parallel_degrees(3) == (1,)
    for text in ("cp8", "cp3", "cp2.tp4"):
        lay(text)


def test_ranks_that_divide_experts_get_equal_shares() -> None:
    assert EXPERTS.expert_parallel_degrees(8) == (1, 2, 4)
    assert SMALL.expert_parallel_degrees(8) == (1,)
    assert lay("dp2.fsdp2.ep4", EXPERTS).gathered_shard("model.layers.0.experts.down_proj", 2).shape == (1, 12, 10)  # type: ignore[union-attr]
    rule = "ep=3 must divide the 4 experts; leave ep out, or use ep in (1, 2) with other degrees of dp and fsdp"
    with pytest.raises(LayoutError, match=re.escape(rule)):
        lay("fsdp3.ep3", EXPERTS)
    with pytest.raises(LayoutError, match=r"ep=8 must divide the 4 experts; use ep in \(1, 2, 4\)$"):
        lay("fsdp8.ep8", EXPERTS)
    with pytest.raises(LayoutError, match=r"ep=2 is impossible for this model: it has no experts; leave ep out"):
        lay("fsdp2.ep2")
    assert lay("fsdp2.ep2", EXPERTS).subset({"model.layers.0.gate.weight"}).names(1) == ("model.layers.0.gate.weight",)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=10), st.data())
def test_no_division_has_a_cheaper_most_expensive_stage(costs: list[int], data: st.DataObject) -> None:
    num_blocks = len(costs) - 2
    pp = data.draw(st.integers(1, num_blocks))

    def stage_costs(begins: tuple[int, ...]) -> list[int]:
        bounds = itertools.pairwise((0, *(begin + 1 for begin in begins), len(costs)))
        return sorted((sum(costs[start:stop]) for start, stop in bounds), reverse=True)

    first = data.draw(st.integers(1, num_blocks))
    least = min(first, num_blocks - pp + 1)
    runs = balanced_stages(tuple(costs), pp, first)

    assert len(runs[0]) >= least
    assert [block for run in runs for block in run] == list(range(num_blocks))
    assert min(map(len, runs)) >= 1
    divisions = itertools.combinations(range(1, num_blocks), pp - 1)
    cheapest = min(stage_costs(begins) for begins in divisions if not begins or begins[0] >= least)
    assert stage_costs(tuple(run.start for run in runs[1:])) == cheapest


def test_equal_blocks_are_divided_evenly_and_earlier_stages_have_more() -> None:
    for num_blocks in range(1, 12):
        for pp in range(1, num_blocks + 1):
            even = tuple(range(*share_bounds(num_blocks, pp, stage)) for stage in range(pp))
            assert balanced_stages((0, *(1,) * num_blocks, 0), pp) == even


def test_a_head_takes_the_place_of_blocks_on_the_last_stage_also_in_a_subset() -> None:
    params = (*(ParamSpec(f"w{i}", (4, 4), block=i) for i in range(5)), ParamSpec("head", (4, 9), section="output"))
    layout = lay("pp2", ModelSpec(params, 5, costs=(0, 1, 1, 1, 1, 1, 3)))
    assert [layout.names(rank) for rank in (0, 1)] == [("w0", "w1", "w2", "w3"), ("w4", "head")]
    assert layout.subset({"w3", "w4"}).names(0) == ("w3",)


def test_input_lies_on_the_first_stage_and_output_on_the_last() -> None:
    layout = lay("pp2")
    assert layout.names(0)[0] == "model.embed_tokens.weight"
    assert all(name.startswith("model.layers.0.") for name in layout.names(0)[1:])
    assert layout.names(1)[-2:] == ("model.norm.weight", "lm_head.weight")
    assert layout.pieces("lm_head.weight", 0) == ()
    with pytest.raises(LayoutError, match=r"rank 0 has no 'lm_head.weight' under pp2@0-1"):
        layout.local_shape("lm_head.weight", 0)


def test_a_rank_outside_the_layout_holds_nothing() -> None:
    layout = lay("tp2@2-3")
    assert layout.names(0) == ()
    assert layout.pieces("lm_head.weight", 0) == ()
    assert layout.num_local_elements(0) == 0


def test_data_parallel_replicas_hold_the_same_shards() -> None:
    layout = lay("dp2.fsdp2.tp2")
    for name in layout.names(0):
        assert layout.shard(name, 1) == layout.shard(name, 5)


def test_holders_group_the_ranks_of_equal_shards() -> None:
    layout = lay("tp4")  # two kv heads over four ranks
    shared = layout.holders("model.layers.0.self_attn.k_proj.weight")
    assert [ranks for _, ranks in shared] == [(0, 1), (2, 3)]
    assert [ranks for _, ranks in layout.holders("model.norm.weight")] == [(0, 1, 2, 3)]


def test_ranks_that_hold_the_same_elements_are_replicas_and_those_that_share_heads() -> None:
    # 2 key-value heads on 4 ranks: each is held twice, in each of 2 replicas. Norms are on all 4 ranks of both.
    under_tp4 = lay("dp2.fsdp2.tp4")
    assert under_tp4.num_holders("model.layers.0.self_attn.k_proj.weight", 0) == 4
    assert under_tp4.num_holders("model.layers.0.self_attn.q_proj.weight", 0) == 2
    assert under_tp4.num_holders("model.norm.weight", 0) == 8
    # On 3 ranks the first one holds its head alone.
    under_tp3 = lay("pp2.dp2.tp3")
    assert [under_tp3.num_holders("model.layers.0.self_attn.k_proj.weight", rank) for rank in range(3)] == [2, 4, 4]


@settings(max_examples=40, deadline=None)
@given(layout_pairs())
def test_local_shapes_have_as_many_elements_as_their_pieces(pair: tuple[ModelLayout, ModelLayout]) -> None:
    for layout in pair:
        for rank in layout.layout.ranks:
            held = sum(piece.region.numel for name in layout.names(rank) for piece in layout.pieces(name, rank))
            assert held == layout.num_local_elements(rank)
    assert pickle.loads(pickle.dumps(pair)) == pair


def test_a_tied_name_is_looked_up_under_its_owner() -> None:
    tied = ModelSpec((ParamSpec("embed", (4, 4), section="input"),), 0, aliases=(("lm_head", "embed"),))
    assert tied.param("lm_head") is tied.param("embed")
    assert tied.num_elements == 16


def test_a_subset_has_its_parameters_in_the_models_order_and_no_tied_names() -> None:
    params = tuple(ParamSpec(name, (4, 4), section="input") for name in ("embed", "scale", "shift"))
    whole = lay("fsdp2", ModelSpec(params, 0, aliases=(("lm_head", "embed"),)))
    part = whole.subset({"shift", "embed"})
    assert part == lay("fsdp2", ModelSpec((params[0], params[2]), 0))
    assert part.names(1) == ("embed", "shift")


def test_tensor_parallel_degrees_are_those_that_every_parameter_allows() -> None:
    # Four query heads, one at least for every rank; two kv heads may be shared.
    assert SMALL.tensor_parallel_degrees(8) == (1, 2, 3, 4)
    assert ModelSpec((), 0, tp_refusal="no plan").tensor_parallel_degrees(8) == (1,)


def test_degrees_that_leave_a_rank_without_heads_are_refused() -> None:
    with pytest.raises(LayoutError) as refusal:
        lay("tp6")
    assert str(refusal.value) == (
        "model.layers.0.self_attn.q_proj.weight: tp=6 must not exceed the number of heads or units along dim 0 (4), "
        "so that every rank gets one; use tp in (1, 2, 3, 4)"
    )
    assert lay("tp3").local_shape("model.layers.0.self_attn.k_proj.weight", 2) == (3, 12)
    by_input = sharded(TensorParallelCut(1, 2))  # readers of these heads do not share them
    read = ModelSpec((ParamSpec("k", (6, 4), by_input, block=0),), 1)
    with pytest.raises(LayoutError, match=r"k: tp=3 must not exceed .* along dim 1 \(2\).*use tp in \(1, 2\)"):
        lay("tp3", read)
    cut = TensorParallelCut(0, 8, True, (8, 4, 4), num_groups=2)
    fused = ModelSpec((ParamSpec("qkv", (16, 4), sharded(cut), block=0),), 1)
    with pytest.raises(LayoutError, match=r"qkv: tp=3 must divide the heads .* dim 0 \(4, 2, 2\); use tp in \(1, 2\)"):
        lay("tp3", fused)


def test_tensor_parallelism_on_a_model_without_a_plan_is_refused_with_the_models_reason() -> None:
    model = ModelSpec((ParamSpec("w", (4,), block=0),), 1, tp_refusal="GPT2 has no tp_plan; pass tp_plan={...}")
    assert lay("fsdp2", model).names(0) == ("w",)
    with pytest.raises(
        LayoutError, match=r"tp=2 is impossible.*GPT2 has no tp_plan; pass tp_plan=\{\.\.\.\}.*use tp=1"
    ):
        lay("tp2", model)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"pp=3 .* has 2 blocks; use pp of at most 2"):
        lay("pp3")


def test_tied_embeddings_lie_on_the_first_and_the_last_stage() -> None:
    params = (ParamSpec("embed", (4, 4), section="ends"), *(ParamSpec(f"w{i}", (4,), block=i) for i in range(3)))
    layout = lay("pp3.fsdp2", ModelSpec(params, 3, aliases=(("lm_head", "embed"),)))
    assert [layout.names(rank) for rank in (1, 3, 5)] == [("embed", "w0"), ("w1",), ("embed", "w2")]
    assert layout.stages("lm_head") == (0, 2)
    assert [ranks for _, ranks in layout.holders("embed")] == [(0, 4), (1, 5)]
    assert layout.num_holders("embed", 5) == 2


def test_other_ties_cannot_be_divided_into_stages() -> None:
    params = (ParamSpec("embed", (4, 4), section="input"), *(ParamSpec(f"w{i}", (4,), block=i) for i in range(2)))
    with pytest.raises(LayoutError, match=r"no other ties such as 'table' to 'embed'; untie them or use pp=1"):
        lay("pp2", ModelSpec(params, 2, aliases=(("table", "embed"),)))


def test_a_scalar_cannot_be_chunked() -> None:
    scalar = ModelSpec((ParamSpec("scale", (), block=0),), 1)
    assert lay("dp2", scalar).local_shape("scale", 1) == ()
    with pytest.raises(LayoutError, match=r"scale: fsdp and cp, 2 ranks here, .*shape \(1,\)"):
        lay("fsdp2", scalar)


def test_a_model_that_contradicts_itself_is_refused() -> None:
    weight = ParamSpec("w", (4,), block=0)
    for build, words in [
        (lambda: ModelSpec((weight, weight), 1), "listed more than once"),
        (lambda: ModelSpec((weight,), 0), "block=0 must be below num_blocks=0"),
        (lambda: ModelSpec((weight,), 1, costs=(1, 1)), "costs has 2 entries for num_blocks=1"),
        (lambda: ModelSpec((weight,), 1, aliases=(("a", "b"),)), "must map a name outside params to one inside"),
        (lambda: ModelSpec((weight,), 1).param("x"), "no parameter 'x'"),
        (lambda: ParamSpec("w", (4,)), "block=None"),
        (lambda: ParamSpec("w", (4,), section="middle"), "section='middle'"),  # type: ignore[arg-type]
        (lambda: ParamSpec("w", (4,), sharded(TensorParallelCut(1)), block=0), "w: the cut along dim 1 by tp needs"),
        (lambda: ParamSpec("w", (4,), (FsdpCut(), FsdpCut()), block=0), "let each axis cut once"),
        (lambda: ParamSpec("w", (4,), (FsdpCut(), TensorParallelCut(0)), block=0), "let FSDP's cut be the last"),
    ]:
        with pytest.raises(LayoutError) as refusal:
            build()
        assert words in str(refusal.value)


def test_each_stage_holds_every_pp_th_run_of_blocks() -> None:
    """Two stages of two runs: the first one has blocks 0 and 2, the last one 1 and 3."""
    layout = lay("pp2.vpp2", FOUR_BLOCKS)
    assert layout.names(0) == ("blocks.0.weight", "blocks.2.weight")
    assert layout.names(1) == ("blocks.1.weight", "blocks.3.weight")
    assert (layout.runs("blocks.2.weight"), layout.stages("blocks.2.weight")) == ((2,), (0,))
