"""Samples as rows: their columns, names that collide, and numbers that are not finite."""

from __future__ import annotations

import math

import torch

from lightning_realloc.algorithms.base.rollout_columns import sample_rows
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from tests.models import byte_tokenizer


def test_a_row_holds_texts_finish_reasons_and_columns_of_the_data() -> None:
    tokenizer = byte_tokenizer()
    responses = [[*tokenizer.encode("two"), tokenizer.eos_token_id], tokenizer.encode("é")]
    samples = Samples(
        torch.tensor([4, 7]),
        {
            "answer": (2, None),
            "reward": ("the data's own", "too"),
            "prompt": ("1 + 1", [{"role": "user", "content": "e?"}]),
            "response_ids": Ragged.from_list(responses),
            "rewards": torch.tensor([0.5, math.nan]),
            "finish_reason": torch.tensor([0, 1]),
            "hidden": torch.zeros(2, 3),
        },
    )
    first, second = sample_rows(samples, tokenizer)
    assert list(first) == [
        "prompt", "response", "num_response_tokens", "reward", "finish_reason", "answer", "data.reward"
    ]  # fmt: skip
    # three letters of one byte each and the end token; a letter of two bytes
    assert list(first.values()) == ["1 + 1", "two", 4, 0.5, "stop", 2, "the data's own"]
    assert list(second.values()) == [
        [{"role": "user", "content": "e?"}], "é", 2, None, "length", None, "too"
    ]  # fmt: skip


def test_samples_without_responses_have_rows_too() -> None:
    samples = Samples(torch.arange(2), {"prompt": ("a", "b"), "losses": torch.tensor([1.0, 2.0])})
    assert sample_rows(samples, byte_tokenizer()) == [{"prompt": "a", "losses": 1.0}, {"prompt": "b", "losses": 2.0}]
