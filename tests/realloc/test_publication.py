"""Publication plans: writes fill every distinct shard once, from ranks that hold the elements."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.realloc import plan_publication, plan_reallocation
from tests.layout.examples import LLAMA_7B, SMALL, layout_pairs
from tests.realloc.simulate import publish, reordered, weights

Pair = tuple[ModelLayout, ModelLayout]


@settings(max_examples=25, deadline=None)
@given(layout_pairs())
def test_published_shards_are_the_targets_tensors(pair: Pair) -> None:
    source, target = pair
    plan = plan_publication(source, target, element_bytes=2)
    assert publish(plan, weights(source)) == weights(target)
    assert sum(write.numel for write in plan.writes) * 2 == plan.bytes_written
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
        assert (share.shards, share.digest, share.bytes_written) == (plan.shards, plan.digest, plan.bytes_written)


def test_replicas_are_stored_once() -> None:
    source, target = ModelLayout(SMALL, Layout.parse("fsdp4")), ModelLayout(SMALL, Layout.parse("dp4"))
    plan = plan_publication(source, target, element_bytes=1)
    assert plan.bytes_written == SMALL.num_elements
    assert plan.digest != plan_reallocation(source, target, element_bytes=1).digest


def test_writers_share_the_work_evenly() -> None:
    for text in ("fsdp8", "dp8", "dp2.fsdp4", "dp2.tp4"):
        plan = plan_publication(
            ModelLayout(LLAMA_7B, Layout.parse(text)), ModelLayout(LLAMA_7B, Layout.parse("dp4.tp2"))
        )
        written = dict.fromkeys(range(8), 0)
        for write in plan.writes:
            written[write.writer] += write.numel
        assert max(written.values()) <= 1.05 * sum(written.values()) / 8
