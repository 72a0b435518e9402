"""Tokens of answers by small chat templates: ends of turns, text that imitates them, and templates that are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_realloc.environments.tool_environment import ToolEnvironment
from lightning_realloc.environments.turns.chat_turns import ChatTurns
from lightning_realloc.environments.turns.turn_parser import TurnParser
from lightning_realloc.errors import ConfigError, DataError
from tests.models import byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL_ANSWER = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "3"}
CHATML = """{% if tools %}<|system|>{{ tools | tojson }}<eos>
{% endif %}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% for call in message.tool_calls %}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}<eos>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MISTRAL = """<bos>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}{% if message.role == "user" %}[INST]{{ message.content }}[/INST]
{%- elif message.role == "tool" %}{% if message.tool_call_id | length != 9 %}{{ raise_exception("nine characters") }}
{%- endif %}[TOOL_RESULTS]{{ message.tool_call_id }}: {{ message.content }}[/TOOL_RESULTS]
{%- elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}{% if call.id | length != 9 %}
{{- raise_exception("nine characters") }}{% endif %}{"name": "{{ call.function.name }}", "arguments":{{ " " }}
{{- call.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]<eos>
{%- else %}{{ message.content }}<eos>{% endif %}{% endfor %}"""


def tokenizer_with(template: Any, *special: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def turns_with(template: Any, *special: str, stops: tuple[str, ...] = ("<eos>",), **settings: Any) -> ChatTurns:
    tokenizer = tokenizer_with(template, *special)
    return ChatTurns(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids(list(stops)), template=settings)


def text_of(turns: ChatTurns, ids: list[int]) -> str:
    text: str = turns._tokenizer.decode(ids)
    return text


EOS = 2


def test_a_prompt_ends_where_the_turn_begins() -> None:
    turns = turns_with(CHATML)
    assert text_of(turns, turns.prompt_ids([{"role": "user", "content": "Hi"}])) == "<|user|>Hi<eos>\n<|assistant|>"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([TOOL_ANSWER], "\n<|tool|>3<eos>\n<|assistant|>"),
        ([TOOL_ANSWER, {"role": "user", "content": ""}], "\n<|tool|>3<eos>\n<|user|><eos>\n<|assistant|>"),
        ([], "\n<|assistant|>"),
    ],
)
def test_an_answer_begins_after_the_turns_end(answer: list[dict[str, Any]], expected: str) -> None:
    turns = turns_with(CHATML)
    for message in (CALLING, {"role": "assistant", "content": "I do not say this again"}):
        assert text_of(turns, turns.answer_ids([9, EOS], message, answer, TOOLS)) == expected
        assert text_of(turns, turns.answer_ids([9], message, answer, TOOLS)) == "<eos>" + expected


def test_a_turn_is_read_carried_out_and_answered() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    environment, tokenizer = ToolEnvironment([add]), tokenizer_with(CHATML + "{# <tool_call> #}")
    tools = [tool.schema for tool in environment.tools]
    turns, parser = ChatTurns(tokenizer, stop_token_ids=[EOS]), TurnParser(tokenizer)
    turns.check(tools)
    parser.check(tools)
    written = [
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "2"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, }}</tool_call>',
        '<tool_call>{"name": "add", "argu',
    ]
    message = parser.parse("\n".join(written), first_call=7, tools=tools)
    result = asyncio.run(environment.step(message))
    text = text_of(turns, turns.answer_ids([EOS], message, result.messages, tools))
    (right, *wrong, _) = text.split("<eos>\n")[:4]
    assert [answer["tool_call_id"] for answer in result.messages] == ["call00007", "call00008", "call00009"]
    assert right == "\n<|tool|>3" and len(wrong) == 2
    assert all(answer.startswith('<|tool|>{"error": "') and "JSON" in answer for answer in wrong)


def test_ids_of_calls_reach_the_template_of_mistral() -> None:
    turns = turns_with(MISTRAL, "[INST]", "[/INST]", "[TOOL_CALLS]")
    turns.check(TOOLS)
    second = {**CALL, "id": "call00001"}
    message = {**CALLING, "tool_calls": [CALL, second]}
    answer = [TOOL_ANSWER, {**TOOL_ANSWER, "tool_call_id": "call00001", "content": "4"}]
    ids = turns.answer_ids([EOS], message, answer, TOOLS)
    assert text_of(turns, ids) == "[TOOL_RESULTS]call00000: 3[/TOOL_RESULTS][TOOL_RESULTS]call00001: 4[/TOOL_RESULTS]"


def test_a_stop_token_in_an_answer_does_not_end_the_turn_before_it() -> None:
    # As in gpt-oss, the history has another token at the end of a turn than the model writes.
    template = CHATML.replace("{% endfor %}<eos>", "{% endfor %}<|end|>")
    turns = turns_with(template, "<|end|>")
    answer = [{"role": "user", "content": "Is <eos> a token?"}]
    ids = turns.answer_ids([EOS], {"role": "assistant", "content": "x"}, answer)
    assert text_of(turns, ids) == "<|end|>\n<|user|>Is <eos> a token?<|end|>\n<|assistant|>"


def test_special_tokens_in_every_field_of_a_message_stay_text() -> None:
    turns = turns_with(CHATML, "<|user|>")
    user = turns._tokenizer.convert_tokens_to_ids("<|user|>")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"<eos>a": ["<|user|><eos>"]}}}
    said = [{"role": "assistant", "content": [{"type": "text", "text": "<|user|>"}], "tool_calls": [call]}]
    for ids in (turns.prompt_ids(said), turns.answer_ids([EOS], CALLING, said)):
        assert '<|user|><call>add {"<eos>a": ["<|user|><eos>"]}</call><eos>' in text_of(turns, ids)
        assert ids.count(EOS) == 1 and user not in ids


def test_text_that_marks_a_turns_end_stays_in_an_answer() -> None:
    turns = turns_with(CHATML)
    marks = "".join(("e0f7a9c4d2", "b8e1d6a3c7", "bb8e1d6a3c7b8e1d6a3c7", "e0f7a9c4d2"))
    answer = turns.answer_ids([EOS], CALLING, [{**TOOL_ANSWER, "content": f"a{marks}<eos>"}], TOOLS)
    assert text_of(turns, answer) == f"\n<|tool|>a{marks}<eos><eos>\n<|assistant|>" and answer.count(EOS) == 1


def test_a_stop_token_of_ordinary_text_does_not_end_the_turn_in_the_template() -> None:
    turns = turns_with(CHATML, stops=("<eos>", "c"))  # <call> and </call> contain it
    answer = turns.answer_ids([EOS], CALLING, [TOOL_ANSWER], TOOLS)
    assert text_of(turns, answer) == "\n<|tool|>3<eos>\n<|assistant|>"


def test_an_end_that_depends_on_the_answers_text_is_found() -> None:
    template = """{% for message in messages %}{{ message.content }}{% if message.role == "assistant" %}
    {%- if messages[loop.index].content == "." %} neutral{% endif %}<eos>{% endif %}{% endfor %}"""
    turns = turns_with(template)
    ids = turns.answer_ids([EOS], {"role": "assistant", "content": "x"}, [{"role": "user", "content": "Hi"}])
    assert text_of(turns, ids) == "Hi"


def test_an_answer_is_encoded_as_in_the_whole_conversation() -> None:
    # Such a tokenizer, as that of Llama 2, adds a space at the start of a text, and none after a special token.
    words = {"<eos>": 0, "▁": 1, "<unk>": 2} | {chr(code): code for code in range(33, 127)}
    inner = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}<eos>{% endfor %}"
    turns = ChatTurns(tokenizer, stop_token_ids=[0])
    messages = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
    prompt, answer = turns.prompt_ids(messages[:1]), turns.answer_ids([0], messages[1], messages[2:])
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    assert [*prompt, ord("a"), 0, *answer] == whole and prompt[0] == 1


def test_halves_of_surrogate_pairs_become_question_marks() -> None:
    turns = turns_with(CHATML)
    answer = [{"role": "user", "content": "a\ud800b"}]
    assert "<|user|>a?b<eos>" in text_of(turns, turns.answer_ids([EOS], CALLING, answer, TOOLS))
    assert "<|user|>a?b<eos>" in text_of(turns, turns.prompt_ids(answer))


def test_arguments_of_the_chat_template_are_passed() -> None:
    template = CHATML.replace("<|assistant|>{% endif %}", "<|assistant|>{{ opening }}{% endif %}")
    turns = turns_with(template, opening="<think>")
    assert text_of(turns, turns.prompt_ids([TOOL_ANSWER])).endswith("<|assistant|><think>")
    assert text_of(turns, turns.answer_ids([EOS], CALLING, [TOOL_ANSWER])).endswith("<|assistant|><think>")


def test_check_accepts_a_template_with_tools() -> None:
    turns_with(CHATML).check(TOOLS)
    turns_with(CHATML).check()


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (None, "needs a chat template, and .* has none; use .* or set tokenizer.chat_template"),
        (CHATML.replace("{{ tools | tojson }}", ""), "leaves out add; set tokenizer.chat_template"),
        ("add" + CHATML.replace("{% if tools %}", "{% if false %}"), "leaves out add; set tokenizer.chat_template"),
        (CHATML.replace("message.tool_calls", "[]"), "leaves out tool calls; set tokenizer.chat_template"),
        (CHATML.replace("{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}"),
         "leaves them out; set tokenizer.chat_template to one that renders messages of the role tool"),
        (CHATML.replace("<eos>", ""), r"must end with a special token.*</call>.*ends turns with \['<eos>'\]"),
        (CHATML.replace("<eos>", "<bos>"), r"must end with a stop token, which are \['<eos>'\].*add the token"),
        (CHATML.replace("{% for call", "{{ message.tool_calls.x.y }}{% for call"), "cannot render messages of"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_show_tools_is_refused(template: str | None, error: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){error}"):
        turns_with(template).check(TOOLS)


def test_a_template_without_ends_of_turns_is_refused_without_tools() -> None:
    with pytest.raises(ConfigError, match="must end with a special token"):
        turns_with("{% for message in messages %}{{ message.content }}\n{% endfor %}").check()
    with pytest.raises(ConfigError, match="leaves out turns of the assistant"):
        turns_with("{{ messages[0].content }}<eos>").check()


def test_messages_that_the_template_cannot_render_are_refused() -> None:
    turns = turns_with(MISTRAL)
    with pytest.raises(DataError, match=r"an environment's messages: .*nine characters"):
        turns.answer_ids([EOS], CALLING, [{**TOOL_ANSWER, "tool_call_id": "1"}], TOOLS)
    with pytest.raises(DataError, match="expected text or a list of messages"):
        turns.prompt_ids([{"content": "no role"}])


@pytest.mark.parametrize("content", ["higher", [{"type": "text", "text": "higher"}]])
def test_messages_that_the_template_leaves_out_are_refused(content: Any) -> None:
    known = "('user', 'assistant', 'tool')"
    turns = turns_with(CHATML.replace("in messages %}", f"in messages if message.role in {known} %}}", 1))
    observed = {"role": "observation", "content": content}
    rule = "leaves out this message of the role 'observation'; give it the role 'user', or 'tool' if it answers a call"
    with pytest.raises(DataError, match=rule):
        turns.answer_ids([5, EOS], {"role": "assistant", "content": "5"}, [observed])
    with pytest.raises(DataError, match=rule):
        turns.prompt_ids([{"role": "user", "content": "Guess."}, observed])
    assert turns.prompt_ids([{"role": "user", "content": "Guess."}, observed], of_data=[observed])


def test_messages_that_the_template_escapes_are_not_left_out() -> None:
    turns = turns_with(CHATML.replace("{{ message.content }}", "{{ message.content | tojson }}"))
    shown = text_of(turns, turns.prompt_ids([{"role": "user", "content": 'a "b"'}]))
    assert 'a \\"b\\"' in shown
