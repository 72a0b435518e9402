"""Environments of one call of the engine: one per sample, asked as the engine's environment.

An engine knows tokens alone. `Episodes` begins with the prompts that the environments give, answers each turn with the
tokens after it, and ends with the columns of rewards and conversations.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from lightning_realloc.batch.json_column import json_column
from lightning_realloc.batch.model_input import ModelInput, prompt_digest
from lightning_realloc.batch.samples import (
    PROMPT_IMAGES,
    Column,
    Ragged,
    Samples,
    image_column,
    images_input,
    model_inputs,
)
from lightning_realloc.data.chat import Message, as_message
from lightning_realloc.environments.columns import (
    CONVERSATION,
    FUNCTIONS,
    LAST_IMAGES,
    NUM_CALLS,
    OWN_METRICS,
    REWARDS,
    SECONDS,
    TOOL_METRICS,
    TURN_REWARDS,
)
from lightning_realloc.environments.episode import Episode, TurnTokens
from lightning_realloc.environments.episode_options import EpisodeOptions
from lightning_realloc.environments.partner import Replies
from lightning_realloc.errors import ConfigError, DataError
from lightning_realloc.generation import Completion, Turn
from lightning_realloc.generation.loop.environment import EVENT_LOOP
from lightning_realloc.generation.partners import PartnerQueue
from lightning_realloc.rewards.failure_rule import Failed
from lightning_realloc.rewards.functions import RewardFunctions


@dataclass(slots=True, eq=False)
class Episodes:
    """Episodes by sample id; an instance is the engine's environment."""

    options: EpisodeOptions
    _episodes: dict[int, Episode] = field(default_factory=dict)
    _broken: ConfigError | None = None
    """Error of an environment that breaks its contract, which ends the run."""

    @property
    def partner_queue(self) -> PartnerQueue | None:
        """Questions to models that environments talk to; None: there are no such models."""
        return None if self.options.partners is None else self.options.partners.queue

    def begin(self, samples: Samples, *, max_prompt_tokens: int | None = None) -> list[ModelInput]:
        """Reset one environment per sample, all at the same time, and return the prompts to generate from.

        Args:
            samples: One row per response, with ``prompt_ids`` and the data's columns.
            max_prompt_tokens: Most tokens of a prompt; a longer one fails its episode. None: no bound.

        Raises:
            ConfigError: for an environment whose ``reset`` gives no messages.
        """
        episodes = [self._episode(samples, place) for place in range(len(samples))]
        self._run(episode.begin() for episode in episodes)
        given = zip(samples.ids.tolist(), episodes, model_inputs(samples), strict=True)
        return [self._prompt(sample_id, episode, own, max_prompt_tokens) for sample_id, episode, own in given]

    def resume(self, samples: Samples, completions: Sequence[Completion]) -> None:
        """Bring the episodes of unfinished responses to their state, in a new environment where they are not here.

        Episodes of other responses, which are given up or continued on another rank, are closed.
        """
        continued = {completion.sample_id for completion in completions}
        gone = [self._episodes.pop(sample_id) for sample_id in self._episodes.keys() - continued]
        self._run(episode.close() for episode in gone)
        lost = []
        for place, completion in enumerate(completions):
            if completion.sample_id not in self._episodes:
                lost.append(_resumed(self._episode(samples, place), answered_turns(completion)))
        self._run(lost)

    async def __call__(self, turn: Turn) -> ModelInput | None:
        """Return the tokens after a turn, with the images that they show; None: the response is finished."""
        tokens = TurnTokens((*turn.prompt, *turn.token_ids[: turn.begin]), turn.token_ids[turn.begin :])
        try:
            return await self._episodes[turn.sample_id].answer(turn.number, tokens)
        except ConfigError as error:
            self._broken = error
            raise

    def finish(
        self, completions: Sequence[Completion], functions: RewardFunctions | None = None
    ) -> tuple[list[Completion], dict[str, Column]]:
        """End the episodes of finished responses; return the completions, and their columns of B values.

        A completion whose reward could not be computed has failed as one whose turn was not answered.

        Args:
            completions: Responses, some of which may be unfinished.
            functions: Reward functions, of which those that read environments are called.

        Raises:
            ConfigError: for an environment that broke its contract.
        """
        if self._broken is not None:
            raise self._broken
        episodes = [self._episodes[completion.sample_id] for completion in completions]
        done = [completion.finish_reason != "unfinished" for completion in completions]
        ended = [episode for episode, is_done in zip(episodes, done, strict=True) if is_done]
        self._run(episode.finish() for episode in ended)
        talks = [episode.messages(*_tokens_of(c)) for episode, c in zip(episodes, completions, strict=True)]
        judged = {} if functions is None else _judged(functions, episodes, completions, talks)
        self._run(episode.close() for episode in ended)
        for completion, is_done in zip(completions, done, strict=True):
            if is_done:
                del self._episodes[completion.sample_id]
        settled = list(map(_settled, completions, episodes))
        return settled, self._columns(episodes, talks, [completion.error for completion in settled]) | judged

    def close(self) -> None:
        """Close all environments, after an error or where their responses are not continued."""
        episodes, self._episodes = list(self._episodes.values()), {}
        with suppress(ConfigError):  # `finish` raises it; here, it could hide the error that ended the call
            self._run(episode.close() for episode in episodes)

    # ---- parts
    def _episode(self, samples: Samples, place: int) -> Episode:
        row = {name: column[place] for name, column in samples.data.items()}
        row["prompt"] = as_message(row["prompt"], True)
        sample_id = int(samples.ids[place])
        made = self._episodes[sample_id] = Episode(self.options, row, Replies(sample_id))
        return made

    def _prompt(self, sample_id: int, episode: Episode, own: ModelInput, most: int | None) -> ModelInput:
        """Return the prompt of an episode: the data's, unless the environment has another one, or tools."""
        if not episode.changes_prompt:
            return own
        place = f"the prompt of sample {sample_id} with what {type(episode.shown).__name__} adds by reset and tools"
        try:
            ids = tuple(episode.chat.prompt_ids(episode.prompt, episode.tools, of_data=episode.row["prompt"]))
        except DataError as error:
            episode.refuse(f"{place} cannot be read: {error}")
            return own
        if most is not None and len(ids) > most:
            episode.refuse(
                f"{place} has {len(ids)} tokens, and a response has room after at most {most}; return less from reset, "
                f"describe fewer tools, or leave the row out"
            )
            return own
        if (images := episode.images) is not None:
            return images_input(ids, images)
        key = prompt_digest(ids, {}, of_inputs=own.prompt_key) if own.extras else -1
        return ModelInput(ids, own.extras, key)

    def _columns(
        self, episodes: Sequence[Episode], talks: Sequence[list[Message]], errors: Sequence[str | None]
    ) -> dict[str, Column]:
        rewards = [math.nan if episode.reward is None else episode.reward for episode in episodes]
        turns = [[turn.result.reward or 0.0 for turn in episode.turns] for episode in episodes]
        metrics = [episode.metrics() for episode in episodes]
        of_tools = {
            name: torch.tensor([found.get(name, 0.0) for found in metrics], dtype=torch.float32)
            for name in (f"{kind}/{tool.name}" for kind in TOOL_METRICS for tool in self.options.factory.tools)
        }
        own = {
            f"{OWN_METRICS}{name}": torch.tensor([found.get(name, math.nan) for found in metrics], dtype=torch.float32)
            for name in self.options.factory.metric_names
        }
        return {
            REWARDS: torch.tensor(rewards, dtype=torch.float32),
            TURN_REWARDS: Ragged.from_list(turns, dtype=torch.float32),
            SECONDS: torch.tensor([sum(episode.seconds) for episode in episodes], dtype=torch.float32),
            NUM_CALLS: torch.tensor([episode.num_calls for episode in episodes], dtype=torch.int64),
            PROMPT_IMAGES: image_column(episode.images for episode in episodes),
            LAST_IMAGES: image_column(episode.last_images for episode in episodes),
            CONVERSATION: json_column(map(_described, episodes, talks, metrics, errors)),
            **of_tools,
            **own,
        }

    def _run(self, coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run coroutines at the same time, as many as environments may run, and raise the first error."""
        EVENT_LOOP.submit(_gathered(list(coroutines), self.options.bounds.max_concurrent)).result()


def _judged(
    functions: RewardFunctions,
    episodes: Sequence[Episode],
    completions: Sequence[Completion],
    talks: Sequence[list[Message]],
) -> dict[str, Column]:
    """Return the rewards of functions that read environments; a failure that is masked fails its episode.

    Functions get finished responses alone. Failed ones, whose environment is None if its state is lost, are among them
    if they are learned.
    """
    rewards = {name: torch.full((len(episodes),), math.nan) for name in functions.reading_environments}
    known = [
        place
        for place, (episode, completion) in enumerate(zip(episodes, completions, strict=True))
        if completion.finish_reason != "unfinished"
        and (episode.options.bounds.on_failure == "learn" or (completion.error or episode.failure) is None)
    ]
    if rewards and known:
        chosen = [episodes[place] for place in known]
        found = functions.judge_environments(
            [list(episode.prompt) for episode in chosen],
            [talks[place] for place in known],
            [completions[place].token_ids for place in known],
            {name: [episode.row.get(name) for episode in chosen] for name in chosen[0].row if name != "prompt"},
            [episode.shown for episode in chosen],
        )
        for name, outcomes in found.items():
            for place, outcome in zip(known, outcomes, strict=True):
                if isinstance(outcome, Failed):
                    episodes[place].failure = outcome.reason
                elif outcome is not None:
                    rewards[name][place] = outcome
    return {f"{FUNCTIONS}{name}": values for name, values in rewards.items()}


async def _gathered(coroutines: Sequence[Coroutine[Any, Any, None]], most: int) -> None:
    may_run = asyncio.Semaphore(most)

    async def one(coroutine: Coroutine[Any, Any, None]) -> None:
        async with may_run:
            await coroutine

    results = await asyncio.gather(*map(one, coroutines), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _resumed(episode: Episode, turns: Sequence[TurnTokens]) -> None:
    await episode.begin()
    for number, tokens in enumerate(turns, start=1):
        await episode.answer(number, tokens)


def answered_turns(completion: Completion) -> list[TurnTokens]:
    """Return the model's turns that an environment has answered."""
    turns, num_answers = _tokens_of(completion)
    return turns[:num_answers]


def _tokens_of(completion: Completion) -> tuple[list[TurnTokens], int]:
    """Return the model's turns, and the number of answers in a completion."""
    turns, num_answers, begin = [], 0, 0
    for chosen, run in groupby(completion.model_mask):
        end = begin + sum(1 for _ in run)
        if chosen:
            before = (*completion.prompt, *completion.token_ids[:begin])
            turns.append(TurnTokens(before, completion.token_ids[begin:end]))
        num_answers += not chosen
        begin = end
    return turns, num_answers


def _settled(completion: Completion, episode: Episode) -> Completion:
    if episode.failure is not None and completion.error is None:
        return replace(completion, finish_reason="failure", error=episode.failure)
    return replace(completion, finish_reason=episode.end) if completion.finish_reason == "environment" else completion


def _described(
    episode: Episode, talk: list[Message], metrics: Mapping[str, float], error: str | None
) -> dict[str, Any]:
    return {
        "prompt": list(episode.prompt),
        "messages": talk,
        "seconds": episode.seconds,
        "rewards": [turn.result.reward for turn in episode.turns],
        "metrics": dict(metrics),
        "failure": error,
    }
