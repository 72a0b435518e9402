"""Tiny model that calls the tool ``add`` in every turn, for tests of command lines."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.environments.turns.chat_families import tokenizer_of
from tests.models import tiny_model

WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
"""The model's turn."""


def calling_model(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a model that writes a call, as a single token, after every line break, and ends the turn after it."""
    tokenizer = copy.deepcopy(tokenizer_of(family))
    tokenizer.add_tokens([WRITTEN])
    line_break, written, end = (ids[0] for ids in tokenizer(["\n", WRITTEN, "<|im_end|>"])["input_ids"])
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=4096, eos_token_id=end)
    with torch.no_grad():
        for layer in model.model.layers:  # only the last token decides
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for last, following in ((line_break, written), (written, end)):
            model.lm_head.weight[following] = 100 * model.model.embed_tokens.weight[last]
    return model, tokenizer
