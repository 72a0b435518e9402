"""Tokenize plain text and conversations: chat templates, special tokens, prompts and answers."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from lightning_realloc.data.shown_images import expanded, shown_images, template_part
from lightning_realloc.data.tokenizers import needs_parts
from lightning_realloc.errors import DataError, described

Message = Mapping[str, Any]
"""One turn of a conversation: ``role``, and ``content`` or ``tool_calls``."""
_RESERVED_SETTINGS = frozenset({"tools", "tokenize", "add_generation_prompt", "continue_final_message"})
"""Arguments of ``apply_chat_template`` that data modules set themselves."""
_TEXT_ROLES = frozenset({"system", "developer", "user", "assistant"})
"""Roles whose content is text. Templates write that of others, such as ``tool`` and ``ipython``, as JSON."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Types of the parts of a message's content that are text."""
_IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})
"""Types of the parts of a message that are images, as Hugging Face and OpenAI name them."""
_WHY_UNREAD: Mapping[str, str] = {
    "image": "and the tokenizer is that of a model that reads text alone, which would learn without it; take a "
    "vision-language model, or give tokenizer= its processor",
    "video": "and models here read text and images alone, and would learn without it; give videos as tensors, in "
    "columns like 'input/pixel_values_videos'",
    "audio": "and models here read text and images alone, and would learn without it",
}
"""Kind of media -> reason why a column of it is not read, and the way out."""
_MEDIA_COLUMNS = frozenset(name + end for name in _WHY_UNREAD for end in ("", "s"))
"""Columns that hold what a row shows besides its text."""
_TEXTS_PER_BATCH = 1000
"""Texts per tokenizer call; raising it raises the host memory of the tokenizer's other outputs."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text to encode."""

    text: str
    place: str
    """Location in the data, such as file and line, for error messages."""
    add_bos: bool
    """Whether to add the tokenizer's leading special tokens; trailing ones are never added. False for text that
    continues another one and for rendered templates, which contain them."""


def is_conversation(value: object) -> TypeGuard[list[Message]]:
    """Return whether ``value`` is a non-empty list of messages with ``role``, and ``content`` or ``tool_calls``."""
    return isinstance(value, list) and len(value) > 0 and all(map(_is_message, value))


def readable_values(
    values: Mapping[str, Any], message_columns: Collection[str], place: str, *, read: Collection[str] = ()
) -> dict[str, Any]:
    """Return the columns of a row, with text, or shown images, as the content of the messages in ``message_columns``.

    Args:
        read: Columns of images that the model reads.

    Raises:
        DataError: for other images, videos and sounds, in messages or in columns; they would be left out.
    """
    for name in sorted(_MEDIA_COLUMNS & values.keys() - set(read)):
        if _holds_media(values[name]):
            raise DataError(
                f"{place}: column {name!r} holds {described(values[name])}, {_WHY_UNREAD[name.rstrip('s')]}; rename "
                f"the column if only reward functions or a tabulate() of your own read it"
            )
    return {
        name: plain_messages(value, place) if name in message_columns and is_conversation(value) else value
        for name, value in values.items()
    }


def plain_messages(messages: Sequence[Message], place: str) -> list[Message]:
    """Return messages whose content is text. Of content in parts, the texts are joined, unless images are shown.

    The content of a tool, whose role has several names, may be any value, which templates write as JSON.

    Raises:
        DataError: for other content, such as an image; the message names ``place``.
    """
    if shown_images(messages):
        return list(messages)
    return [
        {**message, "content": _text_of(message, place)} if _is_in_parts(message) else message for message in messages
    ]


def template_input(values: Mapping[str, Any], place: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a chat template besides the messages: ``tools``, and settings by name.

    Args:
        values: Columns of the row. ``tools`` is a list of schemas, or JSON of one; ``chat_template_kwargs`` is a
            mapping, or JSON of one. Other columns are ignored.
        place: Location of the row, for error messages.
        defaults: Settings that the row's own override.

    Raises:
        DataError: if one of the two columns holds anything else.
    """
    own = _from_json(values.get("chat_template_kwargs"), "chat_template_kwargs", place)
    if own is not None and not isinstance(own, Mapping):
        raise DataError(f"{place}: its chat_template_kwargs must be a mapping, or JSON of one; got {described(own)}")
    check_template_settings(own or {}, place)
    # Tables hold null for settings that only other rows have.
    given = {name: value for name, value in (own or {}).items() if value is not None}
    return {**defaults, **given, "tools": _tools(values.get("tools"), place)}


def check_template_settings(settings: Mapping[str, Any], place: str) -> None:
    """Raise DataError for settings of a chat template that data modules set themselves."""
    taken = sorted(_RESERVED_SETTINGS & settings.keys())
    if taken:
        raise DataError(
            f"{place}: chat_template_kwargs holds {taken}, which data modules set themselves; remove it, and give "
            f"tools as a column 'tools'"
        )


def as_message(prompt: Any, makes_messages: bool) -> Any:
    """Return a prompt, or the user message that it becomes if it is text and ``makes_messages``."""
    return [{"role": "user", "content": prompt}] if makes_messages and isinstance(prompt, str) else prompt


def prompt_text(
    tokenizer: PreTrainedTokenizerBase, prompt: object, place: str, *, template: Mapping[str, Any] | None = None
) -> Text:
    """Return the prompt to generate from: plain text, or messages rendered by the chat template.

    Args:
        template: Arguments of the template besides messages, from :func:`template_input`.

    Raises:
        DataError: if the prompt is neither text nor messages; the message names ``place``.
    """
    if isinstance(prompt, str):
        return Text(prompt, place, add_bos=True)
    return conversation_text(tokenizer, prompt, place, add_generation_prompt=True, template=template)


def partial_answer(prompt: object) -> str | None:
    """Return the text of a final assistant message, which generation continues; None if there is none."""
    if not is_conversation(prompt) or prompt[-1]["role"] != "assistant":
        return None
    return str(prompt[-1].get("content") or "")


def answer_message(prompt: object, text: str) -> Message:
    """Return a response as a message; a final assistant message of the prompt, which it continues, is part of it."""
    return {"role": "assistant", "content": (partial_answer(prompt) or "") + text}


def conversation_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: object,
    place: str,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    template: Mapping[str, Any] | None = None,
) -> Text:
    """Return a whole conversation, rendered by the tokenizer's chat template."""
    if not is_conversation(messages):
        raise DataError(
            f"{place}: expected text or a list of messages with 'role', and 'content' or 'tool_calls'; got "
            f"{described(messages)}"
        )
    if tokenizer.chat_template is None:
        raise DataError(
            f"{place} is a conversation, and {type(tokenizer).__name__} has no chat template to render it; "
            f"set tokenizer.chat_template or give prompts as text"
        )
    images = shown_images(messages)
    turns = [_without_nulls(message) for message in plain_messages(messages, place)]
    turns = [_in_parts(message) for message in turns] if images or needs_parts(tokenizer) else turns
    try:
        text = tokenizer.apply_chat_template(
            turns,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **(template or {}),
        )
    except Exception as error:  # templates may raise anything, also for messages that they do not know
        raise DataError(
            f"{place}: the chat template cannot render messages of {[message['role'] for message in turns]} "
            f"({type(error).__name__}: {error}); correct the row, or give the tokenizer another template"
        ) from error
    return Text(expanded(str(text), images, place), place, add_bos=False)


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> list[list[int]]:
    """Return the token ids of every text, encoded in batches because tokenizers are faster on many texts.

    Raises:
        DataError: for a text that the tokenizer cannot encode; the message names its place.
    """
    ids: list[list[int]] = [[] for _ in texts]
    for add_bos in (True, False):
        rows = [row for row, text in enumerate(texts) if text.add_bos == add_bos]
        for begin in range(0, len(rows), _TEXTS_PER_BATCH):
            some = rows[begin : begin + _TEXTS_PER_BATCH]
            for row, found in zip(some, _encoded(tokenizer, [texts[row] for row in some], add_bos), strict=True):
                ids[row] = found
    return ids


def prompt_token_ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Text]) -> list[list[int]]:
    """Return the token ids of prompts.

    Raises:
        DataError: for a prompt without tokens; the message names its place.
    """
    ids = token_ids(tokenizer, prompts)
    for prompt, found in zip(prompts, ids, strict=True):
        if not found:
            raise DataError(f"{prompt.place}: a prompt needs at least one token; {prompt.text!r} has none")
    return ids


def response_start(prompt_ids: Sequence[int], ids: Sequence[int], place: str) -> int:
    """Return the index in the ids of a whole text at which the tokens of its response start.

    Prompt and response are encoded as one text, because a tokenizer may join their characters in one token, or add a
    space before a response that it encodes alone. A token with characters of both belongs to the response.

    Args:
        prompt_ids: Token ids of the prompt alone.
        ids: Token ids of the whole text, which starts with the prompt.
        place: Location of the row, for error messages.

    Raises:
        DataError: if no token of the prompt is left before the response.
    """
    start = len(prompt_ids)
    if list(ids[:start]) != list(prompt_ids):
        pairs = enumerate(zip(prompt_ids, ids, strict=False))
        start = next((index for index, (a, b) in pairs if a != b), len(ids))
    if start == 0:
        raise DataError(
            f"{place}: the tokenizer joins the whole prompt with the start of the response, so no token of the prompt "
            f"is left; end the prompt with a space or a line break, or use a tokenizer that adds a first token"
        )
    return start


def ended_answer(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return the ids of a rendered answer, ended by the end-of-sequence token unless the template has ended it."""
    # Templates usually end a turn themselves, with line breaks after the end token.
    return ids if tokenizer.eos_token_id in ids else with_eos(tokenizer, ids)


def with_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return the ids, ended by the tokenizer's end-of-sequence token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError(f"{type(tokenizer).__name__} has no end-of-sequence token to learn; set tokenizer.eos_token")
    return ids if ids[-1:] == [end] else [*ids, int(end)]


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value and ("content" in value or "tool_calls" in value)


def _is_in_parts(message: Message) -> bool:
    """Return whether a message's content is something else than text."""
    content = message.get("content")
    if message["role"] not in _TEXT_ROLES:
        return isinstance(content, list) and all(isinstance(part, Mapping) and "type" in part for part in content)
    return not isinstance(content, str | None)


def _text_of(message: Message, place: str) -> str:
    parts = message["content"] if isinstance(message["content"], list) else [message["content"]]
    unreadable = [part for part in parts if not is_text_part(part)]
    if unreadable and all(map(is_image_part, unreadable)):
        raise DataError(f"{place}: a message of role {message['role']!r} shows an image, {_WHY_UNREAD['image']}")
    if unreadable:
        raise DataError(
            f"{place}: the content of a message must be text, or a list of texts and images like "
            f'{{"type": "text", "text": "..."}}; one of role {message["role"]!r} holds '
            f"{', '.join(sorted(set(map(_kind, unreadable))))}; correct or remove it"
        )
    return "".join(part["text"] for part in parts)


def is_text_part(part: object) -> bool:
    """Return whether a part of a message is text."""
    return isinstance(part, Mapping) and part_type(part) in _TEXT_PARTS and isinstance(part.get("text"), str)


def is_image_part(part: object) -> bool:
    """Return whether a part of a message shows an image."""
    return isinstance(part, Mapping) and part_type(part) in _IMAGE_PARTS


def part_type(part: Mapping[str, Any]) -> str | None:
    """Return the type of a part of a message; None for something else."""
    kind = part.get("type")
    return kind if isinstance(kind, str) else None  # of other rows, such as lists, which a set cannot look up


def _kind(part: object) -> str:
    kind = part_type(part) if isinstance(part, Mapping) else None
    return described(part) if kind is None or kind in _TEXT_PARTS else repr(kind)


def _holds_media(value: object) -> bool:
    """Return whether a column's value is an image, video or sound: an object, bytes, or the name of such a file."""
    if isinstance(value, list | tuple):
        return any(map(_holds_media, value))
    if isinstance(value, str):
        kind = mimetypes.guess_type(value)[0] or ""  # also of addresses, and of data in an address
        return kind.startswith(("image/", "video/", "audio/"))
    if isinstance(value, Mapping):  # tables hold a mapping of nulls where other rows have a file
        return any(held is not None for held in value.values())
    return not isinstance(value, int | float | None)


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with a content in parts, those of images with their ``type`` alone."""
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return {**message, "content": list(map(template_part, content)) if isinstance(content, list) else content}


def _without_nulls(message: Message) -> dict[str, Any]:
    """Return a message without the nulls that a table holds for fields that only other messages have.

    Templates test whether ``tool_calls`` exists. Null ``content`` stays, because some templates compare it with null.
    """
    return {name: _pruned(value) for name, value in message.items() if value is not None or name == "content"}


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _pruned(inner) for name, inner in value.items() if inner is not None}
    return [_pruned(inner) for inner in value] if isinstance(value, list) else value


def _from_json(value: object, column: str, place: str) -> object:
    """Return the value of a column that some data sets store as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: its {column} are text, but not JSON: {error.msg}; write valid JSON") from error


def _tools(tools: object, place: str) -> list[Any] | None:
    """Return the tool schemas of a row; None if there are none."""
    tools = _from_json(tools, "tools", place)
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{place}: its tools must be a list of schemas, or JSON of one; got {described(tools)}")
    return tools or None


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], add_bos: bool) -> list[list[int]]:
    try:
        found: list[list[int]] = tokenizer(
            [text.text for text in texts], add_special_tokens=add_bos, return_attention_mask=False, verbose=False
        )["input_ids"]
    except Exception as error:
        if len(texts) > 1:  # one at a time, to name the text that fails
            return [ids for text in texts for ids in _encoded(tokenizer, [text], add_bos)]
        raise DataError(
            f"{texts[0].place}: {type(tokenizer).__name__} cannot encode {described(texts[0].text)} ({error}); "
            f"correct the text or remove the row"
        ) from error
    if not add_bos:
        return found
    opening, num_closing = _added_tokens(tokenizer)
    bare = [ids[len(opening) : len(ids) - num_closing] for ids in found]
    # Text from a chat template may contain the leading tokens already; models expect them once.
    return [ids if opening and ids[: len(opening)] == opening else [*opening, *ids] for ids in bare]


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Return the special tokens that the tokenizer puts before a text, and the number of those after it.

    Trailing ones are dropped: a response cannot continue a prompt that has ended.
    """
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    found = [n for n in range(len(whole) - len(bare) + 1) if bare and whole[n : n + len(bare)] == bare]
    return (whole[: found[0]], len(whole) - len(bare) - found[0]) if found else ([], 0)
