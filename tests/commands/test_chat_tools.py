"""Tool calls in conversations of ``lightning-realloc chat``, with a model that says what a script tells it."""

from __future__ import annotations

import io
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="chat templates of TRL: pip install 'lightning-realloc[parity]'")

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.commands.chat_command import run_chat
from lightning_realloc.commands.chat_session import ChatSession, TokenStream
from lightning_realloc.commands.chat_tools import ChatTools, ToolSettings
from lightning_realloc.data.images.row_images import with_images
from lightning_realloc.data.images.sample_images import ImageProcessor
from lightning_realloc.environments import Tool
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import Completion, SamplingParams
from tests.commands.calling_model import WRITTEN, calling_model
from tests.data.images.test_image_files import damaged
from tests.data.images.test_rows import drawn, user
from tests.environments.some_tools import add, call, turn
from tests.environments.turns.chat_families import Message, encode, family_of, stop_ids, tokenizer_of
from tests.models import byte_tokenizer
from tests.vision_processors import tiny_processor

FAMILY = "qwen3_instruct_2507"
SHOWN = {"type": "image"}


class Script:
    """Engine that answers with given texts, and keeps the prompts."""

    def __init__(self, family: str, *texts: str, finish_reason: Any = "stop") -> None:
        self._family, self._texts, self._reason = family, list(texts), finish_reason
        self.prompts: list[str] = []

    def generate(
        self,
        prompts: Sequence[ModelInput],
        params: SamplingParams,
        *,
        sample_ids: Sequence[int],
        on_tokens: Callable[[int, Sequence[int]], None],
    ) -> list[Completion]:
        self.prompts.append(tokenizer_of(self._family).decode(list(prompts[0].token_ids)))
        tokens = encode(self._family, self._texts.pop(0))
        on_tokens(sample_ids[0], tokens)
        none = (0.0,) * len(tokens)
        mask, versions = (True,) * len(tokens), (0,) * len(tokens)
        made = prompts[0]
        return [Completion(sample_ids[0], 0, tuple(tokens), none, self._reason, mask, versions, made)]


def add_call(a: int, b: int, number: int = 0) -> Message:
    return turn(call("add", {"a": a, "b": b}, number))


def answer(number: int, content: str, name: str = "add") -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": content}


def rendered(family: str, tool: Callable[..., Any], *messages: Message, prompt: bool = True) -> str:
    """Return a whole conversation as the template writes it."""
    schemas = [Tool.from_function(tool).schema]
    text: str = tokenizer_of(family).apply_chat_template(
        list(messages), tools=schemas, add_generation_prompt=prompt, tokenize=False
    )
    return text


def said(family: str, message: Message) -> str:
    """Return a turn as the model writes it, with the token that ends it."""
    user = {"role": "user", "content": "."}
    text = rendered(family, add, user, message, prompt=False).removeprefix(rendered(family, add, user))
    at, stop = max((text.rfind(stop), stop) for stop in family_of(family).stops)
    return text[:at] + stop


def session_of(
    family: str, script: Script, *tools: Callable[..., Any] | Tool, max_turns: int = 8
) -> tuple[ChatSession, io.StringIO]:
    output, tokenizer = io.StringIO(), tokenizer_of(family)
    made = tuple(each if isinstance(each, Tool) else Tool.from_function(each) for each in tools)
    settings = ToolSettings(tools=made, max_turns=max_turns)
    chat = ChatTools(tokenizer, settings, output.write, stop_token_ids=stop_ids(family))
    stream = TokenStream(tokenizer, output.write)
    return ChatSession(script, tokenizer, stream, SamplingParams(), tools=chat), output  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [FAMILY, "llama3_1"])
def test_an_answer_goes_on_until_a_turn_has_no_calls(family: str) -> None:
    first, last = {"role": "user", "content": "2+3?"}, {"role": "user", "content": "And 1 more?"}
    five, six = ({"role": "assistant", "content": text} for text in ("It is 5.", "It is 6."))
    script = Script(family, *(said(family, each) for each in (add_call(2, 3), five, add_call(5, 1), six)))
    session, output = session_of(family, script, add)
    assert session.ask("2+3?") == "It is 5."
    shown = output.getvalue()
    assert shown.count('"a": 2') == 1 and "\n[add answers after 0.0" in shown and " s]\n  5\nIt is 5.\n" in shown
    assert session.ask("And 1 more?") == "It is 6."
    told = [first, add_call(2, 3), answer(0, "5"), five, last, add_call(5, 1, 1), answer(1, "6"), six]
    assert session.messages == told
    # whole conversations, rendered at once
    assert script.prompts == [rendered(family, add, *told[:num]) for num in (1, 3, 5, 7)]


def test_calls_of_the_last_turn_are_left_out() -> None:
    script = Script(FAMILY, *[said(FAMILY, {**add_call(1, 1), "content": "Hm."})] * 2)
    session, output = session_of(FAMILY, script, add, max_turns=2)
    assert session.ask("Count.") == "Hm."
    assert output.getvalue().count("[add answers") == 1
    assert output.getvalue().endswith("(calls are left out: this was turn 2; raise --max-turns)\n")
    assert [message["role"] for message in session.messages] == ["user", "assistant", "tool", "assistant"]
    assert "tool_calls" not in session.messages[-1]


def test_calls_that_are_cut_off_are_left_out() -> None:
    text = said(FAMILY, add_call(1, 1))
    script = Script(FAMILY, text[: text.index("}")], finish_reason="length")
    session, output = session_of(FAMILY, script, add)
    session.ask("Count.")
    assert "answers" not in output.getvalue() and "raise --max-new-tokens)" in output.getvalue()
    assert "tool_calls" not in session.messages[-1]


def test_ctrl_c_ends_a_call_and_the_model_goes_on() -> None:
    release = threading.Event()

    def wait() -> str:
        """Wait for the user."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        release.wait(60)
        return "never read"

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    script = Script(FAMILY, said(FAMILY, turn(call("wait", {}))), said(FAMILY, turn(content="Stopped.")))
    session, output = session_of(FAMILY, script, wait)
    begin = time.monotonic()
    try:
        assert session.ask("Wait.") == "Stopped."
    finally:
        release.set()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 20
    assert json.loads(session.messages[2]["content"]) == {"error": "the user stopped this call of wait"}
    assert "the user stopped this call of wait" in script.prompts[1] and "[wait answers after" in output.getvalue()


def test_the_model_reads_all_of_an_answer_and_the_terminal_is_spared() -> None:
    def fetch(page: str) -> str:
        """Fetch a page.

        Args:
            page: Its name.
        """
        return f"\x1b[2J{page}" + 3000 * "a" + "end"

    script = Script(FAMILY, said(FAMILY, turn(call("fetch", {"page": "x\ny"}))), said(FAMILY, turn(content="Read.")))
    session, output = session_of(FAMILY, script, fetch)
    session.ask("Read it.")
    assert f"\x1b[2Jx\ny{3000 * 'a'}end" in script.prompts[1]
    shown = output.getvalue()
    assert "[fetch answers after" in shown and "\x1b" not in shown and "aend" not in shown
    assert f"\n  [{4 + 3 + 3000 + 3 - 2000} more characters]\nRead.\n" in shown


SHOWING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Template of tools and images."""


def draw() -> object:
    """Draw an image."""
    return ["Look: ", drawn(1)]


def test_a_model_of_images_is_shown_those_of_tools() -> None:
    processor: Any = tiny_processor("qwen2_5_vl")
    tokenizer, output = processor.tokenizer, io.StringIO()
    tokenizer.chat_template = SHOWING
    settings = ToolSettings(tools=(Tool.from_function(draw),))
    texts = ['<tool_call>\n{"name": "draw", "arguments": {}}\n</tool_call><eos>', "red<eos>"]
    asked: list[ModelInput] = []

    def generate(prompt: ModelInput) -> Completion:
        ids = tuple(tokenizer(texts[len(asked)], add_special_tokens=False)["input_ids"])
        asked.append(prompt)
        zeros = (0.0,) * len(ids)
        return Completion(0, 0, ids, zeros, "stop", (True,) * len(ids), (0,) * len(ids), prompt)

    images = ImageProcessor(processor)
    question = with_images({"prompt": user({**SHOWN, "image": drawn(0)}, "?")}, ["prompt"], "here", images)["prompt"]
    chat = ChatTools(tokenizer, settings, output.write, stop_token_ids={2})

    turns = chat.turns(question, generate, lambda: images)

    assert [one["role"] for one in turns] == ["assistant", "tool", "assistant"] and turns[-1]["content"] == "red"
    shown = [{"type": "text", "text": "Look: "}, {"type": "image"}]
    said: list[Message] = [*user(SHOWN, "?"), turns[0], {**turns[1], "content": shown}]
    text = tokenizer.apply_chat_template(said, tools=chat._schemas, add_generation_prompt=True, tokenize=False)
    expected = processor(text=[text], images=[[drawn(0), drawn(1)]], return_tensors="pt")
    assert list(asked[1].token_ids) == expected["input_ids"][0].tolist()
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(asked[1].extras[name], expected[name])
    assert "Look: \n  [image]\n" in output.getvalue()


def test_a_model_reads_that_an_image_of_a_tool_is_damaged() -> None:
    def draw() -> object:
        """Draw an image."""
        return [{"type": "image", "image": damaged()}]

    script = Script(FAMILY, said(FAMILY, turn(call("draw", {}))), said(FAMILY, turn(content="Well.")))
    session, _ = session_of(FAMILY, script, draw)
    processor = ImageProcessor(tiny_processor("qwen2_5_vl"))
    session._processor = lambda: processor  # type: ignore[method-assign]

    assert session.ask("Draw.") == "Well."

    error = json.loads(session.messages[2]["content"])["error"]
    assert re.fullmatch(r"draw: its image is damaged inside its pixels \(.*\); correct it", error)


def test_a_model_of_text_reads_that_images_of_tools_are_not_for_it() -> None:
    script = Script(FAMILY, said(FAMILY, turn(call("draw", {}))), said(FAMILY, turn(content="Well.")))
    session, _ = session_of(FAMILY, script, draw)
    session._processor = lambda: None  # type: ignore[method-assign]

    assert session.ask("Draw.") == "Well."

    error = json.loads(session.messages[2]["content"])["error"]
    assert "draw shows images, and the model reads text alone" in error and "text alone" in script.prompts[1]


# ---- the command
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with a chat template of tools, with one without tools, and without one."""
    path = tmp_path_factory.mktemp("chat")
    model, tokenizer = calling_model(FAMILY)
    plain, without = byte_tokenizer(), byte_tokenizer()
    without.chat_template = "{% for message in messages %}{{ message['content'] + '<eos>' }}{% endfor %}"
    for name, own in (("model", tokenizer), ("plain", plain), ("no_tools", without)):
        model.save_pretrained(path / name)
        own.save_pretrained(path / name)
    return path


def _chat(*arguments: str | Path) -> str:
    output = io.StringIO()
    always = ["--device", "cpu", "--max-new-tokens", "5"]
    run_chat([*map(str, arguments), *always], output.write, io.StringIO(""))
    return output.getvalue()


def test_the_command_carries_out_what_the_model_calls(folder: Path) -> None:
    tools = ("--tools", "python", "tests.environments.some_tools:add", "--max-turns", "3", "--temperature", "0")
    one = rf"{re.escape(WRITTEN)}\n\[add answers after \d\.\d\d s\]\n  5\n"
    last = rf"{re.escape(WRITTEN)}\n\(calls are left out: this was turn 3; raise --max-turns\)\n"
    assert re.fullmatch(one + one + last, _chat(folder / "model", *tools, "--prompt", "2+3?"))


def test_the_folder_may_follow_the_tools(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the chat template leaves out python"):  # read from the folder
        _chat("--prompt", "2+3?", "--tools", "python", folder / "no_tools")
    with pytest.raises(ConfigError, match="FOLDER is missing"):
        _chat("--prompt", "2+3?", "--tools", "python")


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("plain", ("--tools", "python"), "--tools needs a chat template, and this tokenizer has none"),
        ("no_tools", ("--tools", "python"), "the chat template leaves out python"),
        ("model", ("--tools", "python", "--parser", "none"), "parser='none' is not known; give one of xml, glm"),
        ("model", ("--tools", "python", "--max-turns", "0"), "--max-turns=0 must be at least 1"),
        ("model", ("--max-turns", "3"), "--max-turns=3: this is for answers with tools; give --tools"),
        ("model", ("--tools", "pyton"), "--tools=pyton is unknown; did you mean python?"),
    ],
)
def test_a_model_or_flag_that_tools_cannot_use_is_refused(
    folder: Path, name: str, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        _chat(folder / name, *flags, "--prompt", "Hello")
    assert message in str(refusal.value)
