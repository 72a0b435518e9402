"""Mixture of data sets: how many rows of each a batch holds, in exact proportions that may change during the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from lightning_realloc.errors import DataError

Mix = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]
"""Name of a data set -> its weight; or a list of these, each with the batch from which it holds."""


class Mixture:
    """Weights of data sets, by the number of batches drawn before.

    Args:
        mix: Weights as the user gives them; they need not sum to 1.
        names: Names of the data sets.

    Raises:
        DataError: for other names, for weights that are no numbers of at least 0, and for a schedule that does not
            rise from 0.
    """

    def __init__(self, mix: Mix, names: Sequence[str]) -> None:
        stages = [(0, mix)] if isinstance(mix, Mapping) else _stages(mix)
        self.stages = tuple((begin, _normalized(weights, names)) for begin, weights in stages)
        """Batch from which weights hold, and the weights by name, which sum to 1."""

    def due(self, num_batches: int, batch_size: int) -> dict[str, Fraction]:
        """Return how many rows of each set the first ``num_batches`` should hold."""
        ends = [*(begin for begin, _ in self.stages[1:]), num_batches]
        lengths = [max(0, min(end, num_batches) - begin) for (begin, _), end in zip(self.stages, ends, strict=True)]
        names = self.stages[0][1]
        shares = zip(lengths, self.stages, strict=True)
        parts = [(length, weights) for length, (_, weights) in shares]
        return {name: batch_size * sum((n * w[name] for n, w in parts), start=Fraction(0)) for name in names}

    def counts(self, batch: int, batch_size: int, drawn: Mapping[str, int]) -> dict[str, int]:
        """Return the rows of each set in a batch, by largest remainders of what the run so far should hold.

        Args:
            batch: Number of batches drawn before.
            batch_size: Rows of a batch.
            drawn: Rows of each set in these batches.
        """
        missing = {name: due - drawn[name] for name, due in self.due(batch + 1, batch_size).items()}
        counts = dict.fromkeys(missing, 0)
        for _ in range(batch_size):
            name = max(missing, key=missing.__getitem__)  # the first one of equals
            counts[name] += 1
            missing[name] -= 1
        return counts

    @property
    def identity(self) -> list[Any]:
        """Plain data that is equal for equal schedules."""
        return [[begin, {name: str(weight) for name, weight in weights.items()}] for begin, weights in self.stages]


def _stages(mix: object) -> list[tuple[int, Mapping[str, float]]]:
    form = "write mix={'gsm': 0.7, 'code': 0.3}, or [(0, {'gsm': 1.0, 'code': 0.0}), (100, {...})]"
    if not isinstance(mix, Sequence) or isinstance(mix, str) or not mix:
        raise DataError(f"mix={mix!r} must have a weight for each data set; {form}")
    for stage in mix:
        is_pair = isinstance(stage, Sequence) and len(stage) == 2 and isinstance(stage[1], Mapping)
        if not is_pair or isinstance(stage[0], bool) or not isinstance(stage[0], Integral):
            raise DataError(f"mix holds {stage!r}, which is no batch with weights; {form}")
    stages = [(int(begin), weights) for begin, weights in mix]
    begins = [begin for begin, _ in stages]
    if begins[0] != 0 or any(first >= second for first, second in pairwise(begins)):
        raise DataError(f"mix changes at the batches {begins}, which must begin with 0 and rise; {form}")
    return stages


def _normalized(weights: Mapping[str, float], names: Sequence[str]) -> dict[str, Fraction]:
    if set(weights) != set(names):
        given = f"has weights for {', '.join(map(str, weights))}" if weights else "is empty"
        raise DataError(
            f"mix {given}, and data holds the sets {', '.join(names)}; give each set a weight, 0 leaves it out"
        )
    for name, weight in weights.items():
        is_number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < math.inf:
            raise DataError(f"mix gives {name!r} the weight {weight!r}; it must be a finite number of at least 0")
    exact = {name: Fraction(str(weights[name])) for name in names}  # 0.7 is 7/10, not the nearest binary fraction
    total = sum(exact.values())
    if not total:
        raise DataError("mix gives all sets the weight 0; one must be larger")
    return {name: weight / total for name, weight in exact.items()}
