"""Elements that layouts hold, in closed form for sizes that divide, and elements that the planner moves."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout
from lightning_realloc.realloc.planner import plan_reallocation
from lightning_realloc.tuning.shapes import traffic as traffic_module
from lightning_realloc.tuning.shapes.role_elements import RoleElements
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.shapes.traffic import count_lacking, traffic
from tests.tuning.examples import SMALL, role_of, with_adapters

CLUSTER = ClusterSpec.parse("h100:4x4")
DECODER = role_of(SMALL)
UNEVEN = role_of(SMALL.replace("heads=8,kv_heads=2", "heads=9,kv_heads=3,head_dim=8"))
"""Heads that no degree divides."""
BIASED = role_of(SMALL + ",qkv_bias")
ADAPTED = with_adapters(role_of(SMALL), rank=6)
"""FSDP over four and eight ranks pads its adapters' six rows."""
MIXTURE = role_of(SMALL.replace("intermediate=128", "intermediate=64") + ",experts=6,experts_per_token=2")
"""FSDP chunks its experts: of four ranks the last one has none, of eight the last two."""
TIED = role_of(SMALL + ",tied")
ROLES = st.sampled_from((DECODER, UNEVEN, BIASED, ADAPTED, MIXTURE, TIED))
DEGREES = (1, 2, 4, 8)


@st.composite
def layouts(draw: st.DrawFn, most_tp: int = 8) -> Layout:
    """Draw layouts of up to 16 ranks, aligned or shifted, in order or permuted."""
    pp, fsdp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from(DEGREES))
    tp = draw(st.sampled_from([degree for degree in DEGREES if degree <= most_tp]))
    while pp * fsdp * tp > 16:
        pp, fsdp, tp = (pp, fsdp // 2, tp) if fsdp > 1 else (pp // 2, fsdp, tp)
    dp = draw(st.sampled_from([n for n in DEGREES if pp * fsdp * tp * n <= 16]))
    vpp = draw(st.sampled_from((1, 2))) if pp == 2 else 1
    dims = ParallelDims(pp=pp, vpp=vpp, dp=dp, fsdp=fsdp, tp=tp)
    first = draw(st.integers(0, 16 - dims.size))
    ranks = range(first, first + dims.size)
    return Layout(dims, tuple(draw(st.permutations(ranks)) if draw(st.booleans()) else ranks))


def fitting(role: RoleMemory, layout: Layout) -> Layout:
    """Return the layout with dp in place of tp if the model refuses tp."""
    dims = layout.dims
    if role.model.tp_refusal is None:
        return layout
    return Layout(ParallelDims(pp=dims.pp, vpp=dims.vpp, dp=dims.dp * dims.tp, fsdp=dims.fsdp), layout.ranks)


@given(role=ROLES, source=layouts(), target=layouts())
@settings(max_examples=40, deadline=None)
def test_traffic_equals_the_elements_that_the_planner_moves(role: RoleMemory, source: Layout, target: Layout) -> None:
    before, after = (ModelLayout(role.model, fitting(role, layout)) for layout in (source, target))
    plan = plan_reallocation(before, after, CLUSTER, element_bytes=1)
    elements, rows = RoleElements(role), plan.bytes_by_rank()
    moved = traffic(elements, before.layout, after.layout, CLUSTER)
    lacking = count_lacking(elements, before.layout, after.layout, elements.counts).sum(axis=1)
    assert lacking.tolist() == [rows[rank].received_bytes for rank in after.layout.ranks]
    assert moved.total_received == plan.bytes_minimum
    assert moved.total_between == plan.inter_node_bytes_minimum
    assert moved.received == max(row.received_bytes for row in rows.values())
    assert moved.needed == max(after.num_local_elements(rank) for rank in after.layout.ranks)


@given(role=ROLES, source=layouts(), target=layouts())
@settings(max_examples=40, deadline=None)
def test_counting_equal_nodes_once_gives_the_traffic_of_all_nodes(
    role: RoleMemory, source: Layout, target: Layout
) -> None:
    def every_node(before: Any, after: Any, devices_per_node: int) -> tuple[np.ndarray, np.ndarray]:
        nodes = np.unique(np.concatenate((before.ranks, after.ranks)) // devices_per_node)
        return nodes, np.ones_like(nodes)

    places = RoleElements(role), fitting(role, source), fitting(role, target)
    for per_node in (2, 3, 4, 8):  # 16 devices and more, so that ranks may leave a part of the last node free
        cluster = ClusterSpec.parse(f"h100:{16 // per_node + 1}x{per_node}")
        reduced = traffic(*places, cluster)
        with mock.patch.object(traffic_module, "_distinct_nodes", every_node):
            assert reduced == traffic(*places, cluster)


def test_nodes_are_equal_only_if_all_their_devices_hold_the_same() -> None:
    """One of 64 nodes has other ranks than the others, and alone receives across nodes."""
    elements, cluster = RoleElements(DECODER), ClusterSpec.parse("h100:64x8")
    source, target = Layout.parse("dp252@0-251"), Layout.parse("dp256@0-255")
    last = traffic(elements, source, target, cluster)
    assert last.total_received == 4 * elements.num_elements  # ranks 252 to 255
    assert last.total_between == 0  # rank 251 is next to them
    apart = traffic(elements, Layout.parse("dp248@0-247"), target, cluster)
    assert (apart.total_received, apart.total_between) == (8 * elements.num_elements, elements.num_elements)
    assert apart.received_between == elements.num_elements / 8


def test_a_source_sends_the_elements_that_the_planner_assigns_to_it() -> None:
    """Balanced cases from the planner: shards to replicas on one node, then across two."""
    for source, target in (("fsdp4@0-3", "dp4@0-3"), ("fsdp4@0-3", "tp4@4-7"), ("dp2.tp2@0-3", "fsdp4@4-7")):
        before, after = Layout.parse(source), Layout.parse(target)
        plan = plan_reallocation(
            ModelLayout(DECODER.model, before), ModelLayout(DECODER.model, after), CLUSTER, element_bytes=1
        )
        moved = traffic(RoleElements(DECODER), before, after, CLUSTER)
        sent = max(plan.bytes_by_rank()[rank].sent_bytes for rank in before.ranks)
        assert max(moved.sent_inside, moved.sent_between) == pytest.approx(sent, rel=0.05)


def test_only_trained_parameters_move_if_replicas_keep_the_others() -> None:
    elements, source, target = RoleElements(ADAPTED), Layout.parse("fsdp4"), Layout.parse("dp4")
    trained = 4 * 2 * 6 * 64  # two adapters of six ranks in each of four blocks
    assert elements.num_trained == trained
    assert traffic(elements, source, target, CLUSTER, trained_only=True).needed == trained
    assert traffic(elements, source, target, CLUSTER).needed == elements.num_elements


@given(role=st.sampled_from((DECODER, BIASED)), layout=layouts())
@settings(max_examples=40, deadline=None)
def test_where_degrees_divide_all_sizes_the_fullest_rank_has_even_shares(role: RoleMemory, layout: Layout) -> None:
    dims, model = layout.dims, role.model
    runs = model.stage_blocks(dims.num_runs)
    stages = [0.0] * dims.pp
    for param in model.params:
        stage = next((i for i, run in enumerate(runs) if param.block in run), 0 if param.section == "input" else -1)
        # Under tp=4 and tp=8, two and four ranks hold each of the two key-value heads.
        degree = 1 if param.tensor_cut is None else min(dims.tp, 2) if param.tensor_cut.replicate_units else dims.tp
        stages[stage % dims.pp] += param.numel / degree / dims.fsdp
    elements, firsts = RoleElements(role), layout.group(layout.ranks[0], *layout.stage_axes)
    assert [elements.on_rank(layout, rank).num_sharded for rank in firsts] == stages


@given(role=ROLES, layout=layouts())
@settings(max_examples=40, deadline=None)
def test_the_first_rank_of_the_first_or_the_last_stage_holds_the_most(role: RoleMemory, layout: Layout) -> None:
    layout = fitting(role, layout)
    held, elements = ModelLayout(role.model, layout), RoleElements(role)
    fullest = max(held.num_local_elements(rank) for rank in layout.ranks)
    assert max(sizes.num_sharded for sizes in elements.on_stages(layout.dims)) == fullest
    for rank in layout.ranks:
        assert held.num_local_elements(rank) <= elements.on_rank(layout, rank).num_sharded <= fullest
