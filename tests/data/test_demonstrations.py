"""SFTDataModule: prompts and trained tokens from every row format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from datasets import IterableDataset
from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.demonstrations import SFTDataModule
from lightning_realloc.data.row_tables import TokenLimit
from lightning_realloc.data.rows import Row
from lightning_realloc.errors import DataError
from tests.data.test_preferences import texts
from tests.data.test_prompts import CHAT_TEMPLATE
from tests.models import byte_tokenizer

TURNS = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def _pair(row: dict[str, Any], **settings: Any) -> tuple[str, str]:
    """Return the prompt and the text of the trained tokens, special tokens included."""
    tokenizer = settings.pop("tokenizer", byte_tokenizer())
    module = SFTDataModule([row], batch_size=1, tokenizer=tokenizer, **settings)
    module.setup()
    (batch,) = module.train_dataloader()
    assert batch.objects(next(iter(row))) == (next(iter(row.values())),)
    return tokenizer.decode(batch.ragged("prompt_ids").values), tokenizer.decode(batch.ragged("response_ids").values)


def _chat() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def test_completions_and_whole_texts_end_with_the_end_token() -> None:
    assert _pair({"prompt": "1+1=", "completion": "2"}) == ("1+1=", "2<eos>")
    assert _pair({"prompt": "1+1=", "completion": "2<eos>"}) == ("1+1=", "2<eos>")
    assert _pair({"text": "all of it"}) == ("", "all of it<eos>")


def test_the_last_answer_of_a_conversation_is_trained_with_the_templates_end() -> None:
    expected = ("u:1+1<eos>\na:", "2<eos>\n")
    assert _pair({"messages": TURNS}, tokenizer=_chat()) == expected
    assert _pair({"prompt": TURNS[:1], "completion": TURNS[1:]}, tokenizer=_chat()) == expected
    assert _pair({"prompt": TURNS[:1], "completion": "2"}, tokenizer=_chat()) == expected
    assert _pair({"prompt": "1+1", "completion": TURNS[1:]}, tokenizer=_chat()) == expected


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]}
CALLING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if 'tool_calls' in message %}{{ message.tool_calls[0].function | tojson }}{% endif %}"
    "{% if message.content %}{{ message.content }}{% endif %}",
)


@pytest.mark.parametrize("of_a_table", [False, True])
def test_a_message_with_only_tool_calls_reaches_the_template(of_a_table: bool) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CALLING_TEMPLATE
    turns: list[dict[str, Any]] = [TURNS[0], CALL, {"role": "tool", "content": "2"}, TURNS[1]]
    if of_a_table:  # a table holds null for the columns of other messages
        every = {"content": None, "tool_calls": None}
        arguments = {"function": {"name": "add", "arguments": {"a": 1, "b": 1, "c": None}}}
        turns = [every | turn for turn in turns]
        turns[1]["tool_calls"] = [arguments]
    call = '{"name": "add", "arguments": {"a": 1, "b": 1}}'
    prompt, learnt = _pair({"messages": turns}, tokenizer=tokenizer)
    assert (prompt, learnt) == ("u:1+1<eos>\na:", f"{call}<eos>\nt:2<eos>\na:2<eos>\n")
    assert _pair({"messages": turns[:2]}, tokenizer=tokenizer)[1] == f"{call}<eos>\n"


TALK = [*TURNS, {"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]


def _learnt(rows: list[dict[str, Any]], **settings: Any) -> list[tuple[str, str]]:
    """Return every row's prompt, and its response with a dot for every byte that is not trained on."""
    module = SFTDataModule(rows, batch_size=len(rows), shuffle=False, tokenizer=_chat(), **settings)
    module.setup()
    (batch,) = module.train_dataloader()
    assert batch.tensor("num_model_tokens").tolist() == [sum(row) for row in batch.ragged("model_mask").to_lists()]
    columns = (batch.ragged(name).to_lists() for name in ("prompt_ids", "response_ids", "model_mask"))
    return [
        (
            _chat().decode(prompt),
            "".join(_chat().decode([i]) if said else "." for i, said in zip(ids, mask, strict=True)),
        )
        for prompt, ids, mask in zip(*columns, strict=True)
    ]


def test_all_answers_of_the_assistant_in_a_conversation_are_trained_on() -> None:
    # In between: the line break after the first answer, "u:2+3", the end token, a line break and "a:".
    assert _learnt([{"messages": TALK}]) == [("u:1+1<eos>\na:", "2<eos>" + "." * 10 + "5<eos>\n")]
    assert _pair({"messages": TALK}, tokenizer=_chat(), learn="last")[1] == "5<eos>\n"


def test_short_conversations_next_to_long_ones_are_trained_as_alone() -> None:
    both = _learnt([{"messages": TURNS}, {"messages": TALK}])
    assert both == [("u:1+1<eos>\na:", "2<eos>\n"), *_learnt([{"messages": TALK}])]


def test_greetings_and_tool_results_are_not_trained_on() -> None:
    talk = [{"role": "assistant", "content": "hi"}, *TURNS, {"role": "tool", "content": "7"}, TURNS[1]]
    ((prompt, learnt),) = _learnt([{"messages": talk}])
    assert prompt == "a:hi<eos>\nu:1+1<eos>\na:"
    assert learnt.replace(".", "") == "2<eos>2<eos>\n"


def test_a_cut_conversation_keeps_its_mask() -> None:
    ((_, learnt),) = _learnt([{"messages": TALK}], max_tokens=13, long_rows="truncate")
    assert learnt == "2<eos>.."  # 9 tokens of prompt leave room for 4


def test_the_first_token_of_a_text_has_no_prediction_and_does_not_count() -> None:
    assert _learnt([{"text": "ab"}]) == [("", ".b<eos>")]


THINKING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content.split('</think>')[-1] if loop.index0 < ns.asked else message.content }}",
)
THINKING_TEMPLATE = (
    "{% set ns = namespace(asked=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}" + THINKING_TEMPLATE
)
"""Template that drops the thoughts of answers before the last question, as Qwen3's does."""
THOUGHTS = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "<think>t1</think>call"},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "<think>t2</think>a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "<think>t3</think>a2"},
]
AT_ITS_TURN = [
    ("u:q1<eos>\na:", "<think>t1</think>call<eos>\nt:7<eos>\na:<think>t2</think>a1<eos>\n"),
    ("u:q1<eos>\na:call<eos>\nt:7<eos>\na:a1<eos>\nu:q2<eos>\na:", "<think>t3</think>a2<eos>\n"),
]


def _thoughts(**settings: Any) -> Samples:
    """Return the sequences that are learnt from a conversation with a template that drops earlier thoughts."""
    tokenizer = _chat()
    tokenizer.chat_template = THINKING_TEMPLATE
    data = {"data": [{"messages": THOUGHTS}], "batch_size": 10, "drop_last": False, **settings}
    module = SFTDataModule(**data, tokenizer=tokenizer, shuffle=False)
    module.setup()
    (batch,) = module.train_dataloader()
    return batch


def test_every_answer_is_learnt_as_at_its_turn_where_the_template_drops_earlier_thoughts() -> None:
    with pytest.warns(UserWarning, match="such answers are sequences of their own, and batch_size counts sequences"):
        batch = _thoughts()
    assert texts(batch) == AT_ITS_TURN and batch.objects("messages") == (THOUGHTS,) * 2
    call, result, answer = len("<think>t1</think>call") + 1, len("\nt:7\na:") + 1, len("<think>t2</think>a1\n") + 1
    first, second = batch.ragged("model_mask").to_lists()
    assert first == [True] * call + [False] * result + [True] * answer and all(second)
    assert texts(_thoughts(learn="last")) == AT_ITS_TURN[1:]
    as_completion = [{"prompt": THOUGHTS[:1], "completion": THOUGHTS[1:]}]
    assert texts(_thoughts(data=as_completion)) == AT_ITS_TURN


OPENED = CHAT_TEMPLATE.replace("a:", "a:<think>\n")
"""Template whose generation prompt opens a thought, while it renders contents as they are."""
DROPPED = OPENED.replace("message.content", "message.content.split('</think>')[-1]")
"""Template that renders every answer without its thought, as those of DeepSeek-R1's distillations do."""
TRIMMED = DROPPED.replace("[-1]", "[-1].lstrip()")
"""Template that also drops the line breaks after a thought, as QwQ's does."""
CLOSED = DROPPED.replace("<think>\n", "<think>").replace("}}:", "}}:{{ '</think>' if message.role == 'assistant' }}")
"""Template that closes a thought before each answer, as DeepSeek-V3.1's does."""


@pytest.mark.parametrize("template", [OPENED, DROPPED, TRIMMED, CLOSED])
def test_an_answer_follows_the_thought_that_its_generation_prompt_opens(template: str) -> None:
    tokenizer, opened = _chat(), "<think>" if template == CLOSED else "<think>\n"
    tokenizer.chat_template = template

    def learnt(*answers: dict[str, str], **settings: Any) -> list[tuple[str, str]]:
        turns = [
            turn
            for number, answer in enumerate(answers, start=1)
            for turn in ({"role": "user", "content": f"q{number}"}, {"role": "assistant", **answer})
        ]
        rows = [{"messages": turns}]
        module = SFTDataModule(rows, batch_size=9, tokenizer=tokenizer, shuffle=False, drop_last=False, **settings)
        module.setup()
        return texts(next(iter(module.train_dataloader())))

    first = ("u:q1<eos>\na:" + opened, "t1\n</think>\n\na1<eos>\n")
    thoughts = [{"content": f"{opened}t{number}\n</think>\n\na{number}"} for number in (1, 2)]
    assert learnt(thoughts[0]) == [first]
    assert learnt({"content": "a1", "reasoning_content": "t1"}) == [first]
    # The template drops earlier thoughts, so each answer is a sequence of its own.
    if template in (DROPPED, TRIMMED):
        earlier = "\n\na1" if template == DROPPED else "a1"
        second = (f"u:q1<eos>\na:{earlier}<eos>\nu:q2<eos>\na:{opened}", "t2\n</think>\n\na2<eos>\n")
        assert learnt(*thoughts) == [first, second] and learnt(*thoughts, learn="last") == [second]
        assert learnt({"content": "<think>t1\n</think>\n\na1"}) == [first]  # without the line break
    # Without a thought, answers follow the prompt as the template renders them, and share a sequence.
    end = "</think>" if template == CLOSED else ""
    plain = ("u:q1<eos>\na:", f"{end}a1<eos>\nu:q2<eos>\na:{end}a2<eos>\n")
    assert learnt({"content": "a1"}, {"content": "a2"}) == [plain]


def test_an_answer_with_a_thought_after_a_prompt_that_has_ended_its_own_is_refused() -> None:
    tokenizer = _chat()
    tokenizer.chat_template = OPENED.replace("<think>\n", "<think>\n\n</think>\n\n")
    with pytest.raises(DataError, match="such as enable_thinking=True for answers with thoughts"):
        _pair({"messages": THOUGHTS[-2:]}, tokenizer=tokenizer)


def test_a_long_conversation_is_cut_before_the_answers_that_do_not_fit() -> None:
    ((prompt, learnt),) = texts(_thoughts(max_tokens=33, long_rows="truncate"))  # the second prompt has 33 tokens
    assert (prompt, learnt) == (AT_ITS_TURN[0][0], AT_ITS_TURN[0][1][: len("<think>t1</think>call<eos>\nt:")])


class _Counting(SFTDataModule):
    """Counts how often the limit is looked up, for which algorithms make their roles."""

    num_lookups = 0

    def limit(self) -> TokenLimit | None:
        """Count, and return the limit."""
        self.num_lookups += 1
        return super().limit()


class _CountingRows(SFTDataModule):
    """Counts the rows of which it makes samples."""

    num_rows = 0

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Make samples, and count their rows."""
        made = super().tabulate(rows, tokenizer)
        self.num_rows += len(rows)
        return made


def test_rows_next_to_a_bad_one_are_tokenized_once() -> None:
    good = [{"messages": [{"role": "user", "content": str(n)}, TURNS[1]]} for n in range(6)]
    good[4] = {"messages": TALK}  # with a mask, which the other parts do not need
    module = _CountingRows([*good[:3], {"messages": TURNS[:1]}, *good[3:]], batch_size=6, tokenizer=_chat(),
                           shuffle=False, bad_rows="drop")  # fmt: skip
    with pytest.warns(UserWarning, match="left out 1 of 7 rows"):
        module.setup("fit")
    (batch,) = module.train_dataloader()
    assert module.num_rows == 6 and batch.ids.tolist() == list(range(6))
    assert batch.objects("messages") == tuple(row["messages"] for row in good)


def test_the_limit_is_looked_up_once_per_table_however_many_answers_it_holds() -> None:
    tokenizer = _chat()
    tokenizer.chat_template = THINKING_TEMPLATE
    for num_rows in (1, 5):
        rows = [{"messages": THOUGHTS}] * num_rows
        for long_rows, num_lookups in (("refuse", 1), ("truncate", 2)):  # to cut answers, and to cut tokens
            module = _Counting(rows, batch_size=1, tokenizer=tokenizer, max_tokens=500, long_rows=long_rows)
            module.setup("fit")
            assert module.num_lookups == num_lookups


def test_messages_after_the_last_answer_are_not_read() -> None:
    for after in ({"role": "user", "content": "?"}, {"role": "tool", "content": "7"}):
        assert _learnt([{"messages": [*TALK, after]}]) == _learnt([{"messages": TALK}])
        assert _pair({"messages": [*TURNS, after]}, tokenizer=_chat(), learn="last")[1] == "2<eos>\n"


def test_a_completion_may_hold_a_call_its_result_and_the_answer() -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "sum"}, {"role": "tool", "content": "2"}, TURNS[1]]
    assert _learnt([{"prompt": turns[:1], "completion": turns[1:]}]) == _learnt([{"messages": turns}])
    # An earlier answer is part of the prompt, and not learnt.
    ((prompt, learnt),) = _learnt([{"prompt": TALK[:3], "completion": [TALK[3], *turns]}])
    assert prompt == "u:1+1<eos>\na:2<eos>\nu:2+3<eos>\na:"
    assert learnt.replace(".", "") == "5<eos>sum<eos>2<eos>\n"


@pytest.mark.parametrize("streams", [False, True])
def test_rows_with_errors_are_left_out_and_counted_on_request(streams: bool) -> None:
    bad = [{"messages": TURNS[:1]}, {"messages": [{"role": "user", "content": [{"type": "image"}]}, TURNS[1]]}]
    good = [{"messages": [{"role": "user", "content": str(n)}, TURNS[1]]} for n in range(7)]
    long = {"messages": [{"role": "user", "content": "1" * 90}, TURNS[1]]}
    rows = [*good[:2], bad[0], *good[2:5], bad[1], *good[5:], long]

    def batches(rows: list[dict[str, Any]], **settings: Any) -> list[tuple[str, str]]:
        data = IterableDataset.from_generator(lambda: iter(rows)) if streams else rows
        module = SFTDataModule(
            data, batch_size=7, tokenizer=_chat(), shuffle=False, long_rows="drop", max_tokens=50, **settings
        )
        module.setup("fit")
        return texts(next(iter(module.train_dataloader())))

    with (
        pytest.warns(UserWarning, match=r"left out 1 of \d+ rows; the first error: row 2 of .* a conversation needs"),
        pytest.warns(UserWarning, match=r"left out 1 of \d+ rows; the first error: row 6 of .* shows an image, and"),
    ):
        kept = batches(rows, bad_rows="drop")
    assert [prompt for prompt, _ in kept] == [f"u:{n}<eos>\na:" for n in range(7)]
    with pytest.raises(DataError, match=r"row 6 of .* shows an image"):
        batches(rows)
    unusable = r"none of \d rows can be used; the first error: row 0 of .* a conversation needs"
    with pytest.raises(DataError, match=unusable), pytest.warns(UserWarning, match=r"left out \d of \d rows"):
        batches([bad[0]] * 9, bad_rows="drop")
    if streams:
        with pytest.warns(UserWarning, match="left out 7 of 7 rows; the first error: row 0 of"):
            assert batches([bad[0]] * 7 + good, bad_rows="drop") == kept
    with pytest.raises(DataError, match="bad_rows='skip' must be one of refuse, drop"):
        batches(rows, bad_rows="skip")


def test_a_batch_of_a_stream_may_hold_rows_with_and_without_a_mask() -> None:
    rows = [{"messages": turns} for turns in (TURNS, TURNS, TALK, TALK)]
    data = IterableDataset.from_generator(lambda: iter(rows))
    module = SFTDataModule(data, batch_size=3, tokenizer=_chat(), shuffle=False, shuffle_buffer=3)
    module.setup("fit")
    batch = next(iter(module.train_dataloader()))
    assert batch.tensor("num_model_tokens").tolist() == [3, 3, 5]


def test_long_responses_are_cut_or_dropped_on_request() -> None:
    row = {"prompt": "abc", "completion": "defg"}
    assert _pair(row, max_tokens=5, long_rows="truncate") == ("abc", "de")
    with pytest.raises(DataError, match="row 0 of the data set has 8 tokens, and max_tokens allows 5"):
        _pair(row, max_tokens=5)
    with pytest.raises(DataError, match="prompt alone has 3 tokens"):
        _pair(row, max_tokens=3, long_rows="truncate")
    with pytest.raises(DataError, match="no row is left"):
        _pair(row, max_tokens=5, long_rows="drop")


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"question": "a"}, r"needs 'prompt' and 'completion', or 'messages', or 'text'; it has \['question'\]"),
        ({"prompt": "a", "completion": ""}, "row 0 of the data set: 'completion' is empty, so nothing can be learnt"),
        ({"messages": []}, "'messages' is empty"),
        ({"prompt": "a", "completion": TURNS}, r"its roles are \['user', 'user', 'assistant'\]"),
        ({"prompt": 1, "completion": "a"}, "must be text or lists of messages, each with role, and content or tool"),
        ({"messages": "a"}, "must be text or lists of messages"),
        ({"prompt": TURNS[:1], "completion": []}, "'completion' is empty"),
        ({"text": ""}, "'text' is empty"),
        ({"messages": TURNS[:1]}, r"its roles are \['user'\]"),
        ({"messages": [TURNS[1], TURNS[0]]}, r"its roles are \['assistant', 'user'\]"),
    ],
)
def test_rows_of_an_unknown_format_are_refused(row: dict[str, Any], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        _pair(row, tokenizer=_chat())


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(DataError, match="the same way whether or not an answer follows"):
        _pair({"messages": TURNS}, tokenizer=tokenizer)
