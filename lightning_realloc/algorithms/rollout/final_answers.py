"""Read the final answers of responses, for majority votes: by name, by a function, or as a reward function reads them.

The text of an answer stays on the rank that generated it. Other ranks get 63 bits of its hash, equal for equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lightning_realloc.algorithms.base.rollout_columns import response_texts
from lightning_realloc.batch.json_column import json_values
from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.chat import partial_answer
from lightning_realloc.environments.columns import CONVERSATION
from lightning_realloc.errors import ConfigError, RewardError, error_line
from lightning_realloc.rewards.functions import RewardFunctions
from lightning_realloc.rewards.signatures import check_returns, check_takes, function_name, is_async, resolved
from lightning_realloc.rewards.texts import completion_texts, shortened
from lightning_realloc.rewards.verifiers import NumericAnswer, last_boxed

AnswerReader = Callable[[str], object]
"""Final answer of a completion's text; None if it gives none. Answers with the same text are equal."""
FINAL_ANSWER = "final_answer"
"""Column (B,) int64 of the hash of each response's final answer; -1 for none."""
READERS: dict[str, AnswerReader] = {
    "number": NumericAnswer(reader="plain").final_answer,
    "boxed": last_boxed,
    "text": str.strip,
}
"""Readers by name: the number that `final_number` finds, the content of the last ``\\boxed{}``, or the whole text."""
AUTO = "auto"
"""As a reward function reads answers, by its method ``final_answer(text)``, if one of them has it."""
_WAY_OUT = "write a function from the text of a completion to its answer, or to None for no answer"


def named_reader(answer: AnswerReader | str) -> AnswerReader:
    """Return the reader of a name, an import path, or a function.

    Raises:
        ConfigError: for any other value.
    """
    if isinstance(answer, str) and answer in READERS:
        return READERS[answer]
    if isinstance(answer, str) and not {":", "."} & {*answer}:
        known = ", ".join(map(repr, (AUTO, *READERS)))
        raise ConfigError(
            f"answer={answer!r} must be one of {known}, a function, or its import path as in 'package.module:name'; "
            f"None for no majority votes"
        )
    reader = resolved(answer, what="answer reader", error=ConfigError)
    check_takes(reader, "a completion's text", what="the answer reader", way_out=_WAY_OUT, error=ConfigError)
    check_returns(reader, f"the answer reader {function_name(reader)}", error=ConfigError)
    if is_async(reader):
        raise ConfigError(f"the answer reader {function_name(reader)} is a coroutine function; {_WAY_OUT}")
    return reader


def reader_of_rewards(functions: Sequence[RewardFunctions], name: str | None) -> AnswerReader | None:
    """Return how the reward function of this name reads answers, or the first one that does; None without any."""
    for group in functions:
        for own_name, function in zip(group.names, group.functions, strict=True):
            inner: Any = function
            while not hasattr(inner, "final_answer") and hasattr(inner, "function"):  # of a wrapper
                inner = inner.function
            if name in (None, own_name) and hasattr(inner, "final_answer"):
                reader: AnswerReader = inner.final_answer
                return reader
    return None


def adding_answers(
    add_others: Callable[[Samples], Samples] | None,
    prompts: Samples,
    tokenizer: PreTrainedTokenizerBase,
    reader: AnswerReader,
) -> Callable[[Samples], Samples]:
    """Return a function that adds `FINAL_ANSWER` to responses to these prompts, after other columns."""

    def add(samples: Samples) -> Samples:
        made = samples if add_others is None else add_others(samples)
        texts = _completion_texts(made, prompts, tokenizer)
        hashes = torch.tensor(list(map(partial(_hash, reader), texts)), dtype=torch.int64)
        return made.with_columns(**{FINAL_ANSWER: hashes})

    return add


def _completion_texts(samples: Samples, prompts: Samples, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each response, without special tokens; the last turn of a conversation."""
    if CONVERSATION in samples:
        return completion_texts([talk["messages"] for talk in json_values(samples.ragged(CONVERSATION))])
    given = prompts.data.get("prompt", (None,) * len(prompts))
    begun = {row: partial_answer(prompt) or "" for row, prompt in zip(prompts.ids.tolist(), given, strict=True)}
    rows = samples.tensor("prompt_id").tolist()
    return [begun[row] + text for row, text in zip(rows, response_texts(samples, tokenizer), strict=True)]


def _hash(reader: AnswerReader, text: str) -> int:
    try:
        answer = reader(text)
    except Exception as error:
        raise RewardError(
            f"the answer reader {function_name(reader)} raised {type(error).__name__}{error_line(error)}: {error}; it "
            f"was given {shortened(text)}; return None for a text without an answer"
        ) from error
    words = "" if answer is None else " ".join(str(answer).split())
    return int.from_bytes(blake2b(words.encode(errors="replace"), digest_size=8).digest()) >> 1 if words else -1
