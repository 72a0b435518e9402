"""Text and code of completions, and short descriptions of prompts and completions for messages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)")
_LANGUAGE = re.compile(r"[{.\s]*([\w+#.-]*)")
_PYTHON = re.compile(r"(?:python|py)[\d.]*", re.IGNORECASE)
SECRET_SUFFIXES = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Endings of the names of environment variables and settings whose values are never shown."""
HIDDEN = "***"
"""Text in the place of a secret."""


def completion_texts(completions: Sequence[Any]) -> list[str]:
    """Return completions as texts; for a conversation, the content of the model's last message."""
    return [text if isinstance(text, str) else _last_answer(text) for text in completions]


def _last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the content of the last message of the model; tools may have answered it."""
    return str(next((m.get("content") or "" for m in reversed(messages) if m["role"] == "assistant"), ""))


def extract_code(text: str) -> str:
    """Return the last fenced block that is marked as Python, or else the last one without a language.

    The whole text if there is neither. Blocks lose the indentation of their fence.
    """
    blocks = list(_blocks(text))
    for marked in (True, False):
        found = [code for language, code in blocks if (_PYTHON.fullmatch(language) if marked else not language)]
        if found:
            return found[-1]
    return textwrap.dedent(text)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of every closed fenced block.

    Source: https://spec.commonmark.org/0.31.2/#fenced-code-blocks, with any indentation, as in lists.
    """
    opening: re.Match[str] | None = None
    language = ""
    lines: list[str] = []
    for line in re.split(r"\r\n?|\n", text):
        fence = _FENCE.fullmatch(line)
        info = fence[3].strip(" \t") if fence else ""
        if opening is None:
            if fence is not None and "`" not in info:
                found = _LANGUAGE.match(info)
                opening, language, lines = fence, found[1] if found else "", []
        elif fence is not None and fence[2].startswith(opening[2]) and not info:
            yield language, "".join(f"{line}\n" for line in lines)
            opening = None
        else:
            lines.append(_without_indentation(line, opening[1]))


def _without_indentation(line: str, indentation: str) -> str:
    num_blanks = len(line) - len(line.lstrip(" \t"))
    return line[min(len(indentation), num_blanks) :]


def describe_batch(given: Mapping[str, Any]) -> str:
    """Describe a batch by its number of completions and its distinct prompts."""
    shown = list(dict.fromkeys(shortened(prompt) for prompt in given["prompts"]))
    listed = ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
    return f"{len(given['completions'])} completions of {'the prompt' if len(shown) == 1 else 'the prompts'} {listed}"


def describe_completion(index: int, given: Mapping[str, Any]) -> str:
    """Describe one completion of a batch and its prompt."""
    completion, prompt = shortened(given["completions"][index]), shortened(given["prompts"][index])
    return f"the completion {completion} of the prompt {prompt}"


def shown_address(url: str) -> str:
    """Return an address without user, password and query, for messages; the scheme alone if they cannot be found."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    before, *query = re.split("[?#]", rest, maxsplit=1)
    authority, slash, path = before.partition("/")
    if "@" in path or "@" in "".join(query):  # perhaps of a password with a slash
        return f"{scheme}{mark}{HIDDEN}"
    return f"{scheme}{mark}{authority.rpartition('@')[2]}{slash}{path}" + f"?{HIDDEN}" * bool(query)


def without_secrets(name: str, value: Any) -> Any:
    """Return a setting's value as reports may show it: without secrets in addresses, HTTP headers, keys and tokens."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if name == "headers" else without_secrets(str(key), one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_secrets(name, one) for one in value]
    if not isinstance(value, str):
        return value
    if name.upper().endswith(SECRET_SUFFIXES):
        return HIDDEN
    return re.sub(r"\S+://\S+", lambda found: shown_address(found[0]), value)


def shortened(value: object) -> str:
    """Return the ``repr`` of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
