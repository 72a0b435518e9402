"""Rule by which held-out responses are right, and the scores of the questions that they answer."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral, Real

from lightning.pytorch.utilities import rank_zero_warn

from lightning_realloc.algorithms.rollout.final_answers import (
    AUTO,
    FINAL_ANSWER,
    AnswerReader,
    named_reader,
    reader_of_rewards,
)
from lightning_realloc.batch.prompt_images import PromptImages
from lightning_realloc.batch.samples import IMAGES, PROMPT_KEY, Samples
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.core.params import is_of_kind
from lightning_realloc.rewards.functions import RewardFunctions
from lightning_realloc.scores.question_scores import QuestionScores, Response


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Rule by which a held-out response is correct, for scores in ``validate`` and ``test``.

    The scores are ``accuracy``, ``pass@k`` and ``maj@k``. Responses without a reward are ignored.
    """

    threshold: float = 1.0
    """Smallest reward of a correct response."""
    function: str | None = None
    """Reward function to use; None: the weighted sum of all."""
    ks: tuple[int, ...] | None = None
    """Values of k in ``pass@k`` and ``maj@k``; None: powers of two below the number of responses per prompt, and that
    number."""
    answer: str | AnswerReader | None = AUTO
    """Final answer of a response, which ``maj@k`` counts: ``"number"``, ``"boxed"``, ``"text"``, a function from the
    text of a completion, or its import path. ``"auto"``: as the reward function reads it, if it has a method
    ``final_answer``, as `NumericAnswer` has. None: no ``maj@k``."""

    def __post_init__(self) -> None:
        if not is_of_kind(self.threshold, Real) or not math.isfinite(self.threshold):
            raise ConfigError(
                f"threshold={self.threshold!r} must be a finite number: the reward from which on a response is right"
            )
        if self.answer not in (None, AUTO):
            named_reader(self.answer)
        if self.ks is None:
            return
        ks = tuple(self.ks) if isinstance(self.ks, Iterable) else ()
        if not ks or not all(is_of_kind(k, Integral) and k >= 1 for k in ks):
            raise ConfigError(
                f"ks={self.ks!r} must hold numbers of responses, each at least 1, as in (1, 4); None chooses them"
            )

    def check(self, algorithm: str, n: int, *, has_rewards: bool, setting: str = "evaluation_sampling.n") -> None:
        """Raise ConfigError for an algorithm without rewards, and for a ``k`` above the responses per prompt, ``n``.

        ``setting`` names that number in messages.
        """
        if not has_rewards:
            raise ConfigError(f"{algorithm} has no rewards that could tell what is right; leave accuracy out")
        if self.ks is not None and max(self.ks) > n:
            raise ConfigError(
                f"pass@{max(self.ks)} needs as many responses per prompt, and {setting}={n}; raise n, or lower "
                f"accuracy.ks"
            )
        if self.answer not in (None, AUTO) and n == 1:
            raise ConfigError(
                f"accuracy.answer={self.answer!r} is for majority votes among several responses, and "
                f"{setting}=1; raise n, or leave answer out"
            )

    def reader(self, functions: Sequence[RewardFunctions]) -> AnswerReader | None:
        """Return how final answers are read, given an algorithm's reward functions; None: they are not."""
        if self.answer is None:
            return None
        return reader_of_rewards(functions, self.function) if self.answer == AUTO else named_reader(self.answer)

    def scores(self, samples: Samples, column: str) -> QuestionScores:
        """Return the scores of the questions with a scored response.

        ``column`` holds the weighted sum of all rewards. Final answers are in `FINAL_ANSWER`, if they are known.
        """
        rewards = samples.tensor(self._column(samples, column)).tolist()
        answers = samples.tensor(FINAL_ANSWER).tolist() if FINAL_ANSWER in samples else [-1] * len(samples)
        responses: dict[str, list[Response]] = {}
        for question, reward, answer in zip(_questions(samples), rewards, answers, strict=True):
            if not math.isnan(reward):
                found = Response(reward >= self.threshold, None if answer < 0 else answer)
                responses.setdefault(question, []).append(found)
        if FINAL_ANSWER in samples and len(samples) and max(answers) < 0:
            rank_zero_warn(
                f"none of {len(samples)} held-out responses has a final answer, so that maj@k is 0; give "
                f"Accuracy(answer=...) a function that reads theirs, or None for no maj@k"
            )
        return QuestionScores.from_responses(responses, self.ks, reads_answers=FINAL_ANSWER in samples)

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


def _questions(samples: Samples) -> Iterator[str]:
    """Yield the name of each sample's question: 48 bits of the hash of its prompt, as the data has it, and its images.

    So runs with other tokenizers have the same names. Further questions with the same prompt have a number. Where the
    data has no prompts, because an environment writes them, names are of their tokens.
    """
    written = samples.tensor(PROMPT_KEY).tolist() if PROMPT_KEY in samples else [None] * len(samples)
    prompts = samples.data.get("prompt", written)
    images = samples.data.get(IMAGES, (None,) * len(samples))
    ids = samples.tensor("prompt_id").tolist()
    names: dict[int, str] = {}
    counts: Counter[str] = Counter()
    for prompt_id, prompt, shown in zip(ids, prompts, images, strict=True):
        if prompt_id not in names:
            key = shown.key if isinstance(shown, PromptImages) and shown else None
            content = json.dumps([prompt, key], sort_keys=True, default=str)
            name = blake2b(content.encode(), digest_size=6).hexdigest()
            counts[name] += 1
            names[prompt_id] = name if counts[name] == 1 else f"{name}-{counts[name]}"
        yield names[prompt_id]
