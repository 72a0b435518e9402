"""How many tokens an unfinished response is still expected to get, judged by other responses.

Those that are finished at any moment are the short ones: their mean says too little. So the chance to end is
estimated per token, from all responses that got so far, whether they ended there or not: events over exposure, in spans
of growing length (the piecewise exponential model of survival analysis; Friedman, "Piecewise exponential models for
survival data with covariates", Annals of Statistics 10, 1982).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import exp

_PRIOR_OF_SPAN = 1.0
"""Ends that a span is taken to have seen at the rate of all spans."""
_PRIOR_OF_RANK = 8.0
"""Ends that a rank is taken to have seen at the rate of all ranks."""
_LEAST_ENDS = 8
"""Of all ranks, before anything is made of them."""
_NO_END = 0.5
"""Ends that are taken to have been seen where all responses were cut off at their limit."""


def _edges(first: int = 8, ratio: float = 1.25, longest: int = 1 << 22) -> tuple[int, ...]:
    edges = [0, first]
    while edges[-1] < longest:
        edges.append(int(edges[-1] * ratio) + 1)
    return tuple(edges)


_EDGES = _edges()
_SPANS = tuple(pairwise(_EDGES))


class LengthPredictor:
    """Lengths of responses: finished ones by prompt, and those that still grow."""

    def __init__(self, history: Mapping[int, Iterable[int]] | None = None, *, is_shared: bool = False) -> None:
        """Start from ``history``: lengths of the responses that each prompt got before, in earlier epochs.

        ``is_shared``: other ranks are heard of, and what one sees alone is not much.
        """
        self._history = {prompt: _Lengths(lengths) for prompt, lengths in (history or {}).items()}
        self._events = [0.0] * len(_SPANS)
        """Responses that ended in each span."""
        self._exposure = [0.0] * len(_SPANS)
        """Tokens of finished responses that lie in each span."""
        self._ended: list[tuple[int, bool]] = []
        """Responses that are in neither yet: their tokens, and whether they were cut off."""
        self._growing: Sequence[int] = ()
        self._is_shared = is_shared
        self._common_rate: float | None = None
        """Ends per token on all ranks; None: not known."""
        self._expected_at_edges: list[float] | None = None
        self._rates: list[float] = []

    def finish(self, prompt: int, num_tokens: int, *, is_cut: bool = False) -> None:
        """Learn from a response of ``num_tokens`` to ``prompt`` that is over; ``is_cut``: it did not end by itself."""
        self._ended.append((num_tokens, is_cut))
        self._expected_at_edges = None

    def decayed(self) -> LengthPredictor:
        """Return what is known before the next generation: responses of this one count half, and so on."""
        self._settle()
        after = LengthPredictor(is_shared=self._is_shared)
        after._events = [events / 2 for events in self._events]
        after._exposure = [tokens / 2 for tokens in self._exposure]
        return after

    def watch(self, num_tokens: Iterable[int]) -> None:
        """Take the lengths of those responses that are not over, in place of what they were before."""
        self._growing = tuple(num_tokens)
        self._expected_at_edges = None

    @property
    def evidence(self) -> tuple[float, float]:
        """Responses that are over, and the tokens of all: what others may judge by, too."""
        self._settle()
        return sum(self._events), sum(self._exposure) + sum(self._growing)

    @property
    def knows_ends(self) -> bool:
        """Whether so many responses are over, on all ranks that are heard of, that others may be judged by them."""
        return self._common_rate is not None

    def hear(self, evidence: Iterable[tuple[float, float]]) -> None:
        """Take in the evidence of all ranks, this one among them."""
        ends, tokens = (sum(values) for values in zip(*evidence, strict=True))
        self._common_rate = ends / tokens if ends >= _LEAST_ENDS else None
        self._expected_at_edges = None

    def expected(self, prompt: int, num_tokens: int, *, max_new_tokens: int) -> float:
        """Return the tokens to come of a response to ``prompt`` that has ``num_tokens``.

        The mean of what longer earlier responses to the prompt had beyond ``num_tokens``; without any, what responses
        of this call that got so far come to; before any is over, half of what ``max_new_tokens`` leaves.
        """
        self._settle()
        left = max(max_new_tokens - num_tokens, 0)
        earlier = self._history.get(prompt)
        mean = earlier.mean_above(num_tokens) if earlier is not None else None
        if mean is not None:
            return min(mean - num_tokens, left)
        if self._common_rate is None and (self._is_shared or not any(self._exposure)):
            return left / 2
        return min(self._expected_of_all(num_tokens), left)

    def _settle(self) -> None:
        """Take in what ended: of many responses, those of one length at once."""
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
        # Behind the longest response, all spans have the same rate, and so the same to come.
        num_seen = next((span for span in range(len(_SPANS), 0, -1) if exposure[span - 1]), 0)
        seen = zip(self._events[:num_seen], exposure[:num_seen], strict=True)
        self._rates = [(events + _PRIOR_OF_SPAN) / (tokens + _PRIOR_OF_SPAN / overall) for events, tokens in seen]
        expected = [1.0 / overall] * (len(_SPANS) - num_seen + 1)
        for (begin, end), rate in zip(reversed(_SPANS[:num_seen]), reversed(self._rates), strict=True):
            expected.append(_expected(end - begin, rate, expected[-1]))
        self._rates += [overall] * (len(_SPANS) - num_seen)
        self._expected_at_edges = expected[::-1]


def _expected(width: float, rate: float, beyond: float) -> float:
    """Return the expected tokens within ``width`` at a chance ``rate`` per token to end, and ``beyond`` behind it."""
    stays = exp(-rate * width)
    return (1.0 - stays) / rate + stays * beyond


def _span_of(num_tokens: int) -> int:
    return min(bisect_right(_EDGES, num_tokens) - 1, len(_SPANS) - 1)


def _expose(exposure: list[float], num_tokens: int, count: int = 1) -> None:
    for span, (begin, end) in enumerate(_SPANS):
        if num_tokens <= begin:
            return
        exposure[span] += count * (min(num_tokens, end) - begin)


class _Lengths:
    """A multiset of lengths that knows the mean of its upper part."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self._sorted = sorted(lengths)
        self._sums = list(accumulate(self._sorted, initial=0))
        """Of the first lengths, by how many they are."""

    def mean_above(self, floor: int) -> float | None:
        """Return the mean of all lengths above ``floor``; None if there is none."""
        begin = bisect_right(self._sorted, floor)
        if begin == len(self._sorted):
            return None
        return (self._sums[-1] - self._sums[begin]) / (len(self._sorted) - begin)
