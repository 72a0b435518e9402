"""Closed forms of the elements that layouts hold and that the reallocation planner moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.realloc.planner import plan_reallocation
from lightning_realloc.tuning.shapes.weights import Weights, traffic
from tests.tuning.examples import SMALL, role_of

CLUSTER = ClusterSpec.parse("h100:4x4")
MODEL = role_of(SMALL).model
WEIGHTS = Weights.from_model(MODEL)
UNEVEN = role_of(SMALL.replace("heads=8,kv_heads=2", "heads=9,kv_heads=3,head_dim=8")).model
"""Heads that no degree divides. FSDP cuts the rows of each rank into equal chunks all the same."""
MODELS = st.sampled_from((MODEL, UNEVEN))
MIXTURE = role_of(SMALL.replace("intermediate=128", "intermediate=32") + ",experts=6,experts_per_token=2").model
"""FSDP chunks its experts: of four ranks the last one has none, of eight the last two."""
DEGREES = (1, 2, 4, 8)


@st.composite
def layouts(draw: st.DrawFn, most_tp: int = 8) -> Layout:
    """Draw layouts of up to 16 ranks, aligned or shifted, in order or permuted."""
    pp, fsdp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from(DEGREES))
    tp = draw(st.sampled_from([degree for degree in DEGREES if degree <= most_tp]))
    while pp * fsdp * tp > 16:
        pp, fsdp, tp = (pp, fsdp // 2, tp) if fsdp > 1 else (pp // 2, fsdp, tp)
    dp = draw(st.sampled_from([n for n in DEGREES if pp * fsdp * tp * n <= 16]))
    dims = ParallelDims(pp=pp, dp=dp, fsdp=fsdp, tp=tp)
    first = draw(st.integers(0, 16 - dims.size))
    ranks = range(first, first + dims.size)
    return Layout(dims, tuple(draw(st.permutations(ranks)) if draw(st.booleans()) else ranks))


@given(model=MODELS, source=layouts(), target=layouts())
@settings(max_examples=160, deadline=None)
def test_traffic_equals_the_elements_that_the_planner_moves(model: ModelSpec, source: Layout, target: Layout) -> None:
    plan = plan_reallocation(ModelLayout(model, source), ModelLayout(model, target), CLUSTER, element_bytes=1)
    moved = traffic(Weights.from_model(model), source, target, CLUSTER)
    by_rank = plan.bytes_by_rank()
    assert moved.total_received == pytest.approx(plan.bytes_minimum)
    assert moved.total_between == pytest.approx(plan.inter_node_bytes_minimum)
    assert moved.received == pytest.approx(max(row.received_bytes for row in by_rank.values()))


@given(source=layouts(most_tp=1), target=layouts(most_tp=1))
@settings(max_examples=60, deadline=None)
def test_experts_move_in_the_chunks_of_fsdp(source: Layout, target: Layout) -> None:
    before, after = ModelLayout(MIXTURE, source), ModelLayout(MIXTURE, target)
    plan = plan_reallocation(before, after, CLUSTER, element_bytes=1)
    weights = Weights.from_model(MIXTURE)
    moved = traffic(weights, source, target, CLUSTER)
    routers = 4 * 6 * 64  # their chunks are counted as even ones
    assert moved.total_received == pytest.approx(plan.bytes_minimum, abs=routers * len(target.ranks))
    assert moved.total_between == pytest.approx(plan.inter_node_bytes_minimum, abs=routers * len(target.ranks))
    received = max(row.received_bytes for row in plan.bytes_by_rank().values())
    assert moved.received == pytest.approx(received, abs=routers)
    fullest = max(after.num_local_elements(rank) for rank in target.ranks)
    assert moved.needed == pytest.approx(fullest, abs=routers)
    assert weights.stage_elements(target.dims) / target.dims.fsdp == pytest.approx(fullest, abs=routers)


def test_a_source_sends_the_elements_that_the_planner_assigns_to_it() -> None:
    """Balanced cases from the planner: shards to replicas on one node, then across two."""
    for source, target in (("fsdp4@0-3", "dp4@0-3"), ("fsdp4@0-3", "tp4@4-7"), ("dp2.tp2@0-3", "fsdp4@4-7")):
        before, after = Layout.parse(source), Layout.parse(target)
        plan = plan_reallocation(ModelLayout(MODEL, before), ModelLayout(MODEL, after), CLUSTER, element_bytes=1)
        moved = traffic(WEIGHTS, before, after, CLUSTER)
        sent = max(plan.bytes_by_rank()[rank].sent_bytes for rank in before.ranks)
        assert max(moved.sent_inside, moved.sent_between) == pytest.approx(sent, rel=0.05)


@given(model=MODELS, layout=layouts())
@settings(max_examples=80, deadline=None)
def test_the_fullest_stage_equals_that_of_the_layout(model: ModelSpec, layout: Layout) -> None:
    held = ModelLayout(model, layout)
    fullest = max(held.num_local_elements(rank) for rank in layout.ranks)
    assert Weights.from_model(model).stage_elements(layout.dims) / layout.dims.fsdp == pytest.approx(fullest)


def test_the_whole_model_is_counted_once() -> None:
    assert WEIGHTS.total == pytest.approx(MODEL.num_elements)
    frozen = frozenset(param.name for param in MODEL.params if param.block is not None)
    assert Weights.from_model(MODEL, without=frozen).total == 2 * 256 * 64 + 64  # embedding, head, last norm
