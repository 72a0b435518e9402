"""Confidence intervals of scores, and of differences between two runs, by the bootstrap over questions. Pure.

Questions are drawn again with replacement, with a fixed seed: the same results give the same interval on every rank.
The intervals are of the percentile method (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13).
They tell how a model would score on other questions of the same kind, not how another seed would have trained it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_realloc.scores.question_scores import QuestionScores, Values

NUM_RESAMPLES = 2000
"""Resamples of the questions. A larger number makes the last digits of intervals steadier, and takes longer."""
CONFIDENCE = 0.95
"""Probability that an interval should have."""
PAIRED_SHARE = 0.5
"""Share of the smaller set of questions that both runs must have for a paired comparison; with fewer common questions,
all of both sets tell more."""
_SEED, _OTHER_SEED = 0, 1
_MAX_DRAWN = 1 << 22
"""Questions drawn at a time; larger blocks take more memory."""


class ScoreInterval(NamedTuple):
    """A mean over questions with its confidence interval."""

    value: float
    low: float
    high: float


class Comparison(NamedTuple):
    """A score of two runs, and its difference."""

    name: str
    first: ScoreInterval
    """Over all questions of the run; of a comparison that is paired over a part of them, over this part."""
    second: ScoreInterval
    difference: ScoreInterval
    """The second less the first; of a paired comparison, over the questions that both have."""
    num_paired: int | None
    """Questions of a paired comparison; None: each run's questions were drawn by themselves."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference leaves out 0: else chance in the questions may explain it."""
        return self.difference.low > 0 or self.difference.high < 0


def intervals(scores: QuestionScores) -> dict[str, ScoreInterval]:
    """Return every score by its name, with its interval.

    Example:
        >>> from lightning_realloc.scores.question_scores import Response
        >>> right, wrong = Response(True, "4"), Response(False, "5")
        >>> scores = QuestionScores.from_responses({"2 + 2": [right, right, wrong]}, ks=(2, 3), reads_answers=True)
        >>> {name: round(score.value, 3) for name, score in intervals(scores).items()}
        {'accuracy': 0.667, 'pass@2': 1.0, 'pass@3': 1.0, 'maj@2': 0.667, 'maj@3': 1.0}
    """
    names = scores.names
    if not names:
        return {}
    return dict(zip(names, _intervals(*_resampled(*_columns(scores, names))), strict=True))


def compare(first: QuestionScores, second: QuestionScores) -> list[Comparison]:
    """Return a comparison for each score that both have.

    It is paired if the runs have enough questions in common: the same questions are drawn for both, so that their
    difficulty does not count.
    """
    names = [name for name in first.names if name in second.names]
    common = sorted({*first.questions} & {*second.questions})
    is_paired = len(common) >= PAIRED_SHARE * min(len(first.questions), len(second.questions))
    if not names:
        return []
    found, others = intervals(first), intervals(second)
    if is_paired:
        names, ours, theirs = _paired(first, second, names, common)
        if not len(common) == len(first.questions) == len(second.questions):
            found, others = (dict(zip(names, _intervals(*one), strict=True)) for one in (ours, theirs))
    else:
        ours, theirs = (
            _resampled(*_columns(one, names), seed) for one, seed in ((first, _SEED), (second, _OTHER_SEED))
        )
    means, drawn = theirs[0] - ours[0], theirs[1] - ours[1]
    return [
        Comparison(name, found[name], others[name], difference, len(common) if is_paired else None)
        for name, difference in zip(names, _intervals(means, drawn), strict=True)
    ]


def _paired(
    first: QuestionScores, second: QuestionScores, names: Sequence[str], common: Sequence[str]
) -> tuple[list[str], tuple[Values, Values], tuple[Values, Values]]:
    """Return the names of scores that common questions have in both runs, with each run's means and resampled means
    over them."""
    rows, other_rows = (np.searchsorted(one.questions, common) for one in (first, second))
    values, weights = (column[rows] for column in _columns(first, names))
    other_values, other_weights = (column[other_rows] for column in _columns(second, names))
    in_both = np.logical_and(weights > 0, other_weights > 0)
    has_some = np.any(in_both, axis=0).tolist()
    both = np.hstack([values[:, has_some], other_values[:, has_some]])
    masked = [np.where(in_both, one, 0.0)[:, has_some] for one in (weights, other_weights)]
    means, drawn = _resampled(both, np.hstack(masked))
    (ours, theirs), (ours_drawn, theirs_drawn) = np.hsplit(means, 2), np.hsplit(drawn, 2)
    return [name for name, has in zip(names, has_some, strict=True) if has], (ours, ours_drawn), (theirs, theirs_drawn)


def _columns(scores: QuestionScores, names: Sequence[str]) -> tuple[Values, Values]:
    """Return values and weights of Q questions in S scores, (Q, S) both."""
    values, weights = zip(*map(scores.per_question, names), strict=True)
    return np.stack(values, axis=1), np.stack(weights, axis=1)


def _resampled(values: Values, weights: Values, seed: int = _SEED) -> tuple[Values, Values]:
    """Return the (S,) weighted means of (Q, S) values, and those of the resamples, (`NUM_RESAMPLES`, S).

    NaN for a resample whose questions all have no weight.
    """
    both = np.hstack([values * weights, weights])
    drawn = np.concatenate([counts @ both for counts in _draws(len(values), seed)])
    sums, totals = np.hsplit(np.array([math.fsum(column) for column in both.T]), 2)
    drawn_sums, drawn_totals = np.hsplit(drawn, 2)
    with np.errstate(invalid="ignore"):
        return sums / totals, drawn_sums / drawn_totals


def _draws(num_questions: int, seed: int) -> Iterator[Values]:
    """Yield blocks of resamples: how often each has drawn each question, (block, Q)."""
    generator = np.random.default_rng(seed)
    block = max(1, _MAX_DRAWN // num_questions)
    for begin in range(0, NUM_RESAMPLES, block):
        size = min(block, NUM_RESAMPLES - begin)
        chosen = generator.integers(num_questions, size=(size, num_questions))
        places = chosen + num_questions * np.arange(size)[:, None]
        counts = np.bincount(places.ravel(), minlength=size * num_questions)
        yield counts.reshape(size, num_questions).astype(np.float64)


def _intervals(means: Values, drawn: Values) -> list[ScoreInterval]:
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.nanquantile(drawn, [tail, 1.0 - tail], axis=0)
    return [ScoreInterval(*map(float, one)) for one in zip(means, low, high, strict=True)]
