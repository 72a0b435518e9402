"""How much easier some samples are to draft for than others: the last of many is far behind for that, too.

What a sample gets in k steps scatters by chance, with a deviation that grows as the square root of k, and by how easy
it is to draft for, which grows as k. The second one is told from whole generations: what samples got per step differs
by more than chance, seen within each of them, explains (the method of moments for random effects; Searle, Casella and
McCulloch, "Variance Components", 1992, chapter 3). Pure: outcomes are told, never measured here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean

from lightning_realloc.generation.core.sample import Sample

OF_LOOK_UPS = 0.3
OF_MODELS = 0.1
"""Before any generation is over, as it was seen: 0.2 to 0.4 with n-grams and earlier responses, 0 to 0.1 with small
models and first blocks."""
_PRIOR_WEIGHT = 32.0
"""Samples that this counts as, beside those that were seen."""
_MOST_WEIGHT = 64.0
"""Samples that are remembered, the last ones."""
_LEAST_STEPS = 6
"""Of a sample, for what it got per step to say anything."""
_LEAST_SHARE = 0.06
"""Of what it got from the first of them on, that it got in them; one step in four to eight is counted. What can be
foreseen comes in runs, so that short stretches differ by more."""


@dataclass(slots=True)
class _Progress:
    """What a sample got in steps that drafted."""

    sample: Sample
    """Keeps it alive: others may not have its identity."""
    begin: int
    """Tokens that it had before."""
    num_steps: int = 0
    tokens: int = 0
    squares: int = 0

    @property
    def is_telling(self) -> bool:
        """Whether it was drafted for in a good part of its response."""
        got = len(self.sample.token_ids) - self.begin
        return self.num_steps >= _LEAST_STEPS and self.tokens >= _LEAST_SHARE * got


class Unevenness:
    """Standard deviation, over samples, of the drafted tokens that stand per step, as a share of their mean."""

    def __init__(self, share: float) -> None:
        """Take it for ``share`` before any generation is over."""
        self._prior = share * share
        self._weight = 0.0
        """Samples that were seen, as far as chance let them tell."""
        self._squares = 0.0
        """Of their shares, summed."""
        self._progress: dict[int, _Progress] = {}

    @property
    def share(self) -> float:
        """What is known by now."""
        squares = _PRIOR_WEIGHT * self._prior + self._squares
        return math.sqrt(max(squares, 0.0) / (_PRIOR_WEIGHT + self._weight))

    def count(self, samples: Sequence[Sample], emitted: Sequence[Sequence[int]]) -> None:
        """Take what each sample got in a step with drafts."""
        for sample, tokens in zip(samples, emitted, strict=True):
            progress = self._progress.get(id(sample))
            if progress is None:
                progress = self._progress[id(sample)] = _Progress(sample, len(sample.token_ids))
            num_tokens = len(tokens)
            progress.num_steps += 1
            progress.tokens += num_tokens
            progress.squares += num_tokens * num_tokens

    def end_generation(self) -> None:
        """Learn from what the samples got."""
        told = [progress for progress in self._progress.values() if progress.is_telling]
        self._progress.clear()
        if len(told) < 2:
            return
        per_step = [progress.tokens / progress.num_steps for progress in told]
        within = fmean(
            (progress.squares - progress.tokens * rate) / (progress.num_steps - 1) / progress.num_steps
            for progress, rate in zip(told, per_step, strict=True)
        )
        mean = fmean(per_step)
        drafted = mean - 1.0
        if drafted <= 0.0:
            return
        # How much of what samples differ by is not chance, if look-ups are as uneven as they mostly are.
        telling = (OF_LOOK_UPS * drafted) ** 2 / ((OF_LOOK_UPS * drafted) ** 2 + within)
        weight = (len(told) - 1) * telling * telling
        # In floats: `statistics.variance` adds fractions, which takes longer than the rest of this.
        between = sum((rate - mean) ** 2 for rate in per_step) / (len(per_step) - 1)
        square = (between - within) / (drafted * drafted)
        self._squares += weight * min(max(square, -1.0), 1.0)  # of few tokens that stood, one sample may have got all
        self._weight += weight
        if self._weight > _MOST_WEIGHT:
            self._squares *= _MOST_WEIGHT / self._weight
            self._weight = _MOST_WEIGHT


def tokens_behind(num_last: float, tokens: float, step_variance: float, num_steps: float, unevenness: float) -> float:
    """Return the tokens by which the last sample is expected to be behind the mean.

    Args:
        num_last: How many samples may be the last one.
        tokens: Expected tokens of a sample's step.
        step_variance: Variance of that number by chance.
        num_steps: In which the mean sample is over.
        unevenness: What samples differ by, as a share of the drafted tokens.
    """
    differ = unevenness * (tokens - 1.0) * num_steps
    return _last_of(round(num_last, 1)) * math.sqrt(step_variance * num_steps + differ * differ)


@cache
def _last_of(number: float) -> float:
    """Return by how many standard deviations the least of so many normal values is below their mean, as expected.

    Source: Blom, "Statistical Estimates and Transformed Beta-Variables", 1958.
    """
    number = max(number, 1.0)
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))
