"""Data sets of reasoning-gym as rows of prompts, with a reward function, and an environment that gives several tries.

A row names its data set, the settings and the index, from which any rank makes the problem again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from lightning_realloc.environments.message_environment import Message, MessageEnvironment, StepResult
from lightning_realloc.errors import ConfigError, DataError, describe_error
from lightning_realloc.rewards.texts import completion_texts

COLUMN = "reasoning_gym"
"""Column of the rows that says which problem it is."""
_NUM_DATASETS = 32
"""Data sets that a process keeps; some read word lists and puzzles for a second."""


def reasoning_gym_rows(
    name: str, size: int, seed: int = 0, *, system_prompt: str = SYSTEM_PROMPTS["default"], **config: Any
) -> list[dict[str, Any]]:
    """Return rows for `PromptDataModule`. Rows of several data sets may be concatenated.

    Args:
        name: Name of the data set in reasoning-gym, such as ``"chain_sum"``.
        size: Number of rows.
        seed: Seed of the problems. Another seed gives problems to validate with.
        system_prompt: First message, which asks for the answer between ``<answer>`` and ``</answer>``. If empty, there
            is none.
        config: Settings of the data set.

    Raises:
        DataError: for data sets and settings that reasoning-gym refuses.
    """
    try:
        settings = json.dumps(config, sort_keys=True)
    except TypeError as error:
        raise DataError(
            f"rows hold the settings of {name!r}, which must be numbers, text, lists and dicts ({error}); concatenate "
            f"rows of several data sets instead of a composite one"
        ) from error
    dataset = _dataset(name, size, seed, settings)
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    rows = []
    for index in range(size):
        question = dataset[index]["question"]
        problem = {"name": name, "size": size, "seed": seed, "config": settings, "index": index, "question": question}
        rows.append({"prompt": [*system, {"role": "user", "content": question}], COLUMN: problem})
    return rows


def reasoning_gym_score(
    completions: Sequence[str | list[Message]], reasoning_gym: Sequence[Mapping[str, Any]], **columns: object
) -> list[float]:
    """Return the data sets' scores of answers to rows of `reasoning_gym_rows`: a reward function of one turn.

    Raises:
        ConfigError: for a row whose problem this process makes differently.
    """
    scores = []
    for text, problem in zip(completion_texts(completions), reasoning_gym, strict=True):
        dataset, entry = _problem(problem)
        scores.append(float(dataset.score_answer(extract_answer(text), entry)))
    return scores


class ReasoningGymEnvironment(MessageEnvironment):
    """Environment that scores answers to the rows of `reasoning_gym_rows`, and asks again after a wrong one.

    The reward is the score of the last answer by the data set's ``score_answer``. A score of 1 ends the episode.

    Args:
        max_tries: Answers that the model may give.
    """

    def __init__(self, max_tries: int = 1) -> None:
        if isinstance(max_tries, bool) or not isinstance(max_tries, int) or max_tries < 1:
            raise ConfigError(f"max_tries={max_tries!r} must be a whole number of at least 1")
        self._max_tries = max_tries
        self._num_tries = 0

    def reset(self, row: Mapping[str, Any]) -> None:
        """Make the row's problem again.

        Raises:
            ConfigError: if the row has none, or it is not the one that the row's prompt shows.
        """
        problem = row.get(COLUMN)
        if not isinstance(problem, Mapping):
            raise ConfigError(
                f"ReasoningGymEnvironment needs rows with a column {COLUMN!r}, which reasoning_gym_rows(...) makes; "
                f"the row has {sorted(row)}"
            )
        self._dataset, self._entry = _problem(problem)
        self._score = float(self._dataset.score_answer(None, self._entry))

    def step(self, message: Message) -> StepResult:
        """Score an answer."""
        self._num_tries += 1
        answer = extract_answer(message["content"])
        self._score = float(self._dataset.score_answer(answer, self._entry))
        is_solved = self._score >= 1
        metrics = {"tries": 1.0, "solved": float(is_solved)}
        if is_solved or self._num_tries == self._max_tries:
            return StepResult(done=True, metrics=metrics)
        return StepResult([{"role": "user", "content": _feedback(answer, self._score)}], metrics=metrics)

    def get_reward(self) -> float:
        """Return the score of the last answer; without any, the data set's score of no answer."""
        return self._score


def _problem(problem: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the data set and the entry of a row's problem.

    Raises:
        ConfigError: if the entry is not the one that the row's prompt shows.
    """
    name, index = problem["name"], problem["index"]
    dataset = _dataset(name, problem["size"], problem["seed"], problem["config"])
    entry = dataset[index]
    if entry["question"] != problem["question"]:
        raise ConfigError(
            f"problem {index} of {name!r} differs from the one in its row; use one version of reasoning-gym on all "
            f"machines, and set PYTHONHASHSEED=0 for all processes, because some of its data sets depend on it"
        )
    return dataset, entry


def _feedback(answer: str | None, score: float) -> str:
    if answer is None:
        return "There is no answer between <answer> and </answer>. Try again."
    return f"Your answer has a score of {score:.2f} out of 1. Try again."


@lru_cache(maxsize=_NUM_DATASETS)
def _dataset(name: str, size: int, seed: int, settings: str) -> Any:
    """Return a data set of reasoning-gym. Its items depend on its settings and their index alone."""
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(settings))
    except Exception as error:
        raise DataError(
            f"reasoning-gym cannot make the data set {name!r} with size={size}, seed={seed} and {settings} "
            f"({describe_error(error)}); reasoning_gym.factory.DATASETS lists names and settings"
        ) from error
