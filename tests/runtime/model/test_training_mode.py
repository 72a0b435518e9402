"""Activation checkpointing gives the same gradients, and dropout stays off unless it is requested."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_realloc.errors import PlanError
from lightning_realloc.runtime.model.training_mode import enable_activation_checkpointing, set_training_mode
from tests.models import tiny_model


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    ids = torch.arange(2, 14)[None]
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputing_activations_changes_no_gradient_and_starts_no_dropout(family: str) -> None:
    model = tiny_model(family)
    set_training_mode(model, dropout=False)
    expected = _gradients(model)
    calls = _count_block_calls(model)

    enable_activation_checkpointing(model)
    set_training_mode(model, dropout=False)
    recomputed = _gradients(model)

    assert len(calls) == 2 * 2  # two blocks, each run forward and once more in the backward pass
    assert not any(module.training for module in model.modules() if isinstance(module, nn.Dropout))
    for ours, theirs in zip(recomputed, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout_is_active_on_request() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5)
    set_training_mode(model, dropout=True)
    first, second = _gradients(model), _gradients(model)
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_model_that_cannot_recompute_is_refused() -> None:
    with pytest.raises(PlanError, match="gradient_checkpointing: Linear does not support it"):
        enable_activation_checkpointing(nn.Linear(2, 2))


def _count_block_calls(model: nn.Module) -> list[int]:
    """Return a list that grows with every run of a block's feed-forward layer, recomputed ones included."""
    calls: list[int] = []
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls
