"""Deliveries over arbitrary layouts and hosts: each element enters a host once, and ranks read all that they need."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.layout import ClusterSpec, Layout, ModelLayout
from lightning_realloc.realloc import plan_reallocation
from lightning_realloc.realloc.delivery import messages_from, plan_delivery, sends_on
from tests.layout.examples import SMALL, WORLD_SIZE, layout_pairs
from tests.realloc.simulate import box, weights

HOSTS = st.sampled_from([None, *(ClusterSpec.parse(f"h100:{text}") for text in ("1x16", "2x8", "4x4", "6x3", "16x1"))])
properties = settings(max_examples=25, deadline=None)


def apart(pair: tuple[ModelLayout, ModelLayout]) -> tuple[ModelLayout, ModelLayout]:
    """Return the pair with a target on ranks that the source has not."""
    source, target = pair
    ranks = tuple(rank + WORLD_SIZE for rank in target.layout.ranks)
    return source, ModelLayout(target.model, replace(target.layout, ranks=ranks))


@properties
@given(layout_pairs().map(apart), HOSTS)
def test_every_rank_reads_each_element_that_it_needs_once(
    pair: tuple[ModelLayout, ModelLayout], hosts: ClusterSpec | None
) -> None:
    source, target = pair
    plan, held, needed = plan_reallocation(source, target, hosts), weights(source), weights(target)
    for rank in target.layout.ranks:
        delivery = plan_delivery(plan, rank)
        found = {name: dict[tuple[int, ...], int]() for name in target.names(rank)}
        for message, reads in zip(delivery.messages, delivery.reads, strict=True):
            for index, offset in reads.items():
                transfer = message.transfers[index]
                local, filled = held[message.sender, transfer.param], found[transfer.param]
                places = zip(box(offset, transfer.shape), box(transfer.sender_offset, transfer.shape), strict=True)
                for place, origin in places:
                    assert place not in filled
                    filled[place] = local[origin]
        assert found == {name: needed[rank, name] for name in target.names(rank)}


@properties
@given(layout_pairs().map(apart), HOSTS)
def test_senders_and_hosts_know_the_same_messages_and_readers(
    pair: tuple[ModelLayout, ModelLayout], hosts: ClusterSpec | None
) -> None:
    source, target = pair
    plan = plan_reallocation(source, target, hosts)
    sent = [each for rank in source.layout.ranks for each in messages_from(plan.share(rank), rank)]
    deliveries = {rank: plan_delivery(plan.share(rank), rank) for rank in target.layout.ranks}
    received = {(each.sender, each.receiver): each for found in deliveries.values() for each in found.messages}
    assert received == {(each.sender, each.receiver): each for each in sent}
    for rank, delivery in deliveries.items():
        assert rank in delivery.readers and {each.receiver for each in delivery.messages} <= set(delivery.readers)
        assert all(deliveries[other].messages == delivery.messages for other in delivery.readers)
    assert any(len(delivery.readers) > 1 for delivery in deliveries.values()) or not sends_on(plan)


@properties
@given(layout_pairs().map(apart), HOSTS)
def test_each_element_that_a_host_needs_and_has_not_enters_it_once(
    pair: tuple[ModelLayout, ModelLayout], hosts: ClusterSpec | None
) -> None:
    source, target = pair
    plan = plan_reallocation(source, target, hosts)
    node_of, entered = dict(plan.nodes), Counter[tuple[int, str, int]]()
    for rank in source.layout.ranks:
        held = weights(source)
        for message in messages_from(plan.share(rank), rank):
            node = node_of[message.receiver]
            for each in message.transfers if node != node_of[rank] else ():
                for place in box(each.sender_offset, each.shape):
                    entered[node, each.param, held[rank, each.param][place]] += 1
    held_by, needed_by = (
        {(node_of[rank], name, value) for (rank, name), local in weights(layout).items() for value in local.values()}
        for layout in (source, target)
    )
    assert entered == Counter(needed_by - held_by)


@pytest.mark.parametrize("target", ["dp8@8-15", "dp4.tp2@8-15"])
def test_eight_ranks_on_two_hosts_receive_the_weights_twice_instead_of_eight_or_four_times(target: str) -> None:
    source, generating = ModelLayout(SMALL, Layout.parse("dp1@0")), ModelLayout(SMALL, Layout.parse(target))
    hosts = ClusterSpec.parse("h100:4x4")
    shared, separate = (plan_reallocation(source, generating, each) for each in (hosts, None))
    sizes = {
        name: sum(each.numel for message in messages_from(plan.share(0), 0) for each in message.transfers)
        for name, plan in (("shared", shared), ("separate", separate))
    }
    whole = SMALL.num_elements
    assert sizes["shared"] == 2 * whole
    assert sizes["separate"] >= 4 * whole
    landed = Counter(
        {each.receiver: sum(t.numel for t in each.transfers) for each in messages_from(shared.share(0), 0)}
    )
    assert len(landed) == 8, "all ranks of a host take part in landing"
