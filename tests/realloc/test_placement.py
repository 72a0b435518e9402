"""The chosen rank order moves the fewest bytes among those that cross the fewest node borders."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import ClusterSpec, Layout, ModelLayout, ModelSpec, ParallelDims, ParamSpec
from lightning_realloc.realloc import choose_rank_order, plan_reallocation
from lightning_realloc.realloc.placement import assign_jobs
from tests.layout.examples import LLAMA_7B, SMALL, layout_pairs


def moved(source: ModelLayout, layout: Layout) -> int:
    return plan_reallocation(source, ModelLayout(source.model, layout), rank=0).bytes_moved


def crossings(layout: Layout, cluster: ClusterSpec) -> int:
    return sum(len({cluster.node_of(rank) for rank in group}) - 1 for group in layout.groups("tp"))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2), st.randoms(use_true_random=False))
def test_assignment_is_optimal(workers: int, spare: int, rng: random.Random) -> None:
    gains = [[rng.randint(-3, 9) for _ in range(workers + spare)] for _ in range(workers)]
    jobs = assign_jobs(gains)
    assert len(set(jobs)) == workers
    best = max(
        sum(gains[worker][job] for worker, job in enumerate(order))
        for order in itertools.permutations(range(workers + spare), workers)
    )
    assert sum(gains[worker][job] for worker, job in enumerate(jobs)) == best


@settings(max_examples=20, deadline=None)
@given(layout_pairs(), st.sampled_from([None, "2x4", "4x2"]))
def test_no_other_order_of_few_ranks_is_better(pair: tuple[ModelLayout, ModelLayout], nodes: str | None) -> None:
    source, dims, ranks = pair[0], pair[1].layout.dims, pair[1].layout.ranks
    assume(len(ranks) <= 4)
    cluster = ClusterSpec.parse(f"h100:{nodes or '1x8'}")
    chosen = choose_rank_order(source, dims, ranks, cluster)
    assert sorted(chosen.ranks) == sorted(ranks)
    orders = (Layout(dims, order) for order in itertools.permutations(ranks))
    best = min((crossings(o, cluster), moved(source, o)) for o in orders)
    assert (crossings(chosen, cluster), moved(source, chosen)) == best


def test_tensor_parallel_groups_go_where_their_fsdp_chunks_lie() -> None:
    # Ranks 0, 1 hold the first half of every column-wise weight: with (0, 2) and (1, 3) as tp groups they keep it.
    source = ModelLayout(LLAMA_7B, Layout.parse("fsdp4"))
    chosen = choose_rank_order(source, ParallelDims(dp=2, tp=2), range(4))
    assert str(chosen) == "dp2.tp2@0,2,1,3"
    assert moved(source, chosen) < 0.8 * moved(source, Layout.parse("dp2.tp2"))


def test_equal_parameters_count_as_often_as_they_occur() -> None:
    # The first of two chunks has two of three rows. Rank 0 keeps 10 elements more there, and rank 1 keeps 5 * 4 more.
    params = [ParamSpec("embed", (3, 10), section="input")]
    params += [ParamSpec(f"head.{index}", (3, 4), section="output") for index in range(5)]
    source = ModelLayout(ModelSpec(tuple(params), num_blocks=2), Layout.parse("pp2"))
    assert choose_rank_order(source, ParallelDims(fsdp=2), range(2)).ranks == (1, 0)


def test_the_given_order_wins_ties() -> None:
    source = ModelLayout(SMALL, Layout.parse("dp4"))
    for ranks in ((0, 1, 2, 3), (3, 1, 0, 2)):
        assert choose_rank_order(source, ParallelDims(dp=4), ranks).ranks == ranks


@pytest.mark.parametrize("dims", ["dp8.tp8", "dp16.tp4", "dp4.fsdp4.tp4"])
def test_tensor_parallel_groups_stay_inside_nodes(dims: str) -> None:
    cluster = ClusterSpec.parse("h100:8x8")
    source = ModelLayout(LLAMA_7B, Layout.parse("dp8.fsdp8"))
    shuffled = random.Random(0).sample(range(64), 64)
    assert crossings(choose_rank_order(source, ParallelDims.parse(dims), shuffled, cluster), cluster) == 0


def test_fsdp_chunks_go_where_their_tensor_parallel_shards_lie() -> None:
    # Column-wise shard t of 8 is FSDP's chunks 8t to 8t+7 of 64, which the eight replicas of shard t can take.
    source = ModelLayout(LLAMA_7B, Layout.parse("dp8.tp8"))
    chosen = choose_rank_order(source, ParallelDims(fsdp=64), range(64))
    assert moved(source, chosen) < 0.3 * moved(source, Layout.parse("fsdp64"))


def test_a_group_too_large_for_a_node_crosses_as_few_borders_as_it_can() -> None:
    cluster = ClusterSpec.parse("h100:2x3")
    source = ModelLayout(SMALL, Layout.parse("fsdp6"))
    # Three ranks a node: one tp pair in each, and the third pair of the two left over.
    assert crossings(choose_rank_order(source, ParallelDims(dp=3, tp=2), range(6), cluster), cluster) == 1


@pytest.mark.parametrize(
    ("source", "target"), [("fsdp64", "dp8.tp8"), ("dp8.fsdp8", "dp16.tp4"), ("pp4.fsdp16", "dp8.tp8")]
)
def test_many_ranks_never_move_more_than_in_their_natural_order(source: str, target: str) -> None:
    model, natural = ModelLayout(LLAMA_7B, Layout.parse(source)), Layout.parse(target)
    assert moved(model, choose_rank_order(model, natural.dims, natural.ranks)) < moved(model, natural)


def test_degrees_that_do_not_fit_ranks_or_model_are_refused() -> None:
    source = ModelLayout(SMALL, Layout.parse("fsdp4"))
    with pytest.raises(LayoutError, match=r"multiply to 2 but 4 ranks"):
        choose_rank_order(source, ParallelDims(tp=2), range(4))
    with pytest.raises(LayoutError, match=r"tp=5 must not exceed the number of heads"):
        choose_rank_order(source, ParallelDims(tp=5), range(5))
