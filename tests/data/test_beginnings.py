"""Leading special tokens appear once in every data module, even if the text contains them already."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.demonstrations import SFTDataModule
from lightning_realloc.data.feedback import BinaryFeedbackDataModule
from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.data.steps import StepDataModule
from tests.data.test_preferences import batch_of
from tests.data.test_prompts import CHAT_TEMPLATE
from tests.models import byte_tokenizer

ASK = [{"role": "user", "content": "1+1"}]
LAID_OUT = "<bos>u:1+1<eos>\na:"


def opening(single: str = "<bos> $A") -> Any:
    """Return a tokenizer whose texts and conversations both begin with <bos>."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>", "<pad>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


ROWS: list[tuple[type[RowDataModule], dict[str, Any]]] = [
    (PromptDataModule, {}),
    (SFTDataModule, {"completion": "2"}),
    (PreferenceDataModule, {"chosen": "2", "rejected": "3"}),
    (BinaryFeedbackDataModule, {"completion": "2", "label": True}),
    (StepDataModule, {"completions": ["2"], "labels": [True]}),
]


@pytest.mark.parametrize(("module_class", "others"), ROWS)
def test_prompts_in_every_form_have_one_bos(module_class: type[RowDataModule], others: dict[str, Any]) -> None:
    tokenizer = opening()
    assert tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True) == LAID_OUT
    rows = [{"prompt": prompt, **others} for prompt in (LAID_OUT, LAID_OUT.removeprefix("<bos>"), ASK)]
    prompts = batch_of(module_class, *rows, tokenizer=tokenizer).ragged("prompt_ids").to_lists()
    assert {tokenizer.decode(ids) for ids in prompts} == {LAID_OUT}


def test_whole_texts_and_sides_without_a_prompt_have_one_bos() -> None:
    tokenizer = opening()
    whole = tokenizer.apply_chat_template([*ASK, {"role": "assistant", "content": "2"}], tokenize=False)
    for text in (whole, whole.removeprefix("<bos>")):
        batch = batch_of(SFTDataModule, {"text": text}, tokenizer=tokenizer)
        learnt = tokenizer.decode(batch.ragged("response_ids").values)
        assert learnt.startswith(whole) and learnt.count("<bos>") == 1
    sides = {"chosen": whole, "rejected": whole.replace("2", "3")}
    batch = batch_of(PreferenceDataModule, sides, tokenizer=tokenizer)
    assert [tokenizer.decode(ids) for ids in batch.ragged("prompt_ids").to_lists()] == [LAID_OUT] * 2


def test_several_leading_tokens_are_left_out_only_if_the_text_has_all_of_them() -> None:
    tokenizer = opening("<pad> <bos> $A <eos>")
    rows = [{"prompt": text} for text in ("a", "<pad><bos>a", "<bos>a", "<pad><bos><bos>a")]
    prompts = batch_of(PromptDataModule, *rows, tokenizer=tokenizer).ragged("prompt_ids").to_lists()
    expected = ["<pad><bos>a", "<pad><bos>a", "<pad><bos><bos>a", "<pad><bos><bos>a"]
    assert [tokenizer.decode(ids) for ids in prompts] == expected
