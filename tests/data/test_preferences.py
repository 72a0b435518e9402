"""Data modules of pairs, binary feedback and steps: samples from every row format, and refused rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.feedback import BinaryFeedbackDataModule
from lightning_realloc.data.preferences import PreferenceDataModule, implied_prompt
from lightning_realloc.data.steps import StepDataModule
from lightning_realloc.errors import DataError
from tests.data.test_prompts import CHAT_TEMPLATE
from tests.models import byte_tokenizer

ASK = [{"role": "user", "content": "1+1"}]
GOOD, BAD = [{"role": "assistant", "content": "2"}], [{"role": "assistant", "content": "3"}]
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


def chat() -> Any:
    """Return a tokenizer with a template that also renders tools."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ tools | length }}t{% endif %}" + CHAT_TEMPLATE
    return tokenizer


def batch_of(module_class: type[RowDataModule], *rows: dict[str, Any], **settings: Any) -> Samples:
    """Return the rows as one batch, in their order."""
    tokenizer = settings.pop("tokenizer", None) or chat()
    module = module_class(list(rows), batch_size=len(rows), tokenizer=tokenizer, shuffle=False, **settings)
    module.setup()
    (batch,) = module.train_dataloader()
    return batch


def texts(batch: Samples) -> list[tuple[str, str]]:
    """Return prompt and response text of every sample, special tokens included."""
    tokenizer = chat()
    columns = (batch.ragged(name).to_lists() for name in ("prompt_ids", "response_ids"))
    return [tuple(tokenizer.decode(ids) for ids in row) for row in zip(*columns, strict=True)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (PAIR, ("1+1=", "2<eos>", "3<eos>")),
        ({"chosen": "1+1= 2", "rejected": "1+1= 3"}, ("1+1=", " 2<eos>", " 3<eos>")),
        ({"prompt": ASK, "chosen": GOOD, "rejected": BAD}, ("u:1+1<eos>\na:", "2<eos>\n", "3<eos>\n")),
        ({"chosen": ASK + GOOD, "rejected": ASK + BAD}, ("u:1+1<eos>\na:", "2<eos>\n", "3<eos>\n")),
        (
            {"prompt": ASK, "chosen": GOOD, "rejected": BAD, "tools": json.dumps([{"name": "add"}])},
            ("1tu:1+1<eos>\na:", "2<eos>\n", "3<eos>\n"),
        ),
    ],
)
def test_a_pair_becomes_two_samples_with_one_prompt(row: dict[str, Any], expected: tuple[str, str, str]) -> None:
    batch = batch_of(PreferenceDataModule, row)
    prompt, chosen, rejected = expected
    assert texts(batch) == [(prompt, chosen), (prompt, rejected)]
    assert batch.objects("prompt") == ("1+1=" if prompt == "1+1=" else ASK,) * 2


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1", "chosen": GOOD, "rejected": BAD},
        {"prompt": "1+1", "chosen": ASK + GOOD, "rejected": ASK + BAD},
        {"prompt": ASK, "chosen": "2", "rejected": "3"},
    ],
)
def test_text_next_to_messages_becomes_a_message_of_its_role(row: dict[str, Any]) -> None:
    assert texts(batch_of(PreferenceDataModule, row)) == [
        ("u:1+1<eos>\na:", "2<eos>\n"),
        ("u:1+1<eos>\na:", "3<eos>\n"),
    ]


def test_batch_size_counts_pairs_and_both_sides_get_the_margin() -> None:
    rows = [{**PAIR, "prompt": f"{n}=", "margin": n / 2} for n in range(3)]
    batch = batch_of(PreferenceDataModule, *rows)
    assert batch.tensor("margin").tolist() == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert [prompt for prompt, _ in texts(batch)] == ["0=", "0=", "1=", "1=", "2=", "2="]
    named = batch_of(PreferenceDataModule, {**PAIR, "by": 2}, margin_column="by")
    assert named.tensor("margin").tolist() == [2.0, 2.0]


def test_the_implied_prompt_is_the_common_beginning_of_both_sides() -> None:
    assert implied_prompt("a b c", "a b d") == ("a b", " c", " d")
    assert implied_prompt("abc", "abd") == ("ab", "c", "d")
    assert implied_prompt("ab", "abc") == ("ab", "", "c")
    assert implied_prompt(ASK + GOOD, ASK + BAD) == (ASK, GOOD, BAD)
    assert implied_prompt("ab", ASK) is None
    result, other = {"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}
    begun = [*ASK, *GOOD]  # the call is common, its result is not
    _, *sides = implied_prompt([*begun, result, *GOOD], [*begun, other, *BAD]) or ()
    assert sides == [[*GOOD, result, *GOOD], [*GOOD, other, *BAD]]


def learnt(batch: Samples) -> list[str]:
    """Return the responses with a dot for every token that is not learnt."""
    columns = (batch.ragged(name).to_lists() for name in ("response_ids", "model_mask"))
    return [
        "".join(chat().decode([i]) if said else "." for i, said in zip(ids, mask, strict=True))
        for ids, mask in zip(*columns, strict=True)
    ]


def test_of_several_turns_the_assistants_are_learnt() -> None:
    again, result = [{"role": "user", "content": "2"}], [{"role": "tool", "content": "2"}]
    chosen, rejected = "2<eos>" + "." * 8 + "2<eos>\n", "3<eos>" + "." * 8 + "3<eos>\n"
    for between in (again, result):  # a line break, "u:2" or "t:2", the end token, a line break and "a:"
        row = {"chosen": ASK + GOOD + between + GOOD, "rejected": ASK + BAD + between + BAD}
        for given in (row, {"prompt": ASK, "chosen": row["chosen"][1:], "rejected": row["rejected"][1:]}):
            assert learnt(batch_of(PreferenceDataModule, given)) == [chosen, rejected]
        judged = {"prompt": ASK, "completion": row["chosen"][1:], "label": True}
        assert learnt(batch_of(BinaryFeedbackDataModule, judged)) == [chosen]
    batch = batch_of(PreferenceDataModule, row)
    assert batch.tensor("num_model_tokens").tolist() == [5, 5]
    short = batch_of(PreferenceDataModule, row, max_tokens=12, long_rows="truncate")  # a prompt of 9 tokens
    assert learnt(short) == ["2<eos>.", "3<eos>."]
    tokenizer = chat()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message.content", "(message.content if loop.last else '')")
    with pytest.raises(DataError, match="row 0 of the data set: the chat template"):
        batch_of(PreferenceDataModule, row, tokenizer=tokenizer)


def test_a_pair_needs_a_template_that_keeps_the_thoughts_of_its_answers() -> None:
    tokenizer = chat()
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "{{ message.content }}",
        "{{ message.content if loop.last else message.content.split('</think>')[-1] }}",
    )
    again = [{"role": "assistant", "content": "<think>t</think>2"}, *ASK]
    row = {"prompt": ASK, "chosen": again + GOOD, "rejected": again + BAD}
    with pytest.raises(DataError, match="changes earlier answers when the conversation continues, such as by dropping"):
        batch_of(PreferenceDataModule, row, tokenizer=tokenizer)
    row = {"prompt": [*ASK, *again], "chosen": GOOD, "rejected": BAD}
    chosen, _ = texts(batch_of(PreferenceDataModule, row, tokenizer=tokenizer))
    assert chosen == ("u:1+1<eos>\na:2<eos>\nu:1+1<eos>\na:", "2<eos>\n")


@pytest.mark.parametrize("implied", [False, True])
def test_equal_prompts_are_held_out_together(implied: bool, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n % 5}", "chosen": f"a{n}", "rejected": f"b{n}"} for n in range(20)]
    if implied:
        rows = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in rows]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    module = PreferenceDataModule(file, batch_size=2, val_fraction=0.4, seed=3, tokenizer=byte_tokenizer())
    module.setup()
    prompts = [
        {prompt for batch in loader for prompt in batch.objects("prompt")}
        for loader in (module.train_dataloader(), module.val_dataloader())
    ]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 5


def test_long_responses_are_cut_and_pairs_that_differ_after_the_cut_are_refused() -> None:
    row = {"prompt": "abc", "chosen": "defg", "rejected": "dx"}
    cut = batch_of(PreferenceDataModule, row, max_tokens=6, long_rows="truncate")
    assert texts(cut) == [("abc", "def"), ("abc", "dx<eos>")]
    with pytest.raises(DataError, match="row 0 of the data set has 8 tokens, and max_tokens allows 6"):
        batch_of(PreferenceDataModule, row, max_tokens=6)
    with pytest.raises(DataError, match="are the same 1 tokens after encoding and truncation"):
        batch_of(PreferenceDataModule, row, max_tokens=4, long_rows="truncate")
    with pytest.raises(DataError, match="no pair is left"):
        batch_of(PreferenceDataModule, row, max_tokens=6, long_rows="drop")


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "a", "chosen": "b"}, r"has no column 'rejected', only \['chosen', 'prompt'\]"),
        ({"prompt": "a"}, r"has no columns 'chosen' and 'rejected', only \['prompt'\]; PreferenceDataModule needs"),
        ({**PAIR, "rejected": "2"}, "row 0 of the data set: chosen and rejected are equal"),
        ({**PAIR, "rejected": ""}, "the rejected response is empty"),
        ({"chosen": "ab", "rejected": "abc"}, "the chosen response is empty"),
        ({"chosen": "ab", "rejected": "cd"}, "have no common beginning; give a column 'prompt'"),
        ({**PAIR, "chosen": GOOD}, "chosen and rejected alike; got {'prompt': 'str', 'chosen': 'list', 'rejected': 's"),
        ({**PAIR, "prompt": 3}, "must be text or lists of messages, each with role, and content or tool_calls"),
        ({"prompt": "1+1", "chosen": ASK, "rejected": BAD}, "needs a message from the assistant to learn"),
        ({**PAIR, "margin": "much"}, "'margin' must be a finite number"),
        ({**PAIR, "margin": float("nan")}, "'margin' must be a finite number"),
        ({"prompt": ASK, "chosen": GOOD, "rejected": BAD, "tools": "none"}, "its tools are text, but not JSON"),
        ({"prompt": ASK, "chosen": GOOD, "rejected": BAD, "tools": {"a": 1}}, "its tools must be a list of schemas"),
    ],
)
def test_rows_that_are_not_pairs_are_refused(row: dict[str, Any], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        batch_of(PreferenceDataModule, row)


def test_conversations_need_a_chat_template() -> None:
    with pytest.raises(DataError, match="has no chat template to render it"):
        batch_of(PreferenceDataModule, {"prompt": ASK, "chosen": GOOD, "rejected": BAD}, tokenizer=byte_tokenizer())


def test_labelled_responses_keep_their_labels() -> None:
    rows = [
        {"prompt": "1+1=", "completion": "2", "label": True},
        {"prompt": ASK, "completion": BAD, "label": 0},
    ]
    batch = batch_of(BinaryFeedbackDataModule, *rows)
    assert texts(batch) == [("1+1=", "2<eos>"), ("u:1+1<eos>\na:", "3<eos>\n")]
    assert batch.tensor("label").tolist() == [True, False]
    mixed = batch_of(BinaryFeedbackDataModule, {"prompt": "1+1", "completion": BAD, "label": 0})
    assert texts(mixed) == [("u:1+1<eos>\na:", "3<eos>\n")]


def test_pairs_become_labelled_responses() -> None:
    rows = [{"chosen": "1+1=2", "rejected": "1+1=3", "by": "me"}]
    module = BinaryFeedbackDataModule(rows, batch_size=2, tokenizer=chat(), shuffle=False)
    module.setup()
    (batch,) = module.train_dataloader()
    assert texts(batch) == [("1+1=", "2<eos>"), ("1+1=", "3<eos>")]
    assert batch.tensor("label").tolist() == [True, False] and batch.objects("by") == ("me", "me")
    with pytest.raises(DataError, match="row 0 of the data set: chosen and rejected are equal"):
        batch_of(BinaryFeedbackDataModule, {**PAIR, "rejected": "2"})


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (
            {"prompt": "a"},
            r"has no columns 'completion' and 'label', only \['prompt'\]; BinaryFeedbackDataModule needs",
        ),
        ({"prompt": "a", "completion": "b"}, r"has no column 'label', only \['completion', 'prompt'\]"),
        ({"prompt": "a", "completion": "b", "label": 2}, "'label' must be true or 1, or false or 0; got 2"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "got 'good'"),
        ({"prompt": "a", "completion": "b", "label": None}, "got None"),
        ({"prompt": "a", "completion": "", "label": 1}, "the completion is empty"),
        ({"prompt": 1, "completion": GOOD, "label": 1}, "must be text or lists of messages, each with role"),
    ],
)
def test_rows_without_valid_labels_are_refused(row: dict[str, Any], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        batch_of(BinaryFeedbackDataModule, row)


STEPS = {"prompt": "1+1+1", "completions": ["2", "3"], "labels": [True, 0]}


def test_every_step_ends_with_its_own_token() -> None:
    batch = batch_of(StepDataModule, {**STEPS, "prompt": ASK}, {**STEPS, "labels": [1, 1]}, step_separator=";\n")
    assert texts(batch) == [("u:1+1<eos>\na:", "2;\n3;\n"), ("1+1+1", "2;\n3;\n")]
    assert batch.ragged("step_ends").to_lists() == [[False, False, True] * 2] * 2
    assert batch.ragged("step_labels").to_lists() == [[0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 1]]


def test_steps_that_end_after_the_limit_are_cut_off() -> None:
    batch = batch_of(StepDataModule, STEPS, max_tokens=8, long_rows="truncate")
    assert texts(batch) == [("1+1+1", "2\n")]
    with pytest.raises(DataError, match="none of its steps ends within the limit"):
        batch_of(StepDataModule, STEPS, max_tokens=6, long_rows="truncate")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"labels": [1]}, "needs one label per step, 2; got 1"),
        ({"labels": None}, "needs one label per step, 2; got NoneType"),
        ({"labels": [1, 0.5]}, "a step's label must be true or 1, or false or 0; got 0.5"),
        ({"completions": ["2", ""]}, "each a text that is not empty"),
        ({"completions": "23"}, "'completions' must be a list of steps"),
    ],
)
def test_rows_without_valid_step_labels_are_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        batch_of(StepDataModule, {**STEPS, **change})
