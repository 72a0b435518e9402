"""Baselines of the search benchmark: enumeration of all plans, and Metropolis-Hastings."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from benchmarks.search import PPO, main, ppo, small_instance
from benchmarks.search_baseline import every_state, metropolis_hastings
from benchmarks.toy_estimator import decoder
from lightning_realloc.layout import Layout
from lightning_realloc.tuning.search.local import SearchProgress
from lightning_realloc.tuning.search.problem import Problem
from lightning_realloc.tuning.search.space import CallOptions, legal_dims, rank_sets


def problem_of(seed: int) -> Problem:
    """Return one of the small problems, without a memory limit."""
    estimator, options, _ = small_instance(seed)
    models = {role: decoder(2, 8, 4) for role in estimator.dataflow.roles}
    return Problem(
        models,
        estimator,
        options=options,
        overlap="iterations",
        memory_budget=1 << 60,
        is_late=lambda: False,
    )


def test_every_combination_of_legal_plans_is_tried_once() -> None:
    problem = problem_of(0)  # prices without infinities, so no option is left out
    counts = []
    for call in problem.calls:
        model, cluster = problem.models[call.role], problem.cluster
        layouts = [
            Layout(dims, ranks.ranks)
            for ranks in rank_sets(cluster)
            for dims in legal_dims(model, call.kind, ranks.size, cluster)
        ]
        counts.append(sum(len(problem.options.plans(call.kind, layout)) for layout in layouts))
    states = [
        (tuple((choice.option.dims, choice.ranks, choice.option.plan) for choice in state), offload)
        for state, offload in every_state(problem)
    ]
    assert len(states) == 2 * counts[0] * counts[1] * counts[2]  # the reference offloaded or not
    assert len(set(states)) == len(states)


def test_the_random_walk_finds_no_plan_better_than_the_best_of_all() -> None:
    problem = problem_of(5)
    best = min(problem.score(*one) for one in every_state(problem))
    progress = SearchProgress(itertools.count().__next__, 1e9, 3000)
    metropolis_hastings(problem, random.Random(0), progress)
    assert progress.evaluations == 3000
    assert progress.best is not None
    assert best <= progress.best
    assert progress.history[0].seconds > progress.best.seconds


def test_small_spaces_are_reported_with_their_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "search.json"
    assert main(["--parts", "a", "--instances", "2", "--strict", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [row["optimal"] for row in written["rows"]] == [row["runs"] for row in written["rows"]]
    assert written["targets"][0]["value"] == 2
    assert "the best" in capsys.readouterr().err


def test_the_large_problem_is_the_named_one() -> None:
    estimator = ppo(16)
    assert estimator.cluster.num_devices == 128
    assert estimator.dataflow is PPO
    sizes = {role: round(model.num_elements / 1e9) for role, model in estimator.models.items()}
    assert sizes == {"actor": 64, "reference": 64, "critic": 6, "reward": 6}
    assert len(CallOptions().plans("train", problem_of(0).tables[0][1][0].plan.layout)) == 8
