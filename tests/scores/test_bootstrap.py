"""Intervals and comparisons, next to a bootstrap in plain Python with the same resamples, and over many runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lightning_realloc.scores import bootstrap
from lightning_realloc.scores.bootstrap import NUM_RESAMPLES, compare, intervals
from lightning_realloc.scores.question_scores import QuestionScores, Response, pass_at_k


def drawn_scores(
    seed: int, chances: Sequence[float], n: int, *, name: str = "q", ks: tuple[int, ...] | None = None
) -> QuestionScores:
    """Return the scores of a model with these chances to be right, in one of two answers."""
    generator = np.random.default_rng(seed)
    asked = {}
    for number, chance in enumerate(chances):
        right = (generator.random(n) < chance).tolist()
        asked[f"{name}{number:04}"] = [Response(one, one) for one in right]
    return QuestionScores.from_responses(asked, ks, reads_answers=True)


def difficulties(seed: int, number: int) -> Sequence[float]:
    """Return chances to be right, many of them near 0 and 1."""
    return np.random.default_rng(1000 + seed).beta(0.6, 0.6, number).tolist()


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, linear between the two values next to it."""
    ordered, place = sorted(values), share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def plain_means(counts: Sequence[tuple[int, int]], k: int | None, places: Sequence[int]) -> float:
    """Return the accuracy, or pass@k of the questions with k responses, of questions chosen by their places."""
    chosen = [counts[place] for place in places]
    if k is None:
        return sum(right for _, right in chosen) / sum(n for n, _ in chosen)
    chances = [pass_at_k(n, right, k) for n, right in chosen if n >= k]
    return sum(chances) / len(chances)


@pytest.mark.parametrize("block", [1 << 22, 100])
def test_intervals_equal_a_bootstrap_in_plain_python(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(bootstrap, "_MAX_DRAWN", block)  # in blocks, or all at once
    counts = [(4, 1), (4, 4), (3, 0), (4, 2), (2, 2), (4, 3), (4, 0), (1, 1), (4, 4), (4, 1), (3, 2)]
    scores = QuestionScores(
        questions=tuple(f"q{number:02}" for number in range(11)), num_responses=tuple(n for n, _ in counts),
        num_right=tuple(right for _, right in counts), ks=(2, 4),
    )  # fmt: skip
    draws = np.random.default_rng(0).integers(11, size=(NUM_RESAMPLES, 11)).tolist()
    found = intervals(scores)
    assert list(found) == ["accuracy", "pass@2", "pass@4"]
    for name, k in (("accuracy", None), ("pass@2", 2), ("pass@4", 4)):
        means = [plain_means(counts, k, places) for places in draws]
        expected = (plain_means(counts, k, range(11)), quantile(means, 0.025), quantile(means, 0.975))
        assert tuple(found[name]) == pytest.approx(expected, rel=1e-14)


def test_paired_and_unpaired_differences_equal_those_in_plain_python() -> None:
    chances = difficulties(0, 40)
    first, second = drawn_scores(0, chances, 4), drawn_scores(1, chances[10:], 4)
    renamed = QuestionScores.from_json(second.to_json() | {"questions": [f"q{number:04}" for number in range(10, 40)]})
    ours, theirs = first.num_right[10:], renamed.num_right
    draws = np.random.default_rng(0).integers(30, size=(NUM_RESAMPLES, 30)).tolist()
    differences = [sum(theirs[place] - ours[place] for place in places) / 120 for places in draws]
    paired = next(one for one in compare(first, renamed) if one.name == "accuracy")
    assert paired.num_paired == 30
    expected = ((sum(theirs) - sum(ours)) / 120, quantile(differences, 0.025), quantile(differences, 0.975))
    assert tuple(paired.difference) == pytest.approx(expected, abs=1e-14)
    assert paired.first.value == pytest.approx(sum(ours) / 120, abs=1e-14), "over the common questions"

    others = drawn_scores(1, chances[10:], 4, name="other")
    draws = np.random.default_rng(0).integers(40, size=(NUM_RESAMPLES, 40)).tolist()
    other_draws = np.random.default_rng(1).integers(30, size=(NUM_RESAMPLES, 30)).tolist()
    differences = [
        sum(others.num_right[place] for place in theirs) / 120 - sum(first.num_right[place] for place in ours) / 160
        for ours, theirs in zip(draws, other_draws, strict=True)
    ]
    unpaired = next(one for one in compare(first, others) if one.name == "accuracy")
    assert unpaired.num_paired is None
    expected = (
        sum(others.num_right) / 120 - sum(first.num_right) / 160, quantile(differences, 0.025),
        quantile(differences, 0.975),
    )  # fmt: skip
    assert tuple(unpaired.difference) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("num_trials", [30, pytest.param(400, marks=pytest.mark.exhaustive)])
def test_runs_of_one_setting_seldom_differ_and_better_ones_do(monkeypatch: pytest.MonkeyPatch, num_trials: int) -> None:
    monkeypatch.setattr(bootstrap, "NUM_RESAMPLES", 300)
    number = 60
    alarms, unpaired_alarms, found = 0, 0, 0
    for seed in range(num_trials):
        chances = difficulties(seed, number)
        first, same = (drawn_scores(2 * seed + which, chances, 4, ks=(1,)) for which in (0, 1))
        alarms += next(one for one in compare(first, same) if one.name == "accuracy").is_clear
        others = drawn_scores(seed, difficulties(-seed, number), 4, name="other", ks=(1,))
        unpaired_alarms += next(one for one in compare(first, others) if one.name == "accuracy").is_clear
        better = drawn_scores(seed, [min(1.0, chance + 0.2) for chance in chances], 4, ks=(1,))
        comparison = next(one for one in compare(first, better) if one.name == "accuracy")
        found += comparison.is_clear and comparison.difference.value > 0
    assert alarms / num_trials <= 0.07
    assert unpaired_alarms / num_trials <= 0.07
    assert found / num_trials >= 0.95


def test_scores_that_only_one_run_has_are_not_compared() -> None:
    chances = difficulties(0, 20)
    first, second = drawn_scores(0, chances, 4), drawn_scores(1, chances, 2)
    assert [one.name for one in compare(first, second)] == ["accuracy", "pass@2", "maj@2"]
    nothing = QuestionScores.from_responses({}, None, reads_answers=False)
    assert compare(first, nothing) == [] and intervals(nothing) == {}
    longer = {"q0": [Response(True)] * 4, "q1": [Response(True)]}
    other = {"q0": [Response(True)], "q1": [Response(True)] * 4}
    sets = [QuestionScores.from_responses(one, (4,), reads_answers=False) for one in (longer, other)]
    assert [one.name for one in compare(*sets)] == ["accuracy"], "no question has four responses in both"
    same = compare(first, first)
    assert all(tuple(one.difference) == (0.0, 0.0, 0.0) and not one.is_clear for one in same)
