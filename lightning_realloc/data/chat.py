"""How does a row's text, or its list of messages, become token ids? Plain text and chat templates behind one face."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightning_realloc.errors import ConfigError, DataError

Message = Mapping[str, Any]
"""One turn of a conversation: ``role``, and ``content`` or ``tool_calls``."""
_OURS = frozenset({"tools", "tokenize", "add_generation_prompt", "continue_final_message"})
"""What a chat template is told by us."""
_TEXTS_AT_A_TIME = 1000  # bounds what the tokenizer keeps of each besides its ids


@dataclass(frozen=True, slots=True)
class Text:
    """What is to be encoded."""

    text: str
    place: str
    """For error messages: where in the data it is from."""
    opened: bool
    """Whether the tokenizer opens it as it opens texts, without closing it; False for what goes on, and for templates,
    which do so."""


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
    """Return whether ``value`` is a non-empty list of messages with ``role``, and ``content`` or ``tool_calls``."""
    return isinstance(value, list) and len(value) > 0 and all(map(_is_message, value))


def template_input(values: Mapping[str, Any], place: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a chat template is given besides a row's messages: ``tools``, and its settings by name.

    Args:
        values: The row's, of which the columns ``tools`` (a list of schemas, or JSON of one) and
            ``chat_template_kwargs`` (a mapping, or JSON of one) count.
        place: For error messages.
        defaults: Settings that the row's own come before.

    Raises:
        DataError: for columns that hold anything else.
    """
    own = _from_json(values.get("chat_template_kwargs"), "chat_template_kwargs", place)
    if own is not None and not isinstance(own, Mapping):
        raise DataError(f"{place}: its chat_template_kwargs must be a mapping, or JSON of one; got {_described(own)}")
    check_template_settings(own or {}, place)
    # A table of rows with other settings each holds null for those that a row has not.
    given = {name: value for name, value in (own or {}).items() if value is not None}
    return {**defaults, **given, "tools": _tools(values.get("tools"), place)}


def check_template_settings(settings: Mapping[str, Any], place: str) -> None:
    """Raise DataError for settings of a chat template that are not the user's to make."""
    taken = sorted(_OURS & settings.keys())
    if taken:
        raise DataError(
            f"{place}: chat_template_kwargs holds {taken}, which data modules set themselves; leave it out, and give "
            f"tools as a column 'tools'"
        )


def prompt_text(
    tokenizer: PreTrainedTokenizerBase, prompt: object, place: str, *, template: Mapping[str, Any] | None = None
) -> Text:
    """Return what generation starts from: text as the tokenizer opens it, messages as its template lays them out.

    Args:
        template: What the template is given besides messages, by :func:`template_input`.

    Raises:
        DataError: naming ``place``, when the prompt is neither.
    """
    if isinstance(prompt, str):
        return Text(prompt, place, opened=True)
    return conversation_text(tokenizer, prompt, place, add_generation_prompt=True, template=template)


def begun_answer(prompt: object) -> str | None:
    """Return what the assistant has said already, where a conversation ends with a message of its own."""
    if not is_conversation(prompt) or prompt[-1]["role"] != "assistant":
        return None
    return str(prompt[-1].get("content") or "")


def conversation_text(
    tokenizer: PreTrainedTokenizerBase, messages: object, place: str, *, add_generation_prompt: bool,
    continue_final_message: bool = False, template: Mapping[str, Any] | None = None,
) -> Text:  # fmt: skip
    """Return a whole conversation, laid out by the tokenizer's chat template."""
    if not is_conversation(messages):
        raise DataError(
            f"{place}: expected text or a list of messages with 'role', and 'content' or 'tool_calls'; got "
            f"{_described(messages)}"
        )
    if tokenizer.chat_template is None:
        raise DataError(
            f"{place} is a conversation, and {type(tokenizer).__name__} has no chat template to lay it out; "
            f"set tokenizer.chat_template or give prompts as text"
        )
    turns = [_without_nulls(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            turns, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            tokenize=False, **(template or {}),
        )  # fmt: skip
    except Exception as error:  # whatever a template raises, or does with messages that it does not know
        raise DataError(
            f"{place}: the chat template cannot lay out messages of {[message['role'] for message in turns]} "
            f"({type(error).__name__}: {error}); mend the row, or give the tokenizer another template"
        ) from error
    return Text(str(text), place, opened=False)


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> list[list[int]]:
    """Return the ids of every text, in their order; tokenizers are faster on many at a time.

    Raises:
        DataError: naming its place, for a text that the tokenizer cannot encode.
    """
    ids: list[list[int]] = [[] for _ in texts]
    for opened in (True, False):
        rows = [row for row, text in enumerate(texts) if text.opened == opened]
        for begin in range(0, len(rows), _TEXTS_AT_A_TIME):
            some = rows[begin : begin + _TEXTS_AT_A_TIME]
            for row, found in zip(some, _encoded(tokenizer, [texts[row] for row in some], opened), strict=True):
                ids[row] = found
    return ids


def prompt_token_ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Text]) -> list[list[int]]:
    """Return the ids of prompts.

    Raises:
        DataError: naming its place, for a prompt without tokens.
    """
    ids = token_ids(tokenizer, prompts)
    for prompt, found in zip(prompts, ids, strict=True):
        if not found:
            raise DataError(f"{prompt.place}: a prompt needs at least one token; {prompt.text!r} has none")
    return ids


def answer_of(tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], ids: list[int], place: str) -> list[int]:
    """Return what a whole conversation adds behind its prompt, ended by the end-of-sequence token.

    Raises:
        DataError: when the template lays out the beginning of the conversation differently once it goes on.
    """
    if ids[: len(prompt_ids)] != prompt_ids:
        raise DataError(
            f"{place}: the chat template must lay out a prompt the same way whether or not an answer follows, so that "
            f"the answer's tokens can be told apart; use a prefix-preserving template"
        )
    answer = ids[len(prompt_ids) :]
    # Templates usually close a turn themselves, with line breaks behind the end token.
    return answer if tokenizer.eos_token_id in answer else with_end(tokenizer, answer)


def with_end(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return the ids, ended by the tokenizer's end-of-sequence token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError(f"{type(tokenizer).__name__} has no end-of-sequence token to learn; set tokenizer.eos_token")
    return ids if ids[-1:] == [end] else [*ids, int(end)]


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value and ("content" in value or "tool_calls" in value)


def _without_nulls(message: Message) -> dict[str, Any]:
    """Return a message without what a table holds null for since only other messages have it.

    Templates ask whether ``tool_calls`` is there; whether there is ``content``, some ask by comparing it with null.
    """
    return {name: _pruned(value) for name, value in message.items() if value is not None or name == "content"}


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _pruned(inner) for name, inner in value.items() if inner is not None}
    return [_pruned(inner) for inner in value] if isinstance(value, list) else value


def _from_json(value: object, column: str, place: str) -> object:
    """Return a value that some data sets keep as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: its {column} are text, and no JSON: {error.msg}; write what it means") from error


def _tools(tools: object, place: str) -> list[Any] | None:
    """Return the schemas of tools."""
    tools = _from_json(tools, "tools", place)
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{place}: its tools must be a list of schemas, or JSON of one; got {_described(tools)}")
    return tools or None


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], opened: bool) -> list[list[int]]:
    try:
        found: list[list[int]] = tokenizer(
            [text.text for text in texts], add_special_tokens=opened, return_attention_mask=False, verbose=False
        )["input_ids"]
    except Exception as error:
        if len(texts) > 1:  # one after the other, to say which
            return [ids for text in texts for ids in _encoded(tokenizer, [text], opened)]
        raise DataError(
            f"{texts[0].place}: {type(tokenizer).__name__} cannot encode {_described(texts[0].text)} ({error}); "
            f"mend the text or leave the row out"
        ) from error
    if not opened:
        return found
    opening, num_closing = _added_tokens(tokenizer)
    bare = [ids[len(opening) : len(ids) - num_closing] for ids in found]
    # Texts that a chat template laid out may begin with the opening already, and models know it once.
    return [ids if opening and ids[: len(opening)] == opening else [*opening, *ids] for ids in bare]


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Return the tokens that the tokenizer puts before a text, and how many after it.

    Those after it are left out: no response goes on from a prompt that is closed.
    """
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    found = [n for n in range(len(whole) - len(bare) + 1) if bare and whole[n : n + len(bare)] == bare]
    return (whole[: found[0]], len(whole) - len(bare) - found[0]) if found else ([], 0)


def _described(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
