"""Prompt and response are encoded as one text: tokenizers that add a space to a text, or join characters of both."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.demonstrations import SFTDataModule
from lightning_realloc.data.feedback import BinaryFeedbackDataModule
from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.data.steps import StepDataModule
from lightning_realloc.errors import DataError
from tests.data.test_preferences import batch_of
from tests.data.test_prompts import CHAT_TEMPLATE

_CHARACTERS = "abeinrstuw0123456789:\n<>/_"


def space_adding() -> PreTrainedTokenizerBase:
    """Return a tokenizer that puts a space before every text, like SentencePiece's with a dummy prefix."""
    tokenizer = _of_characters("\u2581", [])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def joining() -> PreTrainedTokenizerBase:
    """Return a tokenizer with a token for a space and the digit after it, and one for two line breaks."""
    tokenizer = _of_characters(" ", [(" ", "4"), (" ", "5"), ("\n", "\n")])
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _of_characters(space: str, merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    tokens = ["<eos>", *_CHARACTERS, space, *("".join(pair) for pair in merges)]
    model = BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


PROMPT = "answer: "
ROWS: list[tuple[type[RowDataModule], dict[str, Any], list[str]]] = [
    (SFTDataModule, {"completion": "46"}, ["46"]),
    (PreferenceDataModule, {"chosen": "46", "rejected": "57"}, ["46", "57"]),
    (BinaryFeedbackDataModule, {"completion": "46", "label": True}, ["46"]),
    (StepDataModule, {"completions": ["46", "57"], "labels": [True, False]}, ["46\n57\n"]),
]


@pytest.mark.parametrize("tokenizer", [space_adding(), joining()], ids=["adds a space", "joins"])
@pytest.mark.parametrize(("module_class", "others", "responses"), ROWS)
def test_samples_hold_the_tokens_of_the_whole_text(
    module_class: type[RowDataModule],
    others: dict[str, Any],
    responses: list[str],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    batch = batch_of(module_class, {"prompt": PROMPT, **others}, tokenizer=tokenizer)
    prompts, learnt = (batch.ragged(name).to_lists() for name in ("prompt_ids", "response_ids"))
    end = [] if module_class is StepDataModule else [tokenizer.eos_token_id]
    for prompt, response, text in zip(prompts, learnt, responses, strict=True):
        assert prompt + response == [*tokenizer(PROMPT + text)["input_ids"], *end]
        assert text in tokenizer.decode(response)


def test_a_token_of_prompt_and_response_is_learnt() -> None:
    tokenizer = joining()
    batch = batch_of(SFTDataModule, {"prompt": PROMPT, "completion": "46"}, tokenizer=tokenizer)
    parts = [tokenizer.decode(batch.ragged(name).values) for name in ("prompt_ids", "response_ids")]
    assert parts == ["answer:", " 46<eos>"]


def test_both_sides_of_a_pair_have_one_prompt_where_one_of_them_joins_its_end() -> None:
    tokenizer = joining()
    row = {"prompt": PROMPT, "chosen": "46", "rejected": "67"}  # " 4" is one token, " 6" is two
    batch = batch_of(PreferenceDataModule, row, tokenizer=tokenizer)
    assert [tokenizer.decode(ids) for ids in batch.ragged("prompt_ids").to_lists()] == ["answer:"] * 2
    assert [tokenizer.decode(ids) for ids in batch.ragged("response_ids").to_lists()] == [" 46<eos>", " 67<eos>"]


def test_an_answer_may_begin_with_what_the_template_ends_with() -> None:
    tokenizer = joining()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}\n{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}a\n{% endif %}"
    )
    talk = [
        {"role": "user", "content": "1"}, {"role": "assistant", "content": "\n2"},
        {"role": "user", "content": "3"}, {"role": "assistant", "content": "\n4"},
    ]  # fmt: skip
    for learn, prompt, response in (("all", "u\n1a", "\n\n2<eos>u\n3a\n\n4<eos>"), ("last", None, "\n\n4<eos>")):
        batch = batch_of(SFTDataModule, {"messages": talk}, tokenizer=tokenizer, learn=learn)
        parts = [tokenizer.decode(batch.ragged(name).values) for name in ("prompt_ids", "response_ids")]
        assert parts == [prompt or "u\n1a\n\n2<eos>u\n3a", response]


def test_a_prompt_that_is_joined_as_a_whole_is_refused() -> None:
    with pytest.raises(DataError, match="row 0 of the data set: the tokenizer joins the whole prompt with the start"):
        batch_of(SFTDataModule, {"prompt": " ", "completion": "46"}, tokenizer=joining())
