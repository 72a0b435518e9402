"""pass@k and maj@k, compared with counts over all subsets of the responses."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from fractions import Fraction
from itertools import combinations

import pytest

from lightning_realloc.errors import ConfigError
from lightning_realloc.scores.bootstrap import intervals
from lightning_realloc.scores.question_scores import (
    QuestionScores,
    Response,
    interval_names,
    majority_at_k,
    pass_at_k,
    votes_of,
)


def drawn_responses(generator: random.Random, n: int) -> list[Response]:
    """Return responses whose answers repeat, or are missing, and do not alone decide whether they are right."""
    return [Response(generator.random() < 0.5, generator.choice([None, "1", "2", "3", "4"])) for _ in range(n)]


def majority_of_subsets(responses: list[Response], k: int) -> Fraction:
    """Return the mean over all choices of k: a winner's share of right responses, as a mean over tied winners."""
    total, num_subsets = Fraction(0), 0
    for subset in combinations(responses, k):
        num_subsets += 1
        counts: defaultdict[object, int] = defaultdict(int)
        for one in subset:
            if one.answer is not None:
                counts[one.answer] += 1
        winners = [answer for answer, count in counts.items() if count == max(counts.values())]
        for winner in winners:
            same = [one.is_right for one in responses if one.answer == winner]
            total += Fraction(sum(same), len(same) * len(winners))
    return total / num_subsets


@pytest.mark.parametrize(("n", "num_right"), [(1, 0), (1, 1), (4, 0), (5, 2), (6, 1), (6, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(n: int, num_right: int) -> None:
    responses = [index < num_right for index in range(n)]
    for k in range(1, n + 1):
        draws = [any(draw) for draw in combinations(responses, k)]
        assert pass_at_k(n, num_right, k) == pytest.approx(sum(draws) / len(draws))


def test_majority_at_k_is_the_mean_over_all_subsets_to_the_last_digit() -> None:
    generator = random.Random(0)
    for _ in range(60):
        responses = drawn_responses(generator, generator.randint(1, 8))
        for k in range(1, len(responses) + 1):
            assert majority_at_k(len(responses), votes_of(responses), k) == majority_of_subsets(responses, k)


def test_majorities_by_hand() -> None:
    right, wrong, silent = Response(True, "4"), Response(False, "5"), Response(False)
    cases = {
        # The vote of all: 2 of 3; a tie of two answers; no vote for a response without an answer; no votes at all.
        (right, right, wrong): (3, 1),
        (right, right, wrong, wrong): (4, Fraction(1, 2)),
        (right, silent, silent): (3, 1),
        (silent, silent): (2, 0),
        # Two of right, right, wrong: one choice of three has no tie.
        (right, right, wrong, silent): (2, Fraction(1 + 2 + 2 * Fraction(1, 2), 6)),
    }
    for responses, (k, expected) in cases.items():
        assert majority_at_k(len(responses), votes_of(responses), k) == expected
    # 64 of 128 responses give the right answer: as likely as not, in any half of them.
    assert majority_at_k(128, votes_of([right, wrong] * 64), 64) == Fraction(1, 2)
    for k in (0, 3):
        with pytest.raises(ConfigError, match=rf"maj@{k} needs 1 to n=2 responses"):
            majority_at_k(2, (), k)


def test_questions_count_alike_whatever_their_order_and_keep_their_scores_in_json() -> None:
    generator = random.Random(1)
    asked = {f"q{number}": drawn_responses(generator, 4 - number % 2) for number in range(6)} | {"unanswered": []}
    scores = QuestionScores.from_responses(asked, None, reads_answers=True)
    assert scores.questions == tuple(f"q{number}" for number in range(6))
    expected = {
        "accuracy": Fraction(sum(one.is_right for given in asked.values() for one in given), 21),
        "maj@4": sum(majority_of_subsets(given, 4) for given in asked.values() if len(given) == 4) / 3,
        "maj@2": sum(majority_of_subsets(given, 2) for given in asked.values() if given) / 6,
    }
    found = {name: score.value for name, score in intervals(scores).items()}
    assert list(found) == ["accuracy", "pass@2", "pass@4", "maj@2", "maj@4"]
    assert {name: found[name] for name in expected} == {name: float(value) for name, value in expected.items()}

    turned = {name: given[::-1] for name, given in reversed(asked.items())}
    assert repr(QuestionScores.from_responses(turned, None, reads_answers=True)) == repr(scores), "with their NaN"
    stored = json.loads(json.dumps(scores.to_json(), allow_nan=False))
    assert repr(QuestionScores.from_json(stored)) == repr(scores)
    assert math.isnan(scores.majority[4][1]), "three responses have no maj@4"
    broken = [
        {"right": [9] * 6}, {"responses": [1]}, {"questions": ["q"] * 6}, {"majority": {"2": [1.0]}},
        {"responses": [10**9] * 6}, {"ks": [0]}, {"majority": {"-2": [1.0] * 6}}, {"majority": {"2": [1e300] * 6}},
    ]  # fmt: skip
    for one in broken:
        with pytest.raises(ValueError, match="questions"):
            QuestionScores.from_json(stored | one)
    assert QuestionScores.from_responses({}, (2,), reads_answers=True).names == ()


def test_ends_of_intervals_have_the_names_of_their_score() -> None:
    assert interval_names("val/accuracy") == ("val/accuracy/low", "val/accuracy/high")
    assert interval_names("test/maj@4/dataloader_idx_1")[0] == "test/maj@4/low/dataloader_idx_1"
