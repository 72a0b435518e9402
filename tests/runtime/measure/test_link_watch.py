"""Links are measured again after a few slow iterations, and rarely."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from lightning_realloc.runtime.measure.link_watch import MAX_MEASUREMENTS, MIN_USUAL, PATIENCE, LinkWatch

MOVE = "reallocation_s/actor.generate"


def answers(watch: LinkWatch, seconds: Iterable[float], name: str = MOVE) -> list[bool]:
    return [watch.record({name: one, "loss": 100.0 * one}) for one in seconds]


@pytest.mark.parametrize("name", [MOVE, "seconds/actor.train"])
def test_slow_iterations_in_a_row_ask_for_a_measurement(name: str) -> None:
    usual = [0.1, 0.11, 0.09, 0.12, 0.1]
    assert answers(LinkWatch(), [*usual, 0.5, 0.5, 0.5], name) == [False] * 7 + [True]


def test_single_slow_iterations_and_slight_changes_ask_for_none() -> None:
    assert not any(answers(LinkWatch(), [0.1] * 5 + [0.5, 0.5, 0.1] * 5))
    assert not any(answers(LinkWatch(), [0.1] * 5 + [0.19] * 20))
    assert not any(answers(LinkWatch(), [0.001] * 5 + [0.04] * 20))  # too short to matter
    assert not any(answers(LinkWatch(), [0.1] * 5 + [9.0] * 20, "loss"))


def test_slow_first_iterations_are_the_usual_ones() -> None:
    assert not any(answers(LinkWatch(), [9.0] * (MIN_USUAL + PATIENCE)))


def test_another_plan_has_other_usual_seconds() -> None:
    watch = LinkWatch()
    answers(watch, [0.1] * 5)
    watch.restart()
    assert not any(answers(watch, [0.5] * 10))


def test_a_run_measures_a_few_times_at_most() -> None:
    watch = LinkWatch()
    seconds = [2.0**step for step in range(40) for _ in range(MIN_USUAL + 1)]
    assert sum(answers(watch, [*seconds, *seconds])) <= MAX_MEASUREMENTS
    growing = [4.0**step for step in range(8) for _ in range(MIN_USUAL)]
    assert sum(answers(LinkWatch(), growing)) == MAX_MEASUREMENTS
