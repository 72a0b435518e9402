"""Turns by format: malformed calls, thoughts, formats from elsewhere, and text of any kind."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_realloc.environments.turns.turn_parser import TurnParser, _formats
from lightning_realloc.errors import ConfigError, GenerationError
from tests.models import byte_tokenizer

FORMATS = list(_formats())
ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": ADD}]
CALLS = {
    "xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 1}}',
    "gpt-oss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
    "deepseek": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
    "mistral-args": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "012345678"}]',
    "lfm2": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    "atem": ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
}
MALFORMED = {
    "xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1",
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": }}',
    "gpt-oss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1',
    "deepseek": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{a}\n```<｜tool▁call▁end｜>",
    "gemma4": "<|tool_call>call:add{a:x}<tool_call|>",
    "mistral-args": '[TOOL_CALLS]add[ARGS]{"a": 1',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1',
    "lfm2": "<|tool_call_start|>[add(a=b)]<|tool_call_end|>",
    "atem": ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1',
}

MARKS_OF_THOUGHTS = {
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "mistral-args": ("[THINK]", "[/THINK]"),
    "atem": (" to=self<|message|>", "<|eom|><|start|>assistant"),
}


ONE = "<parameter=a>1</parameter>"


def parsed(format_name: str, text: str, **settings: Any) -> Mapping[str, Any]:
    return TurnParser(byte_tokenizer(), format_name).parse(text, first_call=0, tools=TOOLS, **settings)


def called(*arguments: Any, content: str = "", name: str = "add") -> dict[str, Any]:
    """Return a message that calls a tool, once for each value of arguments."""
    calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": value}}
        for index, value in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def with_template(text: str, response_template: Any = None) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = text
    tokenizer.response_template = response_template
    return tokenizer


def test_every_format_with_tools_has_examples() -> None:
    assert [*CALLS, "text"] == [*MALFORMED, "text"] == FORMATS


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_read(name: str) -> None:
    assert parsed(name, CALLS[name]) == called({"a": 1})


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"llama3", "gpt-oss", "atem", "mistral", "mistral-args"}))
def test_text_around_and_between_two_calls_is_the_content(name: str) -> None:
    text = f"One.\n{CALLS[name]} Two. {CALLS[name]}\nThree."
    assert parsed(name, text) == called({"a": 1}, {"a": 1}, content="One.\n Two. \nThree.")


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_with_a_name_has_text_as_arguments(name: str) -> None:
    message = parsed(name, MALFORMED[name])
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "add" and message["content"] == ""
    written = call["function"]["arguments"]
    assert isinstance(written, str) and written in MALFORMED[name]


@pytest.mark.parametrize("name", sorted(MALFORMED.keys() - {"llama3", "gpt-oss", "mistral", "mistral-args"}))
def test_a_malformed_call_leaves_the_one_before_it_readable(name: str) -> None:
    first, second = parsed(name, CALLS[name] + "\n" + MALFORMED[name])["tool_calls"]
    assert first["function"]["arguments"] == {"a": 1}
    assert isinstance(second["function"]["arguments"], str) and second["id"] == "call00001"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call>{}</tool_call>", None),
        ("<tool_call>[1, 2]</tool_call>", None),
        ("<tool_call>nothing</tool_call>", None),
        ('<tool_call>{"name": "a <|im_end|>", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "unknown", "arguments": {"x": 1}}</tool_call>', called({"x": 1}, name="unknown")),
        ('<tool_call>{"name": "add"}</tool_call>', called({})),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', called({"a": 1})),
        ('<tool_call>{"name": "add", "arguments": [1, "é"]}</tool_call>', called('[1, "é"]')),
        ('<tool_call>{"name": "add", "arguments": "a"}</tool_call>', called("a")),
        ('<tool_call>{"name": "add", "argu', called('{"name": "add", "argu')),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', called('{"a": 1}}')),
        ("<tool_call>{" + '"a": [' * 100_000 + "</tool_call>", None),
    ],
)  # fmt: skip
def test_json_that_is_no_call_stays_in_the_content(text: str, expected: Mapping[str, Any] | None) -> None:
    found = parsed("hermes", f"Hm. {text}")
    if expected is None:
        assert found == {"role": "assistant", "content": f"Hm. {text}"}
    else:
        assert found == {**expected, "content": "Hm."}


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("xml", '<tool_call><function=add>{"a": 1}</function></tool_call>', {"a": 1}),
        ("xml", "<tool_call><function=add>a = 1</function></tool_call>", "a = 1"),
        ("xml", "<tool_call>\n<function=add>\n</function>\n</tool_call>", {}),
        ("xml", f"<tool_call><function=add>{ONE}, <parameter=b>2</function></tool_call>", f"{ONE}, <parameter=b>2"),
        ("xml", "<tool_call>\n<function=add>\n", "<tool_call>\n<function=add>"),
        ("glm", "<tool_call>add a=1</tool_call>", "a=1"),
        ("gemma4", "<|tool_call>call:add{}<tool_call|>", {}),
        ("lfm2", "<|tool_call_start|>[add(1)]<|tool_call_end|>", "1)]"),
        ("lfm2", "<|tool_call_start|>[add(**{'a': 1})]<|tool_call_end|>", "**{'a': 1})]"),
        ("lfm2", "<|tool_call_start|>[add(a=print(1))]<|tool_call_end|>", "a=print(1))]"),
        ("lfm2", '<|tool_call_start|>[add(a={"b": [true, null]})]<|tool_call_end|>', {"a": {"b": [True, None]}}),
        ("lfm2", "<|tool_call_start|>[add(a=" + "(" * 9999 + ")]<|tool_call_end|>", "a=" + "(" * 9999 + ")]"),
        ("deepseek", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', {"a": 1}),
        ("mistral-args", '[TOOL_CALLS]add[CALL_ID]012345678[ARGS]{"a": 1}', {"a": 1}),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', {"a": 1}),
        ("llama3", '{"name": "add", "parameters": {"a": 1}} is my call', '{"a": 1}} is my call'),
        ("gpt-oss", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', {"a": 1}),
    ],
)
def test_other_forms_of_a_call(name: str, text: str, arguments: Any) -> None:
    assert parsed(name, text) == called(arguments)


def test_text_in_arguments_gets_the_type_of_the_schema() -> None:
    text = "<tool_call><function=add><parameter=a>1</parameter><parameter=b>1</parameter></function></tool_call>"
    assert parsed("xml", text) == called({"a": 1, "b": "1"})
    untyped = TurnParser(byte_tokenizer(), "xml").parse(text, first_call=0)
    assert untyped == called({"a": "1", "b": "1"})


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"llama3", "gpt-oss", "gemma4", "mistral-args", "atem"}))
def test_a_call_within_a_thought_is_not_made(name: str) -> None:
    thought = f"I could {CALLS[name]} now."
    expected = {"role": "assistant", "content": "No.", "reasoning_content": thought}
    assert parsed(name, f"<think>\n{thought}\n</think>\n\nNo.") == expected
    # The prompt may open the thought, as those of Qwen3.5 do.
    assert parsed(name, f"{thought}\n</think>\n\nNo.", before="<|im_start|>assistant\n<think>\n") == expected
    assert parsed(name, thought, before="<think>\n") == {**expected, "content": ""}
    # A thought that the prompt also closes is none.
    assert parsed(name, "No.", before="<think>\n\n</think>\n\n") == {"role": "assistant", "content": "No."}


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"llama3"}))
def test_a_turn_keeps_all_of_its_thoughts(name: str) -> None:
    begin, end = MARKS_OF_THOUGHTS.get(name, ("<think>", "</think>"))
    text = f"{begin}One.{end}a {begin}Two.{end}b"
    assert parsed(name, text) == {"role": "assistant", "content": "a b", "reasoning_content": "One.\nTwo."}


def test_a_response_template_keeps_all_thoughts_and_its_own_way_to_join_them() -> None:
    thinking = {"open": "<t>", "close": "</t>"}
    for field, expected in [(thinking, "a\nb"), ({**thinking, "repeats": True, "join": "+"}, "a+b")]:
        template = {"start_anchor": "<bot>", "fields": {"thinking": field, "content": {}}}
        parser = TurnParser(byte_tokenizer(), template)
        assert parser.parse("<t>a</t><t>b</t>c", first_call=0)["reasoning_content"] == expected


def test_channels_of_gpt_oss() -> None:
    text = (
        "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
        f"<|start|>assistant{CALLS['gpt-oss']}"
    )
    assert parsed("gpt-oss", text) == {**called({"a": 1}, content="I add."), "reasoning_content": "Add."}
    final = "<|channel|>analysis<|message|>Say it.<|end|><|start|>assistant<|channel|>final<|message|>3"
    assert parsed("gpt-oss", final) == {"role": "assistant", "content": "3", "reasoning_content": "Say it."}


def test_two_calls_of_mistral() -> None:
    assert parsed("mistral-args", 2 * CALLS["mistral-args"]) == called({"a": 1}, {"a": 1})
    text = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]'
    assert parsed("mistral", text) == called({"a": 1}, {})
    assert parsed("mistral-args", f"[THINK]Hm.[/THINK]So:{CALLS['mistral-args']}") == {
        **called({"a": 1}, content="So:"),
        "reasoning_content": "Hm.",
    }


def test_ids_are_counted_from_the_first_call_of_the_turn() -> None:
    parser = TurnParser(byte_tokenizer(), "hermes")
    calls = parser.parse(2 * CALLS["hermes"], first_call=8)["tool_calls"]
    assert [call["id"] for call in calls] == ["call00008", "call00009"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<tool_call><function=a><parameter=b>", "xml"),
        ("<tool_call>{name}<arg_key>", "glm"),
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS]name[ARGS]", "mistral-args"),
        ("[TOOL_CALLS][{", "mistral"),
        ("{{ messages[0].content }}", "text"),
        ({"default": "{{ 1 }}", "tool_use": "<tool_call>"}, "hermes"),
        (None, "text"),
    ],
)
def test_the_format_is_known_by_the_chat_template(template: Any, expected: str) -> None:
    parser = TurnParser(with_template(template))
    assert parser.format == expected
    parser.check([])
    if expected == "text":
        with pytest.raises(ConfigError, match=r"give parser= one of xml, glm, .*; or a function"):
            parser.check(TOOLS)
    else:
        parser.check(TOOLS)


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bot>",
    "fields": {
        "thinking": {"open": "<t>", "close": "</t>"},
        "tool_calls": {
            "open_pattern": r"(?:<t>)?!(?P<name>\w+)\(",
            "close_pattern": r"\)(?:;|<eos>)",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<eos>"},
    },
}


def test_the_response_template_of_a_tokenizer_comes_before_its_chat_template() -> None:
    parser = TurnParser(with_template("<tool_call>", RESPONSE_TEMPLATE))
    assert parser.format is None
    parser.check(TOOLS)
    found = parser.parse('hm</t>Yes: !add({"a": 1})', first_call=0, before="<user>Add!<bot><t>", end="<eos>")
    assert found == {**called({"a": 1}, content="Yes:"), "reasoning_content": "hm"}
    # Such a template may look for the stop token, which a turn that was cut off does not have.
    assert parser.parse('!add({"a": 1})', first_call=0) == called('{"a": 1})')
    assert parser.parse("a <eos>", first_call=0) == {"role": "assistant", "content": "a"}
    # The setting comes before both.
    named = TurnParser(with_template("<tool_call>", RESPONSE_TEMPLATE), "lfm2")
    assert named.parse(CALLS["lfm2"], first_call=0) == called({"a": 1})
    given = TurnParser(with_template("<tool_call>"), RESPONSE_TEMPLATE)
    assert given.parse("!add({})", first_call=0, end="<eos>") == called({})


def test_a_response_template_reads_turns_as_transformers_does() -> None:
    tokenizer = with_template("", RESPONSE_TEMPLATE)
    parser = TurnParser(tokenizer)
    for text in ["", "Hi.", "<t>a</t> b", '<t>a !add({});</t>c !add({"a": 2});!add({"a": 1})', "<t>!add({});b"]:
        found = dict(parser.parse(text, first_call=0, before="<bot>", end="<eos>"))
        expected = tokenizer.parse_response(text + "<eos>", prefix="<bot>")
        calls = [call["function"] for call in found.get("tool_calls", [])]
        assert calls == [call["function"] for call in expected.get("tool_calls", [])]
        assert found["content"] == expected.get("content", "")
        assert found.get("reasoning_content") == expected.get("thinking")


def test_a_function_may_parse_turns() -> None:
    def read(text: str) -> dict[str, Any]:
        return {"content": text, "tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]}

    parser = TurnParser(byte_tokenizer(), read)
    parser.check(TOOLS)
    assert parser.parse("hi", first_call=0, end="<eos>") == called({"a": 1}, content="hi")
    for wrong in ["text", {"content": "", "tool_calls": [{"arguments": {}}]}]:
        with pytest.raises(ConfigError, match="a parser"):
            TurnParser(byte_tokenizer(), lambda _, wrong=wrong: wrong).parse("hi", first_call=0)


async def _later(text: str) -> dict[str, Any]:
    return {"content": text}


def _pieces(text: str) -> Iterator[str]:
    yield text


@pytest.mark.parametrize(
    ("parser", "error"),
    [
        ("qwen", "parser='qwen' is not known; give one of xml, glm, hermes"),
        ({"fields": {}}, "transformers does not accept the response template: .*non-empty.*; give one of"),
        ({"start_anchor": "x", "fields": {"tool_calls": {"content": "json"}}}, "tool_calls .* needs open"),
        (7, "parser=7 is a int; give one of xml, glm"),
        (f"{__name__}:_pieces", "parser _pieces must return its result, and contains yield"),
        (f"{__name__}:_piece", "parser '.*:_piece' cannot be imported"),
        (lambda text, tools: {}, r"parser <lambda> cannot be called with the text of a turn alone .*'tools'"),
        (_later, "parser _later must return a message at once, and is async; define it with def"),
        (_pieces, "parser _pieces must return its result, and contains yield"),
    ],
)
def test_an_unknown_parser_is_refused(parser: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        TurnParser(byte_tokenizer(), parser)


def random_text(rng: random.Random, name: str) -> str:
    """Return pieces of calls, thoughts and other text in random order."""
    examples = [CALLS.get(name, ""), MALFORMED.get(name, ""), "<think>", "</think>", "<|end|>", "<|start|>assistant"]
    noise = ["{", "}", '"', "[", "]", "\\", "\x01", "\x00", "\ud800", "😀", "\n", "null", "(", "'", '{"name": "']
    pieces = []
    for _ in range(rng.randint(0, 8)):
        example = rng.choice(examples)
        cut = sorted(rng.randint(0, len(example)) for _ in range(2))
        pieces.append(rng.choice([example, example[cut[0] : cut[1]], rng.choice(noise)]))
    return "".join(pieces)


def check_any_text_parses(name: str, seeds: range) -> None:
    parser = TurnParser(byte_tokenizer(), name)
    for seed in seeds:
        text = random_text(random.Random(seed), name)
        message = parser.parse(text, first_call=0, tools=TOOLS, before=random.Random(seed).choice(["", "<think>\n"]))
        assert message["role"] == "assistant" and isinstance(message["content"], str)
        assert message.keys() <= {"role", "content", "reasoning_content", "tool_calls"}
        calls = message.get("tool_calls", [None])
        assert calls  # the key is left out without calls, since templates test for it
        for call in filter(None, calls):
            assert call["function"]["name"] and isinstance(call["function"]["arguments"], dict | str)
            json.dumps(call)


@pytest.mark.parametrize("name", FORMATS)
def test_any_text_parses(name: str) -> None:
    check_any_text_parses(name, range(100))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMATS)
def test_any_text_parses_in_many_turns(name: str) -> None:
    check_any_text_parses(name, range(100, 5000))


@pytest.mark.parametrize("name", FORMATS)
def test_the_time_for_a_degenerate_turn_is_not_quadratic(name: str) -> None:
    parser = TurnParser(byte_tokenizer(), name)
    call = CALLS.get(name, "")
    pieces = [
        " ",
        "\n",
        "{",
        "<think>",
        call[:-1],
        call[: len(call) // 2],
        "<parameter=a>x",
        "<arg_key>x",
        "to=functions.",
    ]
    begin = time.perf_counter()
    for piece in pieces:
        parser.parse(call[: len(call) // 3] + 3000 * piece + call, first_call=0)
    assert time.perf_counter() - begin < 20  # a second for all formats; a quadratic pattern takes minutes


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_special_tokens_is_the_content(name: str) -> None:
    for text in ["", "a", "Zürich 漢字 😀", '{"a": 1}', "a < b > c [1] {x: 2}", "add(a=1)\n\ncall:add{}"]:
        assert parsed(name, text) == {"role": "assistant", "content": text}


def test_an_error_of_a_parsers_function_is_named_with_the_turn() -> None:
    def broken(text: str) -> Any:
        return {}["call"]

    rule = r"parser=broken raised KeyError: 'call' in test_turn_parser\.py, line \d+ for the turn 'Hi'; let it return"
    with pytest.raises(GenerationError, match=rule):
        TurnParser(byte_tokenizer(), broken).parse("Hi", first_call=0)
