"""Agents as scripts for TRL have them, and an engine that writes given turns in place of a model's."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.environments.environment_factory import EnvironmentFactory
from lightning_realloc.environments.episode_options import EpisodeOptions
from lightning_realloc.environments.episodes import Episodes
from lightning_realloc.environments.turns.turn_parser import TurnParser
from lightning_realloc.generation import Completion, Conversation, Turn
from tests.environments.turns.chat_families import family_of, tokenizer_of


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: First number.
        b: Second number.

    Returns:
        The product.
    """
    return a * b


async def look_up(word: str) -> str:
    """Look up a word.

    Args:
        word: The word.

    Returns:
        Its meaning.
    """
    await asyncio.sleep(0)
    return f"{word} is a word."


class EchoEnv:
    """Another task of the same run, whose methods are ``async``, and which a reward function judges."""

    async def reset(self, **columns: Any) -> None:
        """Forget what was said."""
        self.heard: list[str] = []

    async def say(self, text: str) -> str:
        """Say something.

        Args:
            text: The words.

        Returns:
            The same words.
        """
        self.heard.append(text)
        return text


def chat_tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a template whose turns end with the end-of-sequence token."""
    tokenizer = copy.deepcopy(tokenizer_of(name))
    tokenizer.eos_token = family_of(name).stops[0]
    return tokenizer


def episodes_of(tokenizer: PreTrainedTokenizerFast, environment: Any, tools: Sequence[Any], **bounds: Any) -> Episodes:
    """Return the episodes of one call of an engine."""
    factory, stops = EnvironmentFactory(environment, tools), frozenset({tokenizer.eos_token_id})
    return Episodes(EpisodeOptions(factory, tokenizer, stops, {}, TurnParser(tokenizer), Conversation(**bounds)))


def samples_of(tokenizer: PreTrainedTokenizerFast, rows: Sequence[dict[str, Any]]) -> Samples:
    """Return rows with a prompt of messages as a data module makes them."""
    ids = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in rows]
    data = {name: tuple(row[name] for row in rows) for name in rows[0]}
    return Samples(torch.arange(len(rows)), {"prompt_ids": Ragged.from_list(ids)}, data)


def play(
    episodes: Episodes, samples: Samples, scripts: Sequence[Sequence[str]], *, most: int = 4096
) -> list[Completion]:
    """Return the responses of an engine whose model writes the given turns.

    Args:
        scripts: Turns of each sample, without the token that ends them; the model is silent once they are used up.
        most: Most tokens of a response.
    """
    inputs = episodes.begin(samples)
    return [
        asyncio.run(_played(episodes, int(samples.ids[place]), own, scripts[place], most))
        for place, own in enumerate(inputs)
    ]


async def _played(episodes: Episodes, sample_id: int, own: Any, script: Sequence[str], most: int) -> Completion:
    tokenizer, ids, mask, reason = episodes.options.tokenizer, [], [], "length"
    for number, text in enumerate(script, start=1):
        begin, turn = len(ids), [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids += turn[: most - begin]
        mask += [True] * (len(ids) - begin)
        if len(ids) - begin < len(turn):
            break
        answer = await episodes(Turn(sample_id, sample_id, own.token_ids, tuple(ids), number, begin))
        if answer is None:
            reason = "stop"
            break
        if len(answer.token_ids) >= most - len(ids):
            break
        ids += answer.token_ids
        mask += [False] * len(answer.token_ids)
    return Completion(
        sample_id,
        sample_id,
        tuple(ids),
        (0.0,) * len(ids),
        reason,
        tuple(mask),
        (0,) * len(ids),
        own,  # type: ignore[arg-type]
    )


def hermes(name: str, **arguments: Any) -> str:
    """Return a call as Qwen's models write it."""
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
