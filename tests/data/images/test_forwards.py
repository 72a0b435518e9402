"""Conversations with images, packed from rows, have the results of transformers' padded batch of its processor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ProcessorMixin

from lightning_realloc import SFTDataModule
from lightning_realloc.batch.packing import pack
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from tests.data.images.test_rows import drawn, table, user
from tests.vision_models import tiny_vision_model
from tests.vision_processors import PROCESSED_FAMILIES, tiny_processor

SHOWN = {"type": "image"}


def answer(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


ROWS: list[dict[str, Any]] = [
    {"messages": user("a") + answer("bc"), "images": []},
    {"messages": user(SHOWN, "a?") + answer("red"), "images": [drawn(1)]},
    {
        "messages": user(SHOWN, SHOWN, "a") + answer("blue") + user("b", SHOWN) + answer("c"),
        "images": [drawn(0), drawn(2), drawn(1)],
    },
]
"""Conversations with none, one and three images of other sizes, one of them after the first answer."""


@pytest.mark.parametrize("family", PROCESSED_FAMILIES)
def test_conversations_with_images_equal_the_padded_batch_of_transformers(family: str) -> None:
    processor, model, reference = tiny_processor(family), tiny_vision_model(family), tiny_vision_model(family)
    samples = table(SFTDataModule(ROWS, batch_size=3, tokenizer=processor))
    packed = pack(samples)

    found = packed.responses(token_logprobs(model, packed, only_responses=True).logprobs).values

    texts = [
        ProcessorMixin.apply_chat_template(processor, row["messages"], tokenize=False, processor_kwargs={})
        for row in ROWS
    ]
    padded = processor(
        text=texts, images=[row["images"] for row in ROWS], padding=True, padding_side="right", return_tensors="pt"
    )
    if family == "gemma3":  # answers are not part of images
        padded["token_type_ids"] = (padded["input_ids"] == processor.tokenizer.image_token_id).int()
    logprobs = reference(**padded, use_cache=False).logits[:, :-1].log_softmax(-1)
    expected = []
    for row, (prompt, response) in enumerate(
        zip(samples.ragged("prompt_ids").to_lists(), samples.ragged("response_ids").to_lists(), strict=True)
    ):
        ids = padded["input_ids"][row, : len(prompt) + len(response)]
        assert ids.tolist() == prompt + response
        of_tokens = logprobs[row, : len(ids) - 1].gather(1, ids[1:, None])[:, 0]
        expected.append(of_tokens[len(prompt) - 1 :])
    learnt = torch.cat([mask for mask in samples.ragged("model_mask").split()])
    torch.testing.assert_close(found[learnt], torch.cat(expected)[learnt], atol=1e-5, rtol=1e-5)
    found[learnt].sum().backward()
    torch.cat(expected)[learnt].sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        expected_grad = torch.zeros_like(mine) if theirs.grad is None else theirs.grad
        largest = float(expected_grad.abs().max())
        assert mine.grad is not None, name
        assert float((mine.grad - expected_grad).abs().max()) <= 1e-5 * max(1.0, largest), name
