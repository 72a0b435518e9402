"""The steady state of an iteration, by hand and compared with a simulation of many iterations."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_estimator import RandomEstimator
from benchmarks.toy_estimator import decoder
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.tuning.search.exact import offload_sets
from lightning_realloc.tuning.search.problem import Problem
from lightning_realloc.tuning.search.space import CallOptions, rank_sets
from lightning_realloc.tuning.timeline.iteration_schedule import Overlap
from lightning_realloc.tuning.timeline.simulator import simulate
from lightning_realloc.tuning.timeline.steady_state import WaitGraph, seconds_per_iteration
from tests.matrices import matrix
from tests.tuning.search.test_heuristic import PPO_FLOW

NOTHING: tuple[()] = ()


def test_tasks_on_shared_ranks_run_in_sequence_and_others_at_once() -> None:
    free = [NOTHING, NOTHING]
    assert seconds_per_iteration([3.0, 2.0], WaitGraph.from_masks([0b01, 0b01], free, free), "iterations") == 5.0
    assert seconds_per_iteration([3.0, 2.0], WaitGraph.from_masks([0b01, 0b10], free, free), "iterations") == 3.0
    assert seconds_per_iteration([3.0, 2.0], WaitGraph.from_masks([0b01, 0b10], free, free), "calls") == 3.0
    assert seconds_per_iteration([3.0, 2.0], WaitGraph.from_masks([0b01, 0b10], free, free), "none") == 5.0


def test_the_next_generation_runs_while_the_critic_trains() -> None:
    # Rank 0: generation 4 s, actor's training 3 s. Rank 1: critic's inference 1 s, its training 6 s.
    # Rank 0 is ready after 4 + 1 + 3 = 8 s, and rank 1 works 7 s: the critic trains during the next generation.
    masks, needs = [0b01, 0b10, 0b01, 0b10], [NOTHING, (0,), (0, 1), (1,)]
    carried = [(2,), (3,), NOTHING, NOTHING]
    waits = WaitGraph.from_masks(masks, needs, carried)
    durations = [4.0, 1.0, 3.0, 6.0]
    assert seconds_per_iteration(durations, waits, "iterations") == pytest.approx(8.0)
    assert seconds_per_iteration(durations, waits, "calls") == pytest.approx(11.0)
    assert seconds_per_iteration(durations, waits, "none") == pytest.approx(14.0)


def mean_of_second_half(
    durations: list[float], masks: list[int], needs: list[tuple[int, ...]], iterations: int
) -> float:
    """Return the mean seconds of the second half of many iterations."""
    free = [0.0] * 4
    marks = []
    for _ in range(iterations):
        ends: list[float] = []
        for duration, mask, needed in zip(durations, masks, needs, strict=True):
            ranks = [rank for rank in range(4) if mask >> rank & 1]
            start = max([free[rank] for rank in ranks] + [ends[task] for task in needed])
            ends.append(start + duration)
            for rank in ranks:
                free[rank] = ends[-1]
        marks.append(max(free))
    return (marks[-1] - marks[iterations // 2 - 1]) / (iterations - iterations // 2)


@st.composite
def iterations(draw: st.DrawFn) -> tuple[list[float], list[int], list[tuple[int, ...]]]:
    """Draw durations, ranks and needs of up to six tasks on four ranks."""
    count = draw(st.integers(1, 6))
    durations = [draw(st.integers(0, 20)) / 4 for _ in range(count)]
    masks = [draw(st.integers(1, 15)) for _ in range(count)]
    needs = [tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else () for i in range(count)]
    return durations, masks, needs


@settings(deadline=None, max_examples=200)
@given(iterations())
def test_the_largest_cycle_mean_equals_the_mean_of_many_simulated_iterations(
    drawn: tuple[list[float], list[int], list[tuple[int, ...]]],
) -> None:
    durations, masks, needs = drawn
    found = seconds_per_iteration(durations, WaitGraph.from_masks(masks, needs, [()] * len(masks)), "iterations")
    # Cycles have up to four iterations, and 120 is a multiple of their lengths.
    assert found == pytest.approx(mean_of_second_half(durations, masks, needs, 240), rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(iterations(), st.integers(0, 5))
def test_less_overlap_and_longer_tasks_are_never_faster(
    drawn: tuple[list[float], list[int], list[tuple[int, ...]]], longer: int
) -> None:
    durations, masks, needs = drawn
    waits = WaitGraph.from_masks(masks, needs, [()] * len(masks))
    most, less, least = (seconds_per_iteration(durations, waits, kind) for kind in ("iterations", "calls", "none"))
    assert most <= less + 1e-9 <= least + 2e-9
    durations[longer % len(durations)] += 1.0
    assert seconds_per_iteration(durations, waits, "iterations") >= most - 1e-9


SETTINGS: list[tuple[Overlap, int | None, int]] = list(product(["iterations", "calls", "none"], [None, 1], [1, 3]))
"""Overlap, cores of a node and generation chunks."""
BOUNDARIES = [(setting, number) for number, setting in enumerate(SETTINGS)]
"""Every setting once, with even and odd seeds."""


@pytest.mark.parametrize(("setting", "seed"), matrix(product(SETTINGS, range(20)), *BOUNDARIES))
def test_the_search_and_the_simulator_agree_on_whole_plans(setting: tuple[Overlap, int | None, int], seed: int) -> None:
    overlap, cores, parts = setting
    cluster = replace(ClusterSpec.local(2), num_nodes=3)
    sharers = {"reference": "actor"} if seed % 2 and cores is None else {}  # its base moves in the first iteration
    estimator = RandomEstimator(dataflow=PPO_FLOW, cluster=cluster, seed=seed, cores_per_node=cores, sharers=sharers)
    models = {role: decoder(2, 4, 4) for role in PPO_FLOW.roles}
    problem = Problem(
        models,
        estimator,
        options=CallOptions(),
        overlap=overlap,
        memory_budget=10**6,
        is_late=lambda: False,
        generation_chunks=parts,
    )
    rng = random.Random(seed)
    sets, state = list(rank_sets(cluster)), []
    for table in problem.tables:
        ranks = rng.choice([one for one in sets if one.size in table])
        state.append(problem.place(rng.choice(table[ranks.size]), ranks))
    many = 240 if cores is None else 4  # on shared cores both take the mean over the same iterations
    offload = rng.choice(offload_sets(problem))
    plan = problem.execution_plan(state, offload)
    timeline = simulate(plan, estimator, iterations=many, overlap=overlap, generation_chunks=parts)
    assert problem.score(state, offload).seconds == pytest.approx(timeline.seconds_per_iteration, rel=1e-6)
