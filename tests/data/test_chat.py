"""Messages with content in parts: texts are joined in every data module, images are refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lightning_realloc.data.chat import conversation_text
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.demonstrations import SFTDataModule
from lightning_realloc.data.feedback import BinaryFeedbackDataModule
from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.data.steps import StepDataModule
from lightning_realloc.errors import DataError
from tests.data.test_preferences import batch_of, chat
from tests.models import byte_tokenizer

STRINGS_ALONE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% endif %}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
"""Template that renders no content but text, as Qwen3's does."""
IMAGE = {"type": "image"}


def said(role: str, *texts: str, **others: Any) -> dict[str, Any]:
    """Return a message with text in parts, with the nulls of a table that also holds images."""
    return {"role": role, "content": [{"type": "text", "text": text, "image_url": None} for text in texts], **others}


USER, GOOD, BAD = said("user", "1+", "1"), said("assistant", "2"), said("assistant", "3")
ASKED = "u:1+1<eos>\na:"
CALL = said("assistant", tool_calls=[{"function": {"name": "add", "arguments": {}}}])
ROWS: list[tuple[type[RowDataModule], dict[str, Any], list[str]]] = [
    (SFTDataModule, {"messages": [USER, GOOD]}, ["2<eos>\n"]),
    (SFTDataModule, {"prompt": [USER], "completion": [GOOD]}, ["2<eos>\n"]),
    (SFTDataModule, {"messages": [USER, CALL, said("tool", "2"), GOOD]}, ["<eos>\nt:2<eos>\na:2<eos>\n"]),
    (PreferenceDataModule, {"chosen": [USER, GOOD], "rejected": [USER, BAD]}, ["2<eos>\n", "3<eos>\n"]),
    (
        PreferenceDataModule,
        {"chosen": [USER, GOOD], "rejected": [{"role": "user", "content": "1+1"}, BAD]},
        ["2<eos>\n", "3<eos>\n"],
    ),
    (BinaryFeedbackDataModule, {"prompt": [USER], "completion": [GOOD], "label": True}, ["2<eos>\n"]),
    (StepDataModule, {"prompt": [USER], "completions": ["2"], "labels": [True]}, ["2\n"]),
]


@pytest.mark.parametrize(("module_class", "row", "responses"), ROWS)
def test_content_in_parts_is_their_text(
    module_class: type[RowDataModule], row: dict[str, Any], responses: list[str]
) -> None:
    tokenizer = chat()
    tokenizer.chat_template = STRINGS_ALONE
    batch = batch_of(module_class, row, tokenizer=tokenizer)
    prompts, learnt = (map(tokenizer.decode, batch.ragged(name).to_lists()) for name in ("prompt_ids", "response_ids"))
    assert set(prompts) == {ASKED} and list(learnt) == responses


def test_prompts_and_their_reward_functions_get_the_text_of_parts() -> None:
    begun = [USER, said("assistant", "It", " is")]
    batch = batch_of(PromptDataModule, {"question": begun, "seen": [USER]}, prompt_column="question")
    assert chat().decode(batch.ragged("prompt_ids").values) == f"{ASKED}It is"
    assert batch.objects("prompt")[0] == [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is"}]
    assert batch.objects("seen") == ([USER],)  # other columns are not changed


def test_the_result_of_a_tool_may_be_any_value() -> None:
    tokenizer = chat()
    tokenizer.chat_template = "{{ messages[-1].content | tojson }}"
    for role, result in product(("tool", "ipython", "function"), ({"sum": 2}, [1, 2], [{"sum": 2}])):
        text = conversation_text(tokenizer, [{"role": role, "content": result}], "here", add_generation_prompt=False)
        assert text.text == str(result).replace("'", '"')


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (
            [IMAGE, {"type": "text", "text": "Who?"}],
            "shows an image, and the tokenizer is .* text alone, .*; take a vision",
        ),
        (
            [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "input_audio"}],
            "'image_url', 'input_audio'; correct",
        ),
        (["Who?"], "holds str 'Who[?]'"),
        ([{"type": ["text"], "text": "Who?"}], r"holds dict {'type': \['text'\], 'text': 'Who\?'}"),
        ([{"type": "text", "text": None}], "holds dict {'type': 'text', 'text': None}"),
        (42, "holds int 42"),
    ],
)
def test_content_that_is_no_text_is_refused_by_name(content: Any, named: str) -> None:
    rule = f"row 0 of the data set: (the content of a message must be text, or .* |a message )of role 'user' .*{named}"
    asked = [{"role": "user", "content": content}]
    with pytest.raises(DataError, match=rule):
        batch_of(PromptDataModule, {"prompt": asked})
    with pytest.raises(DataError, match=rule):
        batch_of(SFTDataModule, {"messages": [*asked, GOOD]})
    with pytest.raises(DataError, match=rule.replace("row 0 of the data set", "here")):
        conversation_text(chat(), asked, "here", add_generation_prompt=True)


class _Picture:
    """Stands for an image of PIL, which this package does not need."""


@pytest.mark.parametrize(
    ("column", "value", "reads"),
    [
        ("image", _Picture(), "text alone"),
        ("images", [_Picture()], "text alone"),
        ("image", {"bytes": b"\x89PNG", "path": None}, "text alone"),
        ("images", ["cats/1.jpg"], "text alone"),
        ("image", "https://cats.org/1.webp", "text alone"),
        ("image", "data:image/png;base64,iVBORw0", "text alone"),
        ("videos", ["cat.mp4"], "text and images alone, .*; give videos as tensors, in columns like 'input/"),
        ("audio", b"RIFF", "text and images alone"),
    ],
)
def test_rows_with_images_are_refused(column: str, value: Any, reads: str) -> None:
    rule = f"row 0 of the data set: column '{column}' holds .* reads? {reads}.* rename the column if only"
    with pytest.raises(DataError, match=rule):
        batch_of(PromptDataModule, {"prompt": [USER], column: value})
    with pytest.raises(DataError, match=rule):
        batch_of(SFTDataModule, {"messages": [USER, GOOD], column: value})


def test_columns_of_that_name_without_images_reach_reward_functions() -> None:
    rows = [{"prompt": "a", "image": value} for value in ("a cat on a mat", 3, None, [], {"bytes": None, "path": None})]
    assert batch_of(PromptDataModule, *rows).objects("image") == tuple(row["image"] for row in rows)


def test_a_template_that_knows_parts_alone_renders_texts_as_parts() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}.{% endfor %}"
    )
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me"}]

    text = conversation_text(tokenizer, messages, "row 0", add_generation_prompt=False)

    assert text.text == "user: Who?.assistant: Me."
