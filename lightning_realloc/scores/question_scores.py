"""Count right responses and majority votes per question, for accuracy, pass@k and maj@k. Pure.

Both pass@k and maj@k are expected values over all choices of k from the n responses to a question, so that neither the
order of responses nor chance matters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_realloc.errors import ConfigError

Values = NDArray[np.float64]
ACCURACY, NUM_QUESTIONS = "accuracy", "num_questions"
"""Names of the share of right responses, and of the number of questions."""
EVALUATION = "eval/"
"""Beginning of the names of metrics of evaluation sets."""
HELD_OUT = ("val/", EVALUATION)
"""Beginnings of the names of metrics of held-out samples in a fit."""
MAX_RESPONSES = 1 << 16
"""Largest number of responses to a question that is read; binomial coefficients of more take seconds."""
_LOADER = "/dataloader_idx_"


class Response(NamedTuple):
    """A scored response to a question."""

    is_right: bool
    answer: Hashable | None = None
    """Its final answer, equal to that of other responses which say the same; None: it gives no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionScores:
    """Result of an evaluation, per question."""

    questions: tuple[str, ...]
    """Name of each question, ascending: the same in every run that asks it."""
    num_responses: tuple[int, ...]
    """Scored responses to each question, at least one."""
    num_right: tuple[int, ...]
    """Right responses to each question."""
    ks: tuple[int, ...] = ()
    """Values of k in pass@k and maj@k."""
    majority: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """k -> maj@k of each question, NaN for one with fewer responses; empty if answers are not known."""

    def __post_init__(self) -> None:
        columns = (self.num_responses, self.num_right, *self.majority.values())
        if any(len(one) != len(self.questions) for one in columns) or len({*self.questions}) != len(self.questions):
            raise ValueError(f"{len(self.questions)} questions need as many counts, and different names")

    @classmethod
    def from_responses(
        cls, responses: Mapping[str, Sequence[Response]], ks: Sequence[int] | None, *, reads_answers: bool
    ) -> QuestionScores:
        """Return the scores of questions, given the responses to each; those without a response are left out.

        Args:
            responses: Name of a question -> its responses, in any order.
            ks: Values of k; None: powers of two below the largest number of responses, and that number.
            reads_answers: Whether the answers of responses are known, for maj@k.
        """
        asked = {question: responses[question] for question in sorted(responses) if responses[question]}
        counts = tuple(len(given) for given in asked.values())
        chosen = (_powers_of_two(max(counts, default=1)) if ks is None else ks) if counts else ()
        votes = [votes_of(given) for given in asked.values()] if reads_answers else []
        return cls(
            questions=tuple(asked),
            num_responses=counts,
            num_right=tuple(sum(one.is_right for one in given) for given in asked.values()),
            ks=tuple(chosen),
            majority={
                k: tuple(
                    float(majority_at_k(n, one, k)) if k <= n else math.nan
                    for n, one in zip(counts, votes, strict=True)
                )
                for k in (chosen if reads_answers else ())
            },
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores that at least one question has."""
        largest = max(self.num_responses, default=0)
        ks = [k for k in self.ks if k <= largest]
        majorities = [f"maj@{k}" for k in self.majority if k <= largest]
        return (ACCURACY, *(f"pass@{k}" for k in ks), *majorities) if self.questions else ()

    def per_question(self, name: str) -> tuple[Values, Values]:
        """Return the value and the weight of each question in a score, (Q,) both.

        Responses weigh the same in the accuracy, and questions with at least k responses in the others.
        """
        kind, _, k = name.partition("@")
        counts = np.array(self.num_responses, dtype=np.float64)
        if kind == ACCURACY:
            return np.array(self.num_right) / counts, counts
        enough = counts >= int(k)
        if kind == "maj":
            values = np.array(self.majority[int(k)])
        else:
            pairs = zip(self.num_responses, self.num_right, strict=True)
            values = np.array([pass_at_k(n, right, int(k)) if n >= int(k) else 0.0 for n, right in pairs])
        return np.where(enough, values, 0.0), enough.astype(np.float64)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        majority = {str(k): [None if math.isnan(one) else one for one in found] for k, found in self.majority.items()}
        return {
            "questions": list(self.questions),
            "responses": list(self.num_responses),
            "right": list(self.num_right),
            "ks": list(self.ks),
            "majority": majority,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> QuestionScores:
        """Return the scores of `to_json`. Raises KeyError, TypeError or ValueError for any other content."""
        majority = {
            int(k): tuple(math.nan if one is None else float(one) for one in found)
            for k, found in content["majority"].items()
        }
        found = cls(
            questions=tuple(map(str, content["questions"])),
            num_responses=tuple(map(int, content["responses"])),
            num_right=tuple(map(int, content["right"])),
            ks=tuple(map(int, content["ks"])),
            majority=majority,
        )
        counts = zip(found.num_responses, found.num_right, strict=True)
        if not all(0 <= right <= n and 1 <= n <= MAX_RESPONSES for n, right in counts):
            raise ValueError(f"questions must have 1 to {MAX_RESPONSES} responses, some of them right")
        shares = [one for column in majority.values() for one in column if not math.isnan(one)]
        if min((*found.ks, *majority, 1)) < 1 or not all(0 <= one <= 1 for one in shares):
            raise ValueError("maj@k of questions must be shares, for k of at least 1")
        return found


def pass_at_k(n: int, num_right: int, k: int) -> float:
    """Return the probability that one of k responses is correct, drawn from n with ``num_right`` correct ones.

    This is an unbiased estimate for k new responses.

    Source: Chen et al., arXiv:2107.03374, eq. 1.
    """
    if not 1 <= k <= n:
        raise ConfigError(f"pass@{k} needs 1 to n={n} responses; lower k or sample more")
    return 1.0 - math.comb(n - num_right, k) / math.comb(n, k)


class Vote(NamedTuple):
    """Responses that give the same answer."""

    num_responses: int
    num_right: int
    """Those that are right: all or none, unless more than the answer decides."""


def votes_of(responses: Iterable[Response]) -> tuple[Vote, ...]:
    """Return one vote per answer, the largest first; responses without an answer have none."""
    given = [one for one in responses if one.answer is not None]
    counts, right = Counter(one.answer for one in given), Counter(one.answer for one in given if one.is_right)
    return tuple(sorted((Vote(count, right[answer]) for answer, count in counts.items()), reverse=True))


@lru_cache(maxsize=4096)
def majority_at_k(n: int, votes: tuple[Vote, ...], k: int) -> Fraction:
    """Return the probability that the most frequent answer among k responses is right, which are drawn from n.

    Ties are broken at random. Responses without an answer do not vote; without any vote, the question is not answered.
    An answer counts as right by the share of right responses among those that give it.

    All choices of k are counted exactly, by generating functions: for each number of votes ``most`` of the winner, one
    polynomial per number of winners, whose coefficient k is the number of choices. A polynomial is an integer here: its
    value at ``x``, so large that coefficients do not overlap (Kronecker substitution).

    Source: self-consistency, Wang et al., arXiv:2203.11171, section 2.
    """
    if not 1 <= k <= n:
        raise ConfigError(f"maj@{k} needs 1 to n={n} responses; lower k or sample more")
    bits = n + 2 * n.bit_length() + 2
    x, last = 1 << bits, (1 << bits * (k + 1)) - 1
    expected = Fraction(0)
    for most in range(1, min(k, max((one.num_responses for one in votes), default=0)) + 1):
        strong = [one for one in votes if one.num_responses >= most]
        # Answers with fewer responses, and responses without one, can be chosen in any way.
        ways = [(1 + x) ** (n - sum(one.num_responses for one in strong)) & last]
        right = [0]
        """Like ``ways``, with each choice counted by the right responses among those of its winners."""
        for size, num_right in strong:
            fewer = sum(math.comb(size, number) * x**number for number in range(most))
            wins = math.comb(size, most) * x**most
            wins_right = math.comb(size - 1, most - 1) * num_right * x**most
            others, others_right = [0, *ways], [0, *right]
            right = [
                (now * fewer + before * wins + chosen * wins_right) & last
                for now, before, chosen in zip([*right, 0], others_right, others, strict=True)
            ]
            ways = [(now * fewer + before * wins) & last for now, before in zip([*ways, 0], others, strict=True)]
        counts = enumerate(one >> bits * k for one in right)
        expected += sum((Fraction(count, most * winners) for winners, count in counts if winners), Fraction(0))
    return expected / math.comb(n, k)


def interval_names(name: str) -> tuple[str, str]:
    """Return the names of the metrics that are the ends of a score's interval.

    >>> interval_names("val/pass@4/dataloader_idx_1")
    ('val/pass@4/low/dataloader_idx_1', 'val/pass@4/high/dataloader_idx_1')
    """
    score, loader, index = name.partition(_LOADER)
    return f"{score}/low{loader}{index}", f"{score}/high{loader}{index}"


def _powers_of_two(n: int) -> Sequence[int]:
    """Return 2, 4, 8, ... below n, and n; nothing for n = 1, where pass@1 is the accuracy."""
    return [*(2**power for power in range(1, (n - 1).bit_length())), n] if n > 1 else []
