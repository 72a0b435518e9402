"""Publication plans: writes fill every distinct shard once, from ranks that hold the elements."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.layout import ClusterSpec, Layout, ModelLayout
from lightning_realloc.realloc import plan_publication
from tests.layout.examples import LLAMA_7B, SMALL, layout_pairs
from tests.realloc.simulate import elements, publish, reordered, weights

Pair = tuple[ModelLayout, ModelLayout]


@settings(max_examples=25, deadline=None)
@given(layout_pairs())
def test_published_shards_are_the_targets_tensors(pair: Pair) -> None:
    source, target = pair
    plan = plan_publication(source, target, element_bytes=2)
    assert publish(plan, weights(source)) == weights(target)
    assert sum(write.numel for write in plan.writes) == sum(shard.numel for shard in plan.shards)
    for rank in target.layout.ranks:
        shards = plan.shards_of(rank)
        assert set(shards) == set(target.names(rank))
        for name, index in shards.items():
            assert plan.shards[index].shape == target.local_shape(name, rank)


@settings(max_examples=25, deadline=None)
@given(layout_pairs(), st.randoms(use_true_random=False))
def test_shares_equal_the_whole_plan_for_any_order_of_parameters(pair: Pair, rng: random.Random) -> None:
    source, target = pair
    names = [param.name for param in source.model.params]
    order = dict(zip(names, rng.sample(range(len(names)), len(names)), strict=True))
    plan = plan_publication(source, target)
    for rank in source.layout.ranks:
        share = plan_publication(reordered(source, order), reordered(target, order), rank=rank)
        assert share.writes == tuple(write for write in plan.writes if write.writer == rank)
        assert share.shards == plan.shards


@settings(max_examples=25, deadline=None)
@given(layout_pairs(), st.sampled_from([1, 2, 4]))
def test_writes_on_a_node_are_all_that_its_ranks_hold(pair: Pair, per_node: int) -> None:
    source, target = pair
    num_nodes = -(-(1 + max(*source.layout.ranks, *target.layout.ranks)) // per_node)
    cluster = replace(ClusterSpec.local(per_node), num_nodes=num_nodes)
    plan, held, wanted = plan_publication(source, target, cluster), weights(source), weights(target)
    filled = publish(plan, held)
    for shard in plan.shards:
        assert {cluster.node_of(rank) for rank in shard.ranks} == {shard.node}
        neighbours = [rank for rank in source.layout.ranks if cluster.node_of(rank) == shard.node]
        known = {value for name, value in elements(held, neighbours) if name == shard.param}
        for rank in shard.ranks:
            expected = {at: value for at, value in wanted[rank, shard.param].items() if value in known}
            assert filled[rank, shard.param] == expected
    for write in plan.writes:
        assert cluster.node_of(write.writer) == plan.shards[write.shard].node


def test_replicas_are_stored_once() -> None:
    source, target = ModelLayout(SMALL, Layout.parse("fsdp4")), ModelLayout(SMALL, Layout.parse("dp4"))
    plan = plan_publication(source, target)
    assert sum(shard.numel for shard in plan.shards) == SMALL.num_elements


def test_writers_share_the_work_evenly() -> None:
    for text in ("fsdp8", "dp8", "dp2.fsdp4", "dp2.tp4"):
        plan = plan_publication(
            ModelLayout(LLAMA_7B, Layout.parse(text)), ModelLayout(LLAMA_7B, Layout.parse("dp4.tp2"))
        )
        written = dict.fromkeys(range(8), 0)
        for write in plan.writes:
            written[write.writer] += write.numel
        assert max(written.values()) <= 1.05 * sum(written.values()) / 8
