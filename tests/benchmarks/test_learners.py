"""Learners of all algorithms, their scores and their targets."""

from __future__ import annotations

import random

import pytest

import lightning_realloc
from benchmarks import learners
from benchmarks.harness import BenchmarkReport
from benchmarks.learners import QUICK, Course, Learner
from tests.workers import WorkerPool


def test_every_algorithm_has_a_learner() -> None:
    asked = {learner.make.args[0] for learner in learners.learners().values()}  # type: ignore[attr-defined]
    package = {name: getattr(lightning_realloc, name) for name in lightning_realloc.__all__}
    modules = {n for n, kind in package.items() if isinstance(kind, type) and hasattr(kind, "dataflow_of")}
    assert asked == modules - {"MultiModelModule", "PolicyGradient"}


def test_the_final_score_is_the_mean_of_the_last_steps_or_the_held_out_one() -> None:
    course = Course((0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0), (), (9.0, 1.0, 2.0, 3.0, 4.0, 5.0), 1.0)
    assert (course.first, course.final, course.divergence) == (0.0, 4.0, 3.0)
    course = Course((0.5, 0.75), (), (), 1.0)
    assert (course.first, course.final, course.divergence) == (0.5, 0.75, 0.0)


def test_a_mean_over_seeds_must_rise_or_fall_far_enough() -> None:
    courses = {"up": [Course((0.1, 0.3), (1.0,), (), 1.0), Course((0.1, 0.5), (2.0,), (), 1.0)]}
    courses |= {"down": courses["up"]}
    known = {
        name: Learner(make=lambda *_: (None, None), metric="val/x", reach=reach, falls=name == "down")
        for name, reach in (("up", 0.4), ("down", 0.39))
    }
    report = BenchmarkReport("learners")
    learners.fill(report, courses, known)
    assert [(target.value, target.met) for target in report.targets] == [(pytest.approx(0.4), True), (0.4, False)]
    assert report.rows[0]["least"] == 0.3 and report.rows[0]["most"] == 0.5


def test_right_steps_end_in_a_vowel() -> None:
    rows = [learners._steps(QUICK.task, random.Random(seed)) for seed in range(20)]
    for row in rows:
        assert row["labels"] == [step[-1] in "aeiou" for step in row["completions"]]
    assert {label for row in rows for label in row["labels"]} == {True, False}


def learn_quickly(names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Run some learners for two steps; return how many scores and gradients each left."""
    known = {name: learners.learners()[name] for name in names}
    found = learners.learn(known, QUICK, [0])
    return {name: (len(course.scores), len(course.gradients)) for name, (course,) in found.items()}


def test_learners_of_every_kind_run(workers: WorkerPool) -> None:
    names = ("distillation, js", "KTO")
    (found,) = workers.run(learn_quickly, names, world_size=1, init_process_group=False, deadline_s=120.0)
    assert found == dict.fromkeys(names, (2, 2))
