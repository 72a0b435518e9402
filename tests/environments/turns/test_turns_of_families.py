"""Turns and answers of the chat templates that TRL ships, in random conversations with tools."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl", reason="chat templates of TRL: pip install 'lightning-realloc[parity]'")

from lightning_realloc.environments.turns.chat_turns import ChatTurns
from lightning_realloc.environments.turns.turn_parser import TurnParser
from lightning_realloc.environments.turns.turn_parts import TurnParts
from lightning_realloc.errors import ConfigError
from tests.environments.turns.chat_families import (
    ALL_TEMPLATES,
    TOOLS,
    WITH_TOOLS,
    Conversation,
    Message,
    encode,
    family_of,
    render,
    stop_ids,
    tokenizer_of,
)
from tests.matrices import matrix

USER: Message = {"role": "user", "content": "."}
# Templates for training render turns as the original ones do: some conversations suffice, in `make test-all`.
ORIGINALS = tuple(name for name in ALL_TEMPLATES if not name.endswith("_training"))
TEMPLATES = pytest.mark.parametrize("name", matrix(WITH_TOOLS, *(name for name in WITH_TOOLS if name in ORIGINALS)))
CONVERSATIONS = pytest.mark.parametrize(
    ("name", "seeds"),
    [
        pytest.param(name, range(3), id=name, marks=[] if name in ORIGINALS else pytest.mark.exhaustive)
        for name in WITH_TOOLS
    ]
    + [
        pytest.param(name, range(3, 203), id=f"{name}, many", marks=pytest.mark.exhaustive)
        for name in WITH_TOOLS
        if name in ORIGINALS
    ],
)


def turns_of(name: str) -> ChatTurns:
    return ChatTurns(tokenizer_of(name), stop_token_ids=stop_ids(name))


def tools_of(name: str) -> list[dict[str, Any]]:
    return TOOLS if family_of(name).renders_tools else []


def spoken(name: str, before: list[Message], message: Message) -> tuple[str, str, str]:
    """Return the prompt, the turn as the model writes it, and the stop token that ends it."""
    prompt, whole = render(name, before, prompt=True), render(name, [*before, message])
    if not whole.startswith(prompt):  # DeepSeek's prompt opens a thought, which the rendered turn does not have
        prompt = prompt.removesuffix("<think>\n")
    assert whole.startswith(prompt)
    at, stop = max((whole.rfind(stop), stop) for stop in family_of(name).stops)
    if at >= len(prompt):
        return prompt, whole[len(prompt) : at], stop
    assert name == "glm4moe"  # a turn ends with the token that begins the next one
    return prompt, whole[len(prompt) :], "<|observation|>" if "tool_calls" in message else "<|user|>"


def expected_message(message: Message) -> Message:
    expected = {key: value for key, value in message.items() if key != "thinking"}
    return expected | ({"reasoning_content": message["thinking"]} if "thinking" in message else {})


@TEMPLATES
def test_a_format_that_is_given_must_read_the_calls_that_the_template_shows(name: str) -> None:
    shown = turns_of(name).shown_call(TOOLS)
    own = TurnParser(tokenizer_of(name)).format
    for given in ("hermes", "mistral", "gpt-oss"):
        parser = TurnParser(tokenizer_of(name), given)
        if given == own:
            parser.check(TOOLS, shown)
        elif (own, given) != ("mistral-args", "mistral"):
            with pytest.raises(ConfigError, match=f"parser='{given}' finds no call in the chat template's own"):
                parser.check(TOOLS, shown)
    TurnParser(tokenizer_of(name), own).check(TOOLS, shown)
    TurnParser(tokenizer_of(name), lambda text: {"content": text}).check(TOOLS, shown)


@CONVERSATIONS
def test_a_turn_parses_to_the_message_of_which_the_template_made_it(name: str, seeds: range) -> None:
    parser = TurnParser(tokenizer_of(name))
    parser.check(TOOLS)
    for seed in seeds:
        first_call = 0
        for message, _ in Conversation(name, seed).turns:
            prompt, text, stop = spoken(name, [USER], message)
            parsed = parser.parse(text, first_call=first_call, tools=TOOLS, before=prompt, end=stop)
            assert parsed == expected_message(message), text
            first_call += len(message.get("tool_calls", ()))


ENDS_OF_THOUGHTS = {
    **dict.fromkeys(("gemma4", "diffusion_gemma"), "<channel|>"),
    "gptoss": "<|end|><|start|>assistant", "muse": "<|eom|><|start|>assistant",
}  # fmt: skip
STARTS_OF_CALLS = {
    **dict.fromkeys(("gemma4", "diffusion_gemma"), "<|tool_call>"), "llama3": "{", "gptoss": " to=functions.",
    "lfm2": "<|tool_call_start|>", "deepseek": "<｜tool▁calls▁begin｜>", "muse": " to=",
}  # fmt: skip


def mark_of(marks: dict[str, str], name: str, otherwise: str) -> str:
    return next((mark for prefix, mark in marks.items() if name.startswith(prefix)), otherwise)


def starts_of_parts(name: str, text: str, message: Message) -> tuple[int, int]:
    """Return where a turn's thought ends and its calls begin: templates write thought, content and calls in order."""
    close, thinks = mark_of(ENDS_OF_THOUGHTS, name, "</think>"), "thinking" in message or "reasoning_content" in message
    thought_end = text.find(close) + len(close) if close in text and (thinks or close == "</think>") else 0
    calls = text.find(mark_of(STARTS_OF_CALLS, name, "<tool_call>"), thought_end) if "tool_calls" in message else -1
    begin = len(text) if calls < 0 else calls
    if message["content"]:
        return thought_end, begin
    return (begin, begin) if thought_end else (0, 0)  # what is between is blank


def starts_of_tokens(name: str, text: str) -> list[int]:
    """Return the character where each token begins: a token is a byte, or the text of an added token."""
    added = [token.content for token in tokenizer_of(name).added_tokens_decoder.values()]
    starts, at = [], 0
    while at < len(text):
        mark = max((mark for mark in added if text.startswith(mark, at)), key=len, default="")
        starts += [at] * (1 if mark else len(text[at].encode()))
        at += len(mark) or 1
    return starts


@CONVERSATIONS
def test_parts_are_found_between_the_marks_of_the_family(name: str, seeds: range) -> None:
    parts = TurnParts(tokenizer_of(name), TurnParser(tokenizer_of(name)), stop_token_ids=stop_ids(name))
    for seed in seeds:
        for message, _ in Conversation(name, seed).turns:
            prompt, text, stop = spoken(name, [USER], message)
            thought_end, calls_begin = starts_of_parts(name, text, message)
            starts = [*starts_of_tokens(name, text), len(text) - 1]
            expected = ["thinking" if at < thought_end else "answer" if at < calls_begin else "calls" for at in starts]
            own = encode(name, text + stop)
            assert parts.of_response(encode(name, prompt), own, [True] * len(own)) == expected, text


@CONVERSATIONS
def test_prompt_turns_and_answers_are_the_tokens_of_the_whole_conversation(name: str, seeds: range) -> None:
    turns, num_compared = turns_of(name), 0
    for seed in seeds:
        conversation = Conversation(name, seed)
        text = render(name, [conversation.user], prompt=True)
        ids = turns.prompt_ids([conversation.user], tools_of(name))
        for index, (message, answer) in enumerate(conversation.turns):
            _, turn, stop = spoken(name, [USER], message)
            whole = render(name, conversation.messages(index + 1), prompt=True)
            if not whole.startswith(text + turn + stop):  # the template changes turns when others follow
                break
            turn_ids = encode(name, turn + stop)
            ids = [*ids, *turn_ids, *turns.answer_ids(turn_ids, message, answer, tools_of(name))]
            assert ids == encode(name, whole)
            text, num_compared = whole, num_compared + 1
    assert (num_compared == 0) == family_of(name).changes_history


@CONVERSATIONS
def test_an_answer_is_what_the_template_renders_after_that_turn(name: str, seeds: range) -> None:
    turns = turns_of(name)
    for seed in seeds:
        for message, answer in Conversation(name, seed).turns:
            whole = render(name, [USER, message, *answer], prompt=True)
            prompt, turn, stop = spoken(name, [USER], message)
            before = prompt + turn + stop
            if "tool_calls" not in message:  # its thought may be dropped now that a user's message follows
                stop = "<|end|>" if name.startswith("gptoss") else stop  # instead of <|return|>
                said = message["content"] + stop
                before = whole[: whole.index(said, len(render(name, [USER]))) + len(said)]
            if message["content"] or "tool_calls" in message:
                assert whole.startswith(before)
                found = turns.answer_ids(encode(name, stop), message, answer, tools_of(name))
                assert found == encode(name, whole.removeprefix(before))


@TEMPLATES
def test_text_of_special_tokens_in_messages_stays_text(name: str) -> None:
    turns, tokenizer = turns_of(name), tokenizer_of(name)
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    imitated = "a" + "".join(special) + " b" + special[-1][:1] + special[0] + "c"

    def special_ids(ids: list[int]) -> list[int]:
        return [token for token in ids if token in tokenizer.convert_tokens_to_ids(special)]

    for message, answer in Conversation(name, 1).turns:
        neutral, other = (
            turns.answer_ids([], message, [{**said, "content": text} for said in answer], tools_of(name))
            for text in ("abc", imitated)
        )
        assert special_ids(other) == special_ids(neutral) and imitated in tokenizer.decode(other)
    asked = [{"role": "user", "content": imitated}]
    assert special_ids(turns.prompt_ids(asked)) == special_ids(turns.prompt_ids([USER]))
    assert imitated in tokenizer.decode(turns.prompt_ids(asked))
    # In the data's own messages they are tokens, as without an environment.
    whole = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert turns.prompt_ids(asked, of_data=asked) == encode(name, whole)


@TEMPLATES
def test_a_turn_that_was_cut_off_gets_its_end_before_the_answer(name: str) -> None:
    turns = turns_of(name)
    for message, answer in Conversation(name, 0).turns:
        _, turn, stop = spoken(name, [USER], message)
        cut, other = encode(name, turn[:-1] or "."), encode(name, turn + tokenizer_of(name).eos_token)
        if name.startswith("gptoss") and "tool_calls" not in message:
            stop = "<|end|>"
        (end,) = encode(name, stop)
        ended = turns.answer_ids([*cut, end], message, answer, tools_of(name))
        assert turns.answer_ids(cut, message, answer, tools_of(name)) == [end, *ended]
        # So does a turn that another token ended: <|im_end|> belongs after a turn that ends with <|endoftext|>.
        assert turns.answer_ids(other, message, answer, tools_of(name)) == [end, *ended]
        assert turns.answer_ids([], message, answer, tools_of(name)) == [end, *ended]


@pytest.mark.parametrize("name", matrix(ALL_TEMPLATES, *ORIGINALS))
def test_check_accepts_the_templates_that_render_tools_and_their_answers(name: str) -> None:
    if name in WITH_TOOLS:
        turns = turns_of(name)
        turns.check()
    else:
        tokenizer = tokenizer_of(name)
        turns = ChatTurns(tokenizer, stop_token_ids=tokenizer.added_tokens_decoder)
    if name in WITH_TOOLS and family_of(name).renders_tools:
        turns.check(TOOLS)
    else:
        with pytest.raises(ConfigError, match=r"set tokenizer.chat_template|another template"):
            turns.check(TOOLS)


def test_check_names_the_stop_token_that_is_missing() -> None:
    turns = ChatTurns(tokenizer_of("gemma4"), stop_token_ids=tokenizer_of("gemma4").convert_tokens_to_ids(["<turn|>"]))
    with pytest.raises(ConfigError, match=r"which are \['<turn\|>'\].*<tool_call\|><\|tool_response>.*add the token"):
        turns.check(TOOLS)
