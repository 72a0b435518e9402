"""How does a row's text, or its list of messages, become token ids? Plain text and chat templates behind one face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightning_realloc.errors import ConfigError, DataError

Message = Mapping[str, Any]
"""One turn of a conversation: ``role`` and ``content``."""


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a Hugging Face name or folder.

    Raises:
        ConfigError: when there is none, or it cannot be read.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer could be loaded from {str(source)!r} ({str(error).splitlines()[0]}); give tokenizer= a "
            f"Hugging Face name, or a folder with tokenizer.json"
        ) from error
    return tokenizer


def is_conversation(value: object) -> TypeGuard[list[Message]]:
    """Return whether ``value`` is a non-empty list of messages with ``role`` and ``content``."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, Mapping) and "role" in message and "content" in message for message in value)
    )


def prompt_token_ids(tokenizer: PreTrainedTokenizerBase, prompt: object, place: str) -> list[int]:
    """Return the ids that generation starts from: text as the tokenizer encodes it, messages through its template.

    Raises:
        DataError: naming ``place``, when the prompt is neither, or has no tokens.
    """
    if isinstance(prompt, str):
        ids = _encoded(tokenizer, prompt, add_special_tokens=True)
    else:
        ids = conversation_token_ids(tokenizer, prompt, place, add_generation_prompt=True)
    if not ids:
        raise DataError(f"{place}: a prompt needs at least one token; {prompt!r} has none")
    return ids


def completion_token_ids(tokenizer: PreTrainedTokenizerBase, completion: str) -> list[int]:
    """Return the ids of a text that goes on after a prompt, ended by the tokenizer's end-of-sequence token."""
    return _with_end(tokenizer, _encoded(tokenizer, completion, add_special_tokens=False))


def text_token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a whole text, opened as the tokenizer opens texts and ended by its end-of-sequence token."""
    return _with_end(tokenizer, _encoded(tokenizer, text, add_special_tokens=True))


def conversation_token_ids(
    tokenizer: PreTrainedTokenizerBase, messages: object, place: str, *, add_generation_prompt: bool
) -> list[int]:
    """Return the ids of a whole conversation, laid out by the tokenizer's chat template."""
    if not is_conversation(messages):
        raise DataError(
            f"{place}: expected text or a list of messages with 'role' and 'content'; got {_described(messages)}"
        )
    if tokenizer.chat_template is None:
        raise DataError(
            f"{place} is a conversation, and {type(tokenizer).__name__} has no chat template to lay it out; "
            f"set tokenizer.chat_template or give prompts as text"
        )
    turns = [dict(message) for message in messages]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=add_generation_prompt, tokenize=False)
    return _encoded(tokenizer, str(text), add_special_tokens=False)


def answer_token_ids(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], conversation: object, place: str
) -> list[int]:
    """Return what the whole ``conversation`` adds behind its prompt, ended by the end-of-sequence token.

    Raises:
        DataError: when the template lays out the beginning of the conversation differently once it goes on.
    """
    ids = conversation_token_ids(tokenizer, conversation, place, add_generation_prompt=False)
    if ids[: len(prompt_ids)] != prompt_ids:
        raise DataError(
            f"{place}: the chat template must lay out a prompt the same way whether or not an answer follows, so that "
            f"the answer's tokens can be told apart; use a prefix-preserving template"
        )
    answer = ids[len(prompt_ids) :]
    # Templates usually close a turn themselves, with line breaks behind the end token.
    return answer if tokenizer.eos_token_id in answer else _with_end(tokenizer, answer)


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return ids


def _with_end(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError(f"{type(tokenizer).__name__} has no end-of-sequence token to learn; set tokenizer.eos_token")
    return ids if ids[-1:] == [end] else [*ids, int(end)]


def _described(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
