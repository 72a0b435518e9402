"""How many tokens an unfinished response is still expected to get, judged by responses that are finished."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate


class RemainingLengths:
    """Lengths of finished responses, by prompt and all together."""

    def __init__(self, history: Mapping[int, Iterable[int]] | None = None) -> None:
        """Start from ``history``: lengths of the responses that each prompt got before, in earlier epochs."""
        self._history = {prompt: _Lengths(lengths) for prompt, lengths in (history or {}).items()}
        self._siblings: defaultdict[int, _Lengths] = defaultdict(_Lengths)
        self._all = _Lengths()

    def finish(self, prompt: int, num_tokens: int) -> None:
        """Learn from a response of ``num_tokens`` to ``prompt`` that is over."""
        self._siblings[prompt].add(num_tokens)
        self._all.add(num_tokens)

    def expected(self, prompt: int, num_tokens: int, *, max_new_tokens: int) -> float:
        """Return the tokens to come of a response to ``prompt`` that has ``num_tokens``.

        The mean of what longer responses had beyond ``num_tokens``: earlier responses to the prompt, or else its
        finished siblings, or else all finished ones; where none was longer, half of what ``max_new_tokens`` leaves.
        """
        left = max(max_new_tokens - num_tokens, 0)
        for lengths in (self._history.get(prompt), self._siblings.get(prompt), self._all):
            mean = lengths.mean_above(num_tokens) if lengths is not None else None
            if mean is not None:
                return min(mean - num_tokens, left)
        return left / 2


class _Lengths:
    """A multiset of lengths that knows the mean of its upper part."""

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        self._sorted = sorted(lengths)
        self._sums: list[int] | None = None
        """Of the first lengths, by how many they are; None: to be computed again."""

    def add(self, length: int) -> None:
        insort(self._sorted, length)
        self._sums = None

    def mean_above(self, floor: int) -> float | None:
        """Return the mean of all lengths above ``floor``; None if there is none."""
        begin = bisect_right(self._sorted, floor)
        if begin == len(self._sorted):
            return None
        if self._sums is None:
            self._sums = list(accumulate(self._sorted, initial=0))
        return (self._sums[-1] - self._sums[begin]) / (len(self._sorted) - begin)
