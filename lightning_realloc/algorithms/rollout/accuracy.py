"""Accuracy of a policy from one response, and from the best of k (pass@k)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.core.params import is_of_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Rule by which a held-out response is correct, for ``accuracy`` and ``pass@k`` in ``validate`` and ``test``.

    Responses without a reward are ignored.
    """

    threshold: float = 1.0
    """Smallest reward of a correct response."""
    function: str | None = None
    """Reward function to use; None: the weighted sum of all."""
    ks: tuple[int, ...] | None = None
    """Values of k in ``pass@k``; None: powers of two below the number of responses per prompt, and that number."""

    def __post_init__(self) -> None:
        if not is_of_kind(self.threshold, Real) or not math.isfinite(self.threshold):
            raise ConfigError(
                f"threshold={self.threshold!r} must be a finite number: the reward from which on a response is right"
            )
        if self.ks is None:
            return
        ks = tuple(self.ks) if isinstance(self.ks, Iterable) else ()
        if not ks or not all(is_of_kind(k, Integral) and k >= 1 for k in ks):
            raise ConfigError(
                f"ks={self.ks!r} must hold numbers of responses, each at least 1, as in (1, 4); None chooses them"
            )

    def check_responses(self, n: int) -> None:
        """Raise ConfigError for a ``k`` above the number of responses per prompt."""
        if self.ks is not None and max(self.ks) > n:
            raise ConfigError(
                f"pass@{max(self.ks)} needs as many responses per prompt, and evaluation_sampling.n={n}; raise n, or "
                f"lower accuracy.ks"
            )

    def summary(self, samples: Samples, column: str) -> dict[str, Tensor]:
        """Return ``accuracy`` and every ``pass@k``, each a mean over the prompts with enough scored responses.

        ``column`` holds the weighted sum of all rewards.
        """
        rewards = samples.tensor(self._column(samples, column)).tolist()
        right = defaultdict(list)
        for prompt_id, reward in zip(samples.tensor("prompt_id").tolist(), rewards, strict=True):
            if not math.isnan(reward):
                right[prompt_id].append(reward >= self.threshold)
        groups = [(len(found), sum(found)) for found in right.values()]
        if not groups:
            return {}
        summary = {"accuracy": torch.tensor(sum(c for _, c in groups) / sum(n for n, _ in groups))}
        for k in self.ks or _powers_of_two(max(n for n, _ in groups)):
            chances = [pass_at_k(n, c, k) for n, c in groups if n >= k]
            if chances:
                summary[f"pass@{k}"] = torch.tensor(sum(chances) / len(chances))
        return summary

    def _column(self, samples: Samples, total: str) -> str:
        if self.function is None:
            return total
        name = f"reward/{self.function}"
        if name not in samples:
            known = [column.removeprefix("reward/") for column in samples.columns if column.startswith("reward/")]
            raise ConfigError(
                f"accuracy.function={self.function!r} must be one of the reward functions "
                f"({', '.join(known) or 'a single one has no column of its own'}); leave it out for their weighted sum"
            )
        return name


def pass_at_k(n: int, num_right: int, k: int) -> float:
    """Return the probability that one of k responses is correct, drawn from n with ``num_right`` correct ones.

    This is an unbiased estimate for k new responses.

    Source: Chen et al., arXiv:2107.03374, eq. 1.
    """
    if not 1 <= k <= n:
        raise ConfigError(f"pass@{k} needs 1 to n={n} responses; lower k or sample more")
    return 1.0 - math.comb(n - num_right, k) / math.comb(n, k)


def _powers_of_two(n: int) -> Sequence[int]:
    """Return 2, 4, 8, ... below n, and n; nothing for n = 1, where pass@1 is the accuracy."""
    return [*(2**power for power in range(1, (n - 1).bit_length())), n] if n > 1 else []
