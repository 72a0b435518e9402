"""Rounds of a schedule are the same on every rank, within their bound, and in order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.errors import PlanError
from lightning_realloc.layout import ClusterSpec, Layout, ModelLayout
from lightning_realloc.realloc import plan_reallocation, schedule_transfers
from tests.layout.examples import LLAMA_7B, SMALL, clusters, layout_pairs
from tests.realloc.simulate import carry_out, weights

Pair = tuple[ModelLayout, ModelLayout]
bounds = st.sampled_from([2, 7, 16, 50, 100_000])


@settings(max_examples=25, deadline=None)
@given(layout_pairs(), clusters, bounds)
def test_no_rank_stages_more_than_the_bound_in_either_direction(
    pair: Pair, cluster: ClusterSpec | None, bound: int
) -> None:
    plan = plan_reallocation(*pair, cluster)
    for transfers in schedule_transfers(plan, max_staging_bytes=bound).rounds:
        sent, received = Counter[int](), Counter[int]()
        for transfer in transfers:
            sent[transfer.sender] += transfer.numel * plan.element_bytes
            received[transfer.receiver] += transfer.numel * plan.element_bytes
        assert transfers and max((*sent.values(), *received.values())) <= bound


@settings(max_examples=25, deadline=None)
@given(layout_pairs(), clusters, bounds)
def test_the_rounds_move_all_of_the_plan_and_hop_1_comes_last(
    pair: Pair, cluster: ClusterSpec | None, bound: int
) -> None:
    source, target = pair
    schedule = schedule_transfers(plan_reallocation(source, target, cluster), max_staging_bytes=bound)
    in_rounds = [transfer for transfers in schedule.rounds for transfer in transfers]
    assert carry_out([*schedule.kept, *in_rounds], weights(source), target) == weights(target)
    hops = [{transfer.hop for transfer in transfers} for transfers in schedule.rounds]
    assert all(len(present) == 1 for present in hops)
    assert [min(present) for present in hops] == sorted(min(present) for present in hops)


@settings(max_examples=25, deadline=None)
@given(layout_pairs(), clusters, bounds)
def test_a_share_has_the_rounds_of_the_whole_plan(pair: Pair, cluster: ClusterSpec | None, bound: int) -> None:
    plan = plan_reallocation(*pair, cluster)
    whole = schedule_transfers(plan, max_staging_bytes=bound)
    for rank in plan.ranks:
        share = schedule_transfers(plan_reallocation(*pair, cluster, rank=rank), max_staging_bytes=bound)
        assert share.kept == tuple(t for t in whole.kept if t.sender == rank)
        assert len(share.rounds) == len(whole.rounds)
        for mine, everybodys in zip(share.rounds, whole.rounds, strict=True):
            assert mine == tuple(t for t in everybodys if rank in (t.sender, t.receiver))


def test_elements_are_spread_inside_a_node_only_after_they_arrived() -> None:
    source, target = ModelLayout(SMALL, Layout.parse("dp1@0")), ModelLayout(SMALL, Layout.parse("dp2@2-3"))
    plan = plan_reallocation(source, target, ClusterSpec.parse("h100:2x2"), element_bytes=1)
    hops = [{t.hop for t in transfers} for transfers in schedule_transfers(plan, max_staging_bytes=256).rounds]
    first_spread = hops.index({1})
    assert first_spread > 1 and hops == [{0}] * first_spread + [{1}] * (len(hops) - first_spread)


def test_rounds_are_at_least_half_full() -> None:
    # All of the small model, replicated from four FSDP ranks, in rounds of 64 bytes: a perfect packing would need
    # the received bytes of one rank / 64.
    plan = plan_reallocation(
        ModelLayout(SMALL, Layout.parse("fsdp4")), ModelLayout(SMALL, Layout.parse("dp4")), element_bytes=1
    )
    needed = max(row.received_bytes for row in plan.bytes_by_rank().values()) / 64
    assert len(schedule_transfers(plan, max_staging_bytes=64).rounds) <= 2 * needed


def test_pipeline_stages_send_in_the_same_rounds() -> None:
    # One stage after the other would take four times the rounds that the busiest rank needs.
    source, target = Layout.parse("pp4.fsdp16"), Layout.parse("dp8.tp8")
    plan = plan_reallocation(ModelLayout(LLAMA_7B, source), ModelLayout(LLAMA_7B, target), rank=0)
    busiest = max(max(row.sent_bytes, row.received_bytes) for row in plan.bytes_by_rank().values())
    assert len(schedule_transfers(plan, max_staging_bytes=2**26).rounds) <= 1.5 * busiest / 2**26


def test_a_bound_below_one_element_is_refused() -> None:
    plan = plan_reallocation(ModelLayout(SMALL, Layout.parse("fsdp2")), ModelLayout(SMALL, Layout.parse("dp2")))
    with pytest.raises(PlanError, match=r"max_staging_bytes=1 must hold an element of 2 bytes; raise the bound"):
        schedule_transfers(plan, max_staging_bytes=1)
