"""Chat templates of TRL and of our demo, by family, and random conversations with tools that they can render."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import trl
from transformers import PreTrainedTokenizerFast

from examples import demo_agent
from tests.models import byte_tokenizer

Message = dict[str, Any]
_TEMPLATES: dict[str, str] = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
} | {"demo_agent": demo_agent.TEMPLATE}
_SPECIAL = re.compile(r"""<\|[\w"]+\|?>|<\w+\|>|<｜[^｜'" ]+｜>|\[gMASK\]|<sop>""")
_PARAMETERS = {
    "add": {"a": "integer", "b": "number"},
    "search": {"query": "string", "exact": "boolean", "tags": "array", "options": "object"},
    "ping": {},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tool {name}.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind, "description": f"Its {key}."} for key, kind in kinds.items()},
                "required": list(kinds),
            },
        },
    }
    for name, kinds in _PARAMETERS.items()
]


@dataclass(frozen=True, slots=True)
class Family:
    """What templates of a family render."""

    stops: tuple[str, ...]
    """Tokens that end a turn."""
    thought: str | None = None
    """Key of thoughts; None if they are not rendered."""
    always_thinks: bool = False
    """Whether turns without thoughts are rendered unlike the model writes them."""
    thinks_only_with_calls: bool = False
    most_calls: int = 3
    content_with_calls: bool = True
    plain_strings: bool = False
    """Whether quotes and line breaks in arguments are not escaped."""
    renders_tools: bool = True
    changes_history: bool = False
    """Whether a conversation is never rendered as its turns were."""
    text_arguments: bool = False


_CHATML = ("<|im_end|>", "<|endoftext|>")
_GEMMA = ("<turn|>", "<|tool_response>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>",)
_GLM = ("<|user|>", "<|observation|>", "<|endoftext|>")
_BY_PREFIX = {
    "qwen2_5": Family(_CHATML),
    "qwen3": Family(_CHATML, "reasoning_content", always_thinks=True),
    "qwen3_vl": Family(_CHATML),
    "qwen3_instruct_2507": Family(_CHATML),
    "qwen3_5_nothink": Family(_CHATML),
    "qwen3_5_think": Family(_CHATML, "reasoning_content"),
    "qwen3_6": Family(_CHATML, "reasoning_content"),
    "qwen3_8": Family(_CHATML, "reasoning_content"),
    "nemotron_3": Family(_CHATML, "reasoning_content", always_thinks=True),
    "llama3_": Family(("<|eot_id|>", "<|eom_id|>"), most_calls=1, content_with_calls=False),
    "glm4moe": Family(_GLM, "reasoning_content"),
    "gptoss": Family(("<|return|>", "<|call|>"), "thinking", most_calls=1, content_with_calls=False),
    "lfm2_v2": Family(_CHATML),
    "lfm2_2_5": Family(_CHATML, "thinking", plain_strings=True),
    "lfm2_2_5_vl": Family(_CHATML, "thinking"),
    "deepseekv3": Family(_DEEPSEEK, renders_tools=False, changes_history=True, text_arguments=True),
    "deepseekv3_training": Family(_DEEPSEEK, renders_tools=False, changes_history=True),
    "gemma4": Family(_GEMMA, "reasoning_content", thinks_only_with_calls=True, content_with_calls=False),
    "gemma4_v2": Family(_GEMMA, content_with_calls=False),
    "gemma4_v5": Family(_GEMMA, "reasoning_content", content_with_calls=False),
    "diffusion_gemma": Family(_GEMMA, "reasoning_content", content_with_calls=False),
    "demo_agent": Family(_CHATML),
    "muse_glimmer": Family(("<|eot|>",), "reasoning_content", content_with_calls=False),
}
_WITHOUT_TOOLS = ("qwen2_5_vl", "qwen2_5_vl_training", "llama3_training")


def family_of(name: str) -> Family:
    """Return the family of a template: that of the longest prefix of its name."""
    return _BY_PREFIX[max((prefix for prefix in _BY_PREFIX if name.startswith(prefix)), key=len)]


ALL_TEMPLATES = tuple(_TEMPLATES)
WITH_TOOLS = tuple(name for name in ALL_TEMPLATES if name.startswith(tuple(_BY_PREFIX)) and name not in _WITHOUT_TOOLS)


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a template, one token per byte, and one for each special token of the family."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = _TEMPLATES[name]
    stops = family_of(name).stops if name in WITH_TOOLS else ()
    special = sorted({*_SPECIAL.findall(tokenizer.chat_template), *stops})
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return tokenizer


def stop_ids(name: str) -> list[int]:
    """Return the ids of the tokens that end a turn."""
    ids: list[int] = tokenizer_of(name).convert_tokens_to_ids(list(family_of(name).stops))
    return ids


def encode(name: str, text: str) -> list[int]:
    """Return the tokens of a rendered text."""
    ids: list[int] = tokenizer_of(name)(text, add_special_tokens=False)["input_ids"]
    return ids


def render(name: str, messages: Sequence[Message], prompt: bool = False) -> str:
    """Return a conversation as the template writes it, with the beginning of a turn if it is a prompt."""
    if family_of(name).text_arguments:
        messages = [_with_text_arguments(message) for message in messages]
    tools = TOOLS if family_of(name).renders_tools else None
    text: str = tokenizer_of(name).apply_chat_template(
        list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False
    )
    return text


def _with_text_arguments(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


class Conversation:
    """Turns of a model and their answers, which follow a user's message."""

    def __init__(self, name: str, seed: int) -> None:
        self._rng = random.Random(f"{name} {seed}")
        self._family = family_of(name)
        self._num_calls = 0
        self.user: Message = {"role": "user", "content": self._text(1)}
        self.turns = [self._turn(index) for index in range(self._rng.randint(1, 3))]

    def messages(self, num_turns: int) -> list[Message]:
        """Return the messages before a turn."""
        return [self.user, *(m for turn, answer in self.turns[:num_turns] for m in (turn, *answer))]

    def _turn(self, index: int) -> tuple[Message, list[Message]]:
        rng, family = self._rng, self._family
        calls = [self._call() for _ in range(rng.randint(1, family.most_calls))] if rng.random() < 0.7 else []
        says = not calls or (family.content_with_calls and rng.random() < 0.5)
        message: Message = {"role": "assistant", "content": self._text(int(not family.always_thinks)) if says else ""}
        thinks = family.always_thinks or rng.random() < 0.6
        if family.thought and thinks and (calls or not family.thinks_only_with_calls):
            message[family.thought] = self._text(1)
        if not calls:
            return message, [{"role": "user", "content": self._text(1)}]
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": self._text(0)}
            for call in calls
        ]
        return {**message, "tool_calls": calls}, answers

    def _call(self) -> Message:
        rng, name = self._rng, self._rng.choice(list(_PARAMETERS))
        self._num_calls += 1
        values = {
            "integer": lambda: rng.randint(-(10**12), 10**12),
            "number": lambda: rng.choice([0.5, -3.25, 17, 1e-07]),
            "boolean": lambda: rng.random() < 0.5,
            "string": self._string,
            "array": lambda: [rng.choice([self._string(), rng.randint(0, 9), True]) for _ in range(rng.randint(0, 3))],
            "object": lambda: {f"key_{n}": rng.choice([self._string(), [n]]) for n in range(rng.randint(0, 2))},
        }
        arguments = {key: values[kind]() for key, kind in _PARAMETERS[name].items()}
        return {
            "id": f"call{self._num_calls - 1:05d}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _string(self) -> str:
        strings = ["", "Paris", "a b", "漢字 😀", "x, y) [z] {1}", "12", "true"]
        harder = ["it's", 'say "hi"', "two\nlines", "back\\slash", " padded ", "a <b> & c", "\ttab\n"]
        return self._rng.choice(strings if self._family.plain_strings else strings + harder)

    def _text(self, fewest_words: int) -> str:
        words = ["Zürich", "漢字", "😀", "3.5", "{x}", "a<b", "it's", '"q"', "\n", "#", "w" * 20, "[1]"]
        text = " ".join(self._rng.choice(words) for _ in range(self._rng.randint(fewest_words, 6))).strip()
        return text or ("empty" if fewest_words else "")
