"""Properties of plans over arbitrary layouts, checked against sets of elements."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.errors import PlanError
from lightning_realloc.layout import ClusterSpec, Layout, ModelLayout, ModelSpec, ParamSpec
from lightning_realloc.realloc import ReallocationPlan, plan_reallocation
from tests.layout.examples import LLAMA_7B, LLAMA_70B, SMALL, clusters, layout_pairs
from tests.realloc.simulate import carry_out, elements, reordered, weights

Pair = tuple[ModelLayout, ModelLayout]
properties = settings(max_examples=25, deadline=None)


def lay(text: str, model: ModelSpec = SMALL) -> ModelLayout:
    return ModelLayout(model, Layout.parse(text))


@properties
@given(layout_pairs(), clusters)
def test_the_target_is_tiled_exactly_once_with_elements_that_senders_hold(
    pair: Pair, cluster: ClusterSpec | None
) -> None:
    # carry_out fails when an element is written twice or read where its sender holds nothing.
    source, target = pair
    plan = plan_reallocation(source, target, cluster)
    assert carry_out(plan.transfers, weights(source), target) == weights(target)


@properties
@given(layout_pairs(), clusters)
def test_there_and_back_restores_every_element(pair: Pair, cluster: ClusterSpec | None) -> None:
    source, target = pair
    before = weights(source)
    there = carry_out(plan_reallocation(source, target, cluster).transfers, before, target)
    assert carry_out(plan_reallocation(target, source, cluster).transfers, there, source) == before


@properties
@given(layout_pairs(), clusters, st.sampled_from([1, 2, 4]))
def test_every_rank_receives_exactly_the_elements_that_it_lacks(
    pair: Pair, cluster: ClusterSpec | None, element_bytes: int
) -> None:
    source, target = pair
    plan = plan_reallocation(source, target, cluster, element_bytes=element_bytes)
    held, needed = weights(source), weights(target)
    moves = [transfer for transfer in plan.transfers if transfer.sender != transfer.receiver]
    received = Counter({rank: 0 for rank in plan.ranks})
    for transfer in moves:
        received[transfer.receiver] += transfer.numel * element_bytes
    for rank in plan.ranks:
        missing = elements(needed, [rank]) - elements(held, [rank])
        assert received[rank] == len(missing) * element_bytes
        assert plan.bytes_by_rank()[rank].received_bytes == received[rank]
    assert plan.bytes_moved == plan.bytes_minimum == sum(received.values())
    assert plan.bytes_moved == sum(row.sent_bytes for row in plan.bytes_by_rank().values())


@properties
@given(layout_pairs(), clusters)
def test_each_missing_element_enters_a_node_once(pair: Pair, cluster: ClusterSpec | None) -> None:
    source, target = pair
    plan = plan_reallocation(source, target, cluster, element_bytes=1)
    held, needed = weights(source), weights(target)
    node_of = dict(plan.nodes)
    minimum = 0
    for node in set(node_of.values()):
        members = [rank for rank in plan.ranks if node_of[rank] == node]
        minimum += len(elements(needed, members) - elements(held, members))
    crossing = [t for t in plan.transfers if node_of[t.sender] != node_of[t.receiver]]
    assert sum(transfer.numel for transfer in crossing) == minimum
    assert plan.inter_node_bytes == plan.inter_node_bytes_minimum == minimum
    assert all(transfer.hop == 0 for transfer in crossing), "only what arrived in a node is spread, and inside it"


@properties
@given(layout_pairs(), clusters, st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_parameters(
    pair: Pair, cluster: ClusterSpec | None, rng: random.Random
) -> None:
    source, target = pair
    names = [param.name for param in source.model.params]
    order = dict(zip(names, rng.sample(range(len(names)), len(names)), strict=True))
    plan = plan_reallocation(source, target, cluster)
    other = plan_reallocation(reordered(source, order), reordered(target, order), cluster)
    assert other.transfers == plan.transfers
    assert other.digest == plan.digest


@properties
@given(layout_pairs(), clusters)
def test_the_shares_of_all_ranks_are_the_whole_plan(pair: Pair, cluster: ClusterSpec | None) -> None:
    source, target = pair
    plan = plan_reallocation(source, target, cluster)
    for rank in (*plan.ranks, 99):
        share = plan_reallocation(source, target, cluster, rank=rank)
        assert share == plan.share(rank)
        assert share.digest == plan.digest
        assert share.transfers == tuple(t for t in plan.transfers if rank in (t.sender, t.receiver))
        assert (share.bytes_moved, share.bytes_by_rank()) == (plan.bytes_moved, plan.bytes_by_rank())
    assert {t for rank in plan.ranks for t in plan.share(rank).transfers} == set(plan.transfers)
    assert len(set(plan.transfers)) == len(plan.transfers)
    assert hash(plan) == hash(plan_reallocation(source, target, cluster))


def test_the_digest_differs_for_every_input() -> None:
    renamed = ModelSpec((*SMALL.params[:-1], ParamSpec("head", SMALL.params[-1].shape, section="output")), 2)
    plans: list[ReallocationPlan] = [
        plan_reallocation(lay("fsdp4"), lay("dp2.tp2")),
        plan_reallocation(lay("dp2.tp2"), lay("fsdp4")),
        plan_reallocation(lay("fsdp4"), lay("dp2.tp2@0,2,1,3")),
        plan_reallocation(lay("fsdp4"), lay("dp2.tp2"), element_bytes=4),
        plan_reallocation(lay("fsdp4"), lay("dp2.tp2"), ClusterSpec.parse("h100:2x2")),
        plan_reallocation(lay("fsdp4", renamed), lay("dp2.tp2", renamed)),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_nothing_moves_between_equal_layouts() -> None:
    plan = plan_reallocation(lay("fsdp2.tp2"), lay("fsdp2.tp2"))
    assert plan.bytes_moved == 0
    assert all(t.sender == t.receiver and t.sender_offset == t.receiver_offset for t in plan.transfers)


def test_a_replica_on_the_same_node_sends() -> None:
    # dp4 over two nodes of two, then a rank of the second node that holds nothing yet: its neighbour sends all.
    plan = plan_reallocation(lay("dp2@0,2"), lay("dp1@3"), ClusterSpec.parse("h100:2x2"))
    assert {transfer.sender for transfer in plan.transfers} == {2}


def test_a_missing_piece_is_spread_from_the_rank_that_received_it() -> None:
    # Rank 0 holds everything; node 1 (ranks 2, 3) needs all of it: one copy crosses, the other is made inside.
    plan = plan_reallocation(lay("dp1@0"), lay("dp2@2-3"), ClusterSpec.parse("h100:2x2"), element_bytes=1)
    assert plan.inter_node_bytes == SMALL.num_elements
    assert plan.bytes_moved == 2 * SMALL.num_elements
    assert {(t.sender, t.receiver) for t in plan.transfers if t.hop == 1} <= {(2, 3), (3, 2)}
    assert {t.receiver for t in plan.transfers if t.hop == 0} == {2, 3}, "both bring a part into the node"


def test_replicas_share_the_sending_evenly() -> None:
    # Four replicas feed four new ranks: with enough parameters each sends about a quarter.
    wide = ModelSpec(tuple(ParamSpec(f"w{i}", (8, 8), block=i) for i in range(16)), 16)
    plan = plan_reallocation(lay("dp4@0-3", wide), lay("fsdp4@4-7", wide), element_bytes=1)
    assert [plan.bytes_by_rank()[rank].sent_bytes for rank in range(4)] == [16 * 64 // 4] * 4


@pytest.mark.parametrize(
    ("source", "target"),
    [("dp8.fsdp8", "dp8.tp8"), ("fsdp64", "dp8.tp8"), ("pp4.fsdp16", "dp8.tp8"), ("dp8.fsdp8", "dp64")],
)
def test_all_ranks_send_about_as_much_of_a_real_model(source: str, target: str) -> None:
    plan = plan_reallocation(lay(source, LLAMA_7B), lay(target, LLAMA_7B), ClusterSpec.parse("h100:8x8"), rank=0)
    sent = [row.sent_bytes for row in plan.bytes_by_rank().values()]
    assert max(sent) <= 1.15 * sum(sent) / len(sent)


@pytest.mark.parametrize("cluster", [None, ClusterSpec.parse("h100:8x8")], ids=["flat", "nodes"])
def test_planning_7b_on_64_ranks_takes_under_a_second(cluster: ClusterSpec | None) -> None:
    for source, target in (("fsdp64", "dp8.tp8"), ("fsdp16.tp4", "dp8.tp8"), ("dp8.tp8", "fsdp64")):
        begin = time.process_time()
        plan_reallocation(lay(source, LLAMA_7B), lay(target, LLAMA_7B), cluster, rank=5)
        assert time.process_time() - begin < 1.0


@pytest.mark.exhaustive  # sizes of plans: above
def test_planning_70b_on_256_ranks_takes_under_eight_seconds() -> None:
    cluster = ClusterSpec.parse("h100:32x8")
    for source, target in (("fsdp256", "dp32.tp8"), ("fsdp32.tp8", "dp32.tp8")):
        begin = time.process_time()
        plan_reallocation(lay(source, LLAMA_70B), lay(target, LLAMA_70B), cluster, rank=5)
        assert time.process_time() - begin < 8.0


def test_the_summary_gives_bytes_per_rank_and_per_link() -> None:
    plan = plan_reallocation(lay("fsdp4"), lay("dp2.tp2"), ClusterSpec.parse("h100:2x2"))
    lines = plan.summary().splitlines()
    assert lines[0].startswith("fsdp4@0-3 -> dp2.tp2@0-3, 21 parameters")
    assert "moved" in lines[1] and "minimum" in lines[1] and "between nodes" in lines[1]
    assert [line.split()[:2] for line in lines[3:7]] == [["0", "0"], ["1", "0"], ["2", "1"], ["3", "1"]]
    assert plan.digest[:16] in lines[-1]


def test_the_summary_of_many_ranks_stays_short() -> None:
    lines = plan_reallocation(lay("fsdp64", LLAMA_7B), lay("dp8.tp8", LLAMA_7B), rank=0).summary().splitlines()
    assert len(lines) == 3 + 32 + 2
    assert lines[-2].startswith("… and 32 more; the most that one of all ranks sends is 1.")


def test_impossible_reallocations_are_refused() -> None:
    other = ModelSpec((ParamSpec("w", (4,), block=0),), 1)
    longer = ModelSpec((ParamSpec("w", (5,), block=0),), 1)
    with pytest.raises(PlanError, match=r"only the source has 'lm_head.weight'; use the same ModelSpec"):
        plan_reallocation(lay("dp1"), lay("dp1", other))
    with pytest.raises(PlanError, match=r"'w' has shape \(4,\) in the source but \(5,\) in the target"):
        plan_reallocation(lay("dp1", other), lay("dp1", longer))
    with pytest.raises(PlanError, match=r"rank 4 of dp1@0 -> dp1@4 is outside a cluster of 2x2 devices; use fewer"):
        plan_reallocation(lay("dp1"), lay("dp1@4"), ClusterSpec.parse("h100:2x2"))
    with pytest.raises(PlanError, match=r"element_bytes=0 must be at least 1"):
        plan_reallocation(lay("dp1"), lay("dp1"), element_bytes=0)
