"""How long a step takes, by what it reads: learnt from steps as they run, and told as tables for the draft planner."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from lightning_realloc.generation.speculative.slowness import Slowness

PADDING_SHARE = 0.12
"""What a place of the grid that no token fills costs, beside one that a token does: attention pads every sample's
tokens to the longest draft. Measured on CPU: 0.16 to 0.23 for 4 million weights, 0.08 to 0.16 for 40 million."""
_NOISE = 0.0025
"""Variance of the logarithm of a step's seconds: 5 %."""
_DRIFT = 1e-6
"""By which that of what steps of one size take grows with every step of that size: what changes, changes for all sizes
together, mostly."""
_UNKNOWN = 0.05
"""The same of a new size: 20 %."""
_DOUBTFUL = 0.01
"""The same of sizes that were seen while all was new: 10 %. With 32 samples, steps took up to 30 % longer then."""
_HICCUP = 1.5
"""One observation counts as no more times slower or faster than that: such a step says nothing of the next one."""
_GROWTH = 0.9
"""Share of their growth so far by which steps that verify more than any did are taken to grow on: a hope, so that they
are tried where they could pay."""
_PREPARING_RATE = 0.02
"""Weight of one step in what preparing takes: that of one in 16 or more is all there is."""
_SIZE_RATE = 0.05
"""Weight of a new step in the mean size of its like."""
_MOST_OF_NEIGHBOURS = 8.0
"""Steps that a size's neighbours count as at most, in what it is taken to cost: a few steps may all have been slow, and
a size that looks dear is not tried again."""
LEAST_S = 1e-9
"""Of a step, where a coarse clock has not moved, or a wrong one went back."""
_FIRST = 2
"""Steps of a size before it is told, as the last of them took: the first one also pays for what is set up once."""


@dataclass(slots=True)
class _Size:
    """What steps of about one size take."""

    size: float
    """Their mean size."""
    seconds: float
    """Over the slowness."""
    variance: float = _UNKNOWN
    """Of their logarithm, as far as it is not known."""
    num_steps: int = 1


class StepCosts:
    """Seconds of a step by its number of tokens, learnt from steps as they run.

    Sizes of about the same logarithm share a mean, which counts from the second step on: the first one also pays for
    what is set up once. Between two of them the seconds are interpolated; beyond the largest one they are taken to stay
    as they are, so that a size never tried is tried once it could pay. A machine that gets slower or faster moves all
    means at once, and those of all tables that share its `Slowness`: what was last seen when the machine was slow must
    not be compared with what is seen now.

    Whether a step was off because the machine changed or because its size was not known well is told by how well either
    is known: a Kalman filter on logarithms, without what the errors of the two have in common (Kalman, "A new approach
    to linear filtering and prediction problems", Journal of Basic Engineering 82, 1960). With fixed shares, new sizes
    moved what all others were taken to cost: played back, the ratio of plain to verifying steps was off by 7.5 % (root
    mean square), and is by 6.3 %.

    But for the slowness, what is told changes every few observations only, so that telling takes microseconds.
    """

    def __init__(
        self,
        slowness: Slowness | None = None,
        *,
        kind: int = 0,
        refit_every: int = 16,
        told_from: int = _FIRST,
    ) -> None:
        """Know nothing.

        Args:
            slowness: The machine's, shared with other tables.
            kind: Of these steps, in it.
            refit_every: Observations after which what is told changes.
            told_from: Steps of a size before it is told; 1 where steps are too few to wait.
        """
        self._slowness = Slowness() if slowness is None else slowness
        self._kind = kind
        self._told_from = told_from
        self._refit_every = refit_every
        self._by_bucket: dict[int, _Size] = {}
        self._since_refit = 0
        self._sizes: list[float] = []
        self._seconds: list[float] = []
        """Over the slowness."""

    @property
    def known(self) -> bool:
        """Whether any size was observed often enough to be told."""
        return bool(self._sizes)

    @property
    def smallest(self) -> float:
        """The smallest size that is told; there is one."""
        return self._sizes[0]

    @property
    def largest(self) -> tuple[float, float]:
        """The largest size that is told, and its expected seconds; there is one."""
        return self._sizes[-1], self._factor * self._seconds[-1]

    @property
    def _factor(self) -> float:
        """How much longer these steps take now than they did at first."""
        return self._slowness.factors[self._kind]

    def knows(self, size: float) -> bool:
        """Whether steps of about this size were observed, half as large again or two thirds as large at most."""
        nearest = bisect_left(self._sizes, size / 1.5)
        return nearest < len(self._sizes) and self._sizes[nearest] <= 1.5 * size

    def observe(self, num_tokens: float, seconds: float) -> None:
        """Take the seconds of one step."""
        slowness = self._slowness
        slowness.pass_step()
        seen = max(seconds, LEAST_S) / self._factor
        bucket = _bucket(num_tokens)
        known = self._by_bucket.get(bucket)
        if known is None:
            if self.known and num_tokens < self._sizes[-1]:  # a hiccup must not pass for what a new size takes
                seen = min(seen, 2.0 * self.seconds(num_tokens) / self._factor)
            self._by_bucket[bucket] = _Size(float(num_tokens), seen)
            if self._told_from == 1:
                self._refit()
            return
        known.num_steps += 1
        if known.num_steps <= self._told_from:
            if seen < _HICCUP * known.seconds:
                known.seconds = seen
            self._refit()
            return
        surprise = math.log(min(max(seen / known.seconds, 1.0 / _HICCUP), _HICCUP))
        doubt = slowness.variance(self._kind) + known.variance + _NOISE
        slowness.learn(self._kind, surprise, doubt)
        known.seconds *= math.exp(surprise * known.variance / doubt)
        known.size += max(_SIZE_RATE, 1.0 / known.num_steps) * (num_tokens - known.size)
        known.variance *= 1.0 - known.variance / doubt
        known.variance += _DRIFT
        self._since_refit += 1
        if self._since_refit >= self._refit_every:
            self._refit()

    def doubt(self) -> None:
        """Take that what was seen so far was seen while all was new: later steps count for more."""
        for size in self._by_bucket.values():
            size.variance = max(size.variance, _DOUBTFUL)

    def seconds(self, num_tokens: float) -> float:
        """Return the expected seconds of a step of this size; 1 where nothing is known."""
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return 1.0
        above = bisect_left(sizes, num_tokens)
        if 0 < above < len(sizes):
            below = above - 1
            told = _between(num_tokens, (sizes[below], seconds[below]), (sizes[above], seconds[above]))
        else:
            told = seconds[0 if not above else -1]
        return self._factor * told

    def knots(self) -> list[tuple[float, float]]:
        """Return the sizes observed, ascending, and their expected seconds, which never fall."""
        return [(size, self._factor * seconds) for size, seconds in zip(self._sizes, self._seconds, strict=True)]

    def _refit(self) -> None:
        seen_enough = (size for size in self._by_bucket.values() if size.num_steps >= self._told_from)
        told = sorted(seen_enough, key=attrgetter("size"))
        self._sizes = [size.size for size in told]
        means = [size.seconds for size in told]
        means[1:-1] = map(_beside_neighbours, told, told[1:], told[2:])
        self._seconds = _rising(means, [1.0 / (size.variance + _NOISE / _MOST_OF_NEIGHBOURS) for size in told])
        self._since_refit = 0


class SpeculationCosts:
    """Seconds of plain steps, of verifying ones, and of drafting."""

    def __init__(self, *, costs_a_forward: bool) -> None:
        """Know nothing; ``costs_a_forward``: drafting is that of a model, and not looking up."""
        slowness = Slowness(2)  # but for drafting, whose seconds vary by what is found, too
        self.plain = StepCosts(slowness, kind=0)
        """By samples."""
        self.verifying = StepCosts(slowness, kind=1)
        """By tokens and padding, see :func:`effective_tokens`."""
        self.first = StepCosts()
        """Of a model's first token for all samples, behind what it reads that came since; by samples."""
        self.drafting = StepCosts() if costs_a_forward else StepCosts(refit_every=1)
        """Of each further one, or of one look-up, which is told for many steps at once; by samples."""
        self.catching_up = StepCosts(told_from=1)
        """Of a model that reads tokens it has missed; by tokens."""
        self.preparing_s = 0.0
        """Of a step with drafts, what is done once for many of them: plans, and what new samples need."""

    def take_preparing(self, seconds: float) -> float:
        """Take what one step with drafts came to, most took nothing; return its share of all of them."""
        self.preparing_s += _PREPARING_RATE * (seconds - self.preparing_s)
        return self.preparing_s

    def doubt(self) -> None:
        """Take that what steps took so far, they took while all was new."""
        for costs in (self.plain, self.verifying):
            costs.doubt()

    def plain_s(self, num_rows: int) -> tuple[float, float]:
        """Return the seconds of a plain step of so many samples, and those of them that one sample adds."""
        half = max(num_rows // 2, 1)
        step_s, half_s = self.plain.seconds(num_rows), self.plain.seconds(half)
        return step_s, min((step_s - half_s) / (num_rows - half), step_s / num_rows) if num_rows > half else 0.0

    def first_s(self, num_rows: int) -> float:
        """Return the seconds of a model's first token for so many samples; those of a further one if not known."""
        return self.first.seconds(num_rows) if self.first.known else self.drafting_s(num_rows)

    def drafting_s(self, num_rows: int) -> float:
        """Return the seconds of each further one, or of one look-up; 0 if not known."""
        return self.drafting.seconds(num_rows) if self.drafting.known else 0.0

    def catching_up_s(self, num_rows: int, num_missed: int) -> float:
        """Return the seconds in which a model reads what it missed; where that is not known, those of one token.

        More than it ever read at once takes as much longer as it is more, and less than that as much shorter, but no
        less than one token: such reads are rare, so that one of them has to tell of all.
        """
        if not num_missed:
            return 0.0
        token_s = self.drafting_s(num_rows)
        if not self.catching_up.known:
            return token_s
        smallest, largest = self.catching_up.smallest, self.catching_up.largest[0]
        nearest = min(max(num_missed, smallest), largest)
        return max(self.catching_up.seconds(nearest) * num_missed / nearest, token_s)

    def knows_verifying(self, num_rows: int, num_drafted: float, width: int) -> bool:
        """Whether steps of about the size of one that verifies so many tokens were observed."""
        return self.verifying.knows(effective_tokens(num_rows, num_rows + num_drafted, width))

    def verifying_s(self, num_rows: int) -> Callable[[float, int], float]:
        """Return the seconds of a step of so many samples by how many tokens it verifies, and of one sample at most."""
        plain_s = self.plain.seconds(num_rows)
        if not self.verifying.known:
            return lambda num_drafted, width: plain_s
        smallest, (largest, largest_s) = self.verifying.smallest, self.verifying.largest
        smallest_s = self.verifying.seconds(smallest)
        has_plain = self.plain.known

        def seconds(num_drafted: float, width: int) -> float:
            size = effective_tokens(num_rows, num_rows + num_drafted, width)
            if size > largest > num_rows and has_plain:
                growth = _GROWTH * max(largest_s - plain_s, 0.0) / (largest - num_rows)
                return largest_s + growth * (size - largest)
            if size >= smallest:
                return self.verifying.seconds(size)
            if smallest <= num_rows or not has_plain:
                return smallest_s
            # Smaller steps than any tried lie between a plain one and that.
            share = max((size - num_rows) / (smallest - num_rows), 0.0)
            return min(plain_s, smallest_s) * (1.0 - share) + smallest_s * share

        return seconds


def effective_tokens(num_rows: int, num_tokens: float, width: int) -> float:
    """Return what a step that reads so many tokens costs, in tokens, if the longest draft has ``width``."""
    return num_tokens + PADDING_SHARE * (num_rows * (1 + width) - num_tokens)


def look_ups_of(num_rows: int, num_drafted: float) -> float:
    """Return how many look-ups so many drafted tokens take: each sample's last one finds nothing, or too little."""
    return num_rows + num_drafted


def _beside_neighbours(smaller: _Size, own: _Size, larger: _Size) -> float:
    """Return the seconds of a size, closer to those between its neighbours the less was seen of it beside them."""
    between_s = _between(own.size, (smaller.size, smaller.seconds), (larger.size, larger.seconds))
    weight = min(_MOST_OF_NEIGHBOURS, (smaller.num_steps + larger.num_steps) / 2)
    return (own.num_steps * own.seconds + weight * between_s) / (own.num_steps + weight)


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the never falling sequence closest to the values, by weighted squares: larger steps do not take less time.

    Source: pooling adjacent violators (Barlow, Bartholomew, Bremner and Brunk, "Statistical Inference under Order
    Restrictions", 1972). A size of a few steps that were slow by chance gives way to one of many.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight and how many values share it
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, own, length = pools.pop()
            both = own + pool[1]
            pool = ((mean * own + pool[0] * pool[1]) / both, both, length + pool[2])
        pools.append(pool)
    return [mean for mean, _, length in pools for _ in range(length)]


def _between(size: float, smaller: tuple[float, float], larger: tuple[float, float]) -> float:
    """Return the seconds of a size on the line between two others, each with its seconds."""
    share = (size - smaller[0]) / (larger[0] - smaller[0])
    return smaller[1] + share * (larger[1] - smaller[1])


def _bucket(size: float) -> int:
    return round(4 * math.log2(size))
