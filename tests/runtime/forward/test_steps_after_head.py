"""Steps found without weights turn the product of a head into the model's own logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.divergence import steps_after_head
from tests.models import tiny_model
from tests.runtime.forward.test_tiled_logits import Clamped, a_model

FOLLOWED: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "mixtral": (0, {}),
    "gemma2": (3, {"final_logit_softcapping": 0.5}),
    "cohere": (1, {"logit_scale": 0.3}),
    "granite": (1, {"logits_scaling": 3.0}),
    "opt": (1, {"word_embed_proj_dim": 64, "ffn_dim": 128, "dropout": 0.0}),
}
"""Family -> number of steps after its head, and settings."""


@pytest.mark.parametrize("family", FOLLOWED)
def test_heads_and_their_steps_give_the_logits_of_the_model(family: str) -> None:
    number, settings = FOLLOWED[family]
    model, ids = a_model(family, **settings), torch.tensor([[5, 6, 7, 8]])
    read: list[torch.Tensor] = []
    head = model.get_output_embeddings()
    with torch.no_grad():
        handle = head.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0]))
        expected = model(ids).logits
        handle.remove()
        made = head(read[0])
        steps = steps_after_head(model.to("meta"))
        assert len(steps) == number
        for step in steps:
            made = step(made)
    assert torch.equal(made, expected)


def test_models_whose_logits_follow_otherwise_are_refused() -> None:
    clamped, headless = tiny_model("llama"), tiny_model("llama")
    clamped.__class__ = Clamped
    headless.lm_head = nn.Sequential(headless.lm_head)
    scorer = AutoModelForSequenceClassification.from_config(tiny_model("llama").config)
    for model in (clamped, headless, scorer):
        with pytest.raises(ConfigError, match=rf"{type(model).__name__} does not compute its logits as .*'sampled'"):
            steps_after_head(model)
