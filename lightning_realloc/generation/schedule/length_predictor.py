"""Predict the remaining tokens of unfinished responses from other responses.

The responses that have finished at any moment are the short ones, so their mean is too low. Instead the chance to end
is estimated per token, from all responses that got so far: events over exposure, in spans of growing length. This is
the piecewise exponential model of survival analysis. Source: Friedman, "Piecewise exponential models for survival data
with covariates", Annals of Statistics 10, 1982.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import exp

_PRIOR_OF_SPAN = 1.0
"""Pseudo-count of ends in a span, at the rate of all spans."""
_PRIOR_OF_RANK = 8.0
"""Pseudo-count of ends on a rank, at the rate of all ranks."""
_LEAST_ENDS = 8
"""Ends on all ranks from which on their common rate is used."""
_NO_END = 0.5
"""Number of ends assumed where every response was cut off at its limit."""


_EDGES = [0, 8]
while _EDGES[-1] < 1 << 22:
    _EDGES.append(int(_EDGES[-1] * 1.25) + 1)
_SPANS = tuple(pairwise(_EDGES))


class LengthPredictor:
    """Predicts remaining lengths from finished responses, by prompt, and from unfinished ones.

    Args:
        history: Lengths of the responses that each prompt got in earlier epochs.
        is_shared: Whether other ranks report evidence; one rank's own is then not enough.
    """

    def __init__(self, history: Mapping[int, Sequence[int]] | None = None, *, is_shared: bool = False) -> None:
        self._history = history or {}
        self._events = [0.0] * len(_SPANS)
        """Responses that ended in each span."""
        self._exposure = [0.0] * len(_SPANS)
        """Tokens of finished responses in each span."""
        self._ended: list[tuple[int, bool]] = []
        """Responses not yet counted in either: tokens, and whether the length limit cut them off."""
        self._growing: Sequence[int] = ()
        self._is_shared = is_shared
        self._common_rate: float | None = None
        """Ends per token on all ranks; None: unknown."""
        self._expected_at_edges: list[float] | None = None
        self._rates: list[float] = []

    def finish(self, prompt: int, num_tokens: int, *, is_cut: bool = False) -> None:
        """Learn from a finished response; ``is_cut``: the length limit ended it."""
        self._ended.append((num_tokens, is_cut))
        self._expected_at_edges = None

    def decayed(self) -> LengthPredictor:
        """Return a predictor for the next generation, in which this one's responses count half."""
        self._settle()
        after = LengthPredictor(is_shared=self._is_shared)
        after._events = [events / 2 for events in self._events]
        after._exposure = [tokens / 2 for tokens in self._exposure]
        return after

    def watch(self, num_tokens: Iterable[int]) -> None:
        """Replace the lengths of all unfinished responses."""
        self._growing = tuple(num_tokens)
        self._expected_at_edges = None

    @property
    def evidence(self) -> tuple[float, float]:
        """Number of finished responses, and the tokens of all; other ranks use it too."""
        self._settle()
        return sum(self._events), sum(self._exposure) + sum(self._growing)

    @property
    def knows_ends(self) -> bool:
        """Whether enough responses have finished on all reporting ranks."""
        return self._common_rate is not None

    def receive_evidence(self, evidence: Iterable[tuple[float, float]]) -> None:
        """Replace the evidence of all ranks, including this one."""
        ends, tokens = (sum(values) for values in zip(*evidence, strict=True))
        self._common_rate = ends / tokens if ends >= _LEAST_ENDS else None
        self._expected_at_edges = None

    def expected(self, prompt: int, num_tokens: int, *, max_new_tokens: int) -> float:
        """Return the expected remaining tokens of a response to ``prompt`` that has ``num_tokens``.

        The mean excess of longer earlier responses to the prompt, if there are any. Otherwise an estimate from the
        responses of this call that got so far. Before any has finished, half of the tokens that ``max_new_tokens``
        leaves.
        """
        self._settle()
        left = max(max_new_tokens - num_tokens, 0)
        if longer := [length for length in self._history.get(prompt, ()) if length > num_tokens]:
            return min(sum(longer) / len(longer) - num_tokens, left)
        if self._common_rate is None and (self._is_shared or not any(self._exposure)):
            return left / 2
        return min(self._expected_of_all(num_tokens), left)

    def _settle(self) -> None:
        """Count finished responses, those of one length together."""
        if not self._ended:
            return
        for (num_tokens, is_cut), count in Counter(self._ended).items():
            if not is_cut:
                self._events[_span_of(max(num_tokens - 1, 0))] += count
            _expose(self._exposure, num_tokens, count)
        self._ended.clear()

    def _expected_of_all(self, num_tokens: int) -> float:
        if self._expected_at_edges is None:
            self._fit()
        assert self._expected_at_edges is not None, "fitted above"
        span = _span_of(num_tokens)
        return _expected(_EDGES[span + 1] - num_tokens, self._rates[span], self._expected_at_edges[span + 1])

    def _fit(self) -> None:
        exposure = list(self._exposure)
        for num_tokens in self._growing:
            _expose(exposure, num_tokens)
        overall = max(sum(self._events), _NO_END) / max(sum(exposure), 1.0)
        if self._common_rate is not None:
            tokens_of_prior = _PRIOR_OF_RANK / self._common_rate
            overall = (sum(self._events) + _PRIOR_OF_RANK) / (sum(exposure) + tokens_of_prior)
        # Beyond the longest response all spans have the same rate, and so the same expectation.
        num_seen = next((span for span in range(len(_SPANS), 0, -1) if exposure[span - 1]), 0)
        seen = zip(self._events[:num_seen], exposure[:num_seen], strict=True)
        self._rates = [(events + _PRIOR_OF_SPAN) / (tokens + _PRIOR_OF_SPAN / overall) for events, tokens in seen]
        expected = [1.0 / overall] * (len(_SPANS) - num_seen + 1)
        for (begin, end), rate in zip(reversed(_SPANS[:num_seen]), reversed(self._rates), strict=True):
            expected.append(_expected(end - begin, rate, expected[-1]))
        self._rates += [overall] * (len(_SPANS) - num_seen)
        self._expected_at_edges = expected[::-1]


def _expected(width: float, rate: float, beyond: float) -> float:
    """Return the expected tokens within ``width`` at the ending chance ``rate`` per token, plus ``beyond`` if none ends
    it."""
    stays = exp(-rate * width)
    return (1.0 - stays) / rate + stays * beyond


def _span_of(num_tokens: int) -> int:
    return min(bisect_right(_EDGES, num_tokens) - 1, len(_SPANS) - 1)


def _expose(exposure: list[float], num_tokens: int, count: int = 1) -> None:
    for span, (begin, end) in enumerate(_SPANS):
        if num_tokens <= begin:
            return
        exposure[span] += count * (min(num_tokens, end) - begin)
