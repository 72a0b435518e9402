"""Tiny models and the byte tokenizer have the properties that other tests rely on."""

from __future__ import annotations

import pytest
import torch

from tests.models import FAMILIES, TENSOR_PARALLEL_FAMILIES, TIED_FAMILIES, byte_tokenizer, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_properties_that_tests_rely_on(family: str) -> None:
    model = tiny_model(family)
    tokens = torch.arange(1, 13).view(2, 6)

    logits = model(tokens).logits

    assert logits.shape == (2, 6, 128)
    assert torch.isfinite(logits).all()
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (family in TIED_FAMILIES)
    assert bool(model.tp_plan) == (family in TENSOR_PARALLEL_FAMILIES)
    assert torch.equal(tiny_model(family)(tokens).logits, logits)
    assert not torch.equal(tiny_model(family, seed=1)(tokens).logits, logits)


def test_overrides_reach_the_config() -> None:
    assert tiny_model("llama", num_hidden_layers=1, vocab_size=259).config.vocab_size == 259


def test_the_byte_tokenizer_restores_a_string_from_one_token_per_byte() -> None:
    tokenizer = byte_tokenizer()
    text = "2 + 3 = 5\n  don't — 你好"

    ids = tokenizer.encode(text, add_special_tokens=False)

    assert len(tokenizer) == 259
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
