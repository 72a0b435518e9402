"""Blocks under torch.compile give equal losses and gradients, with one program for all lengths."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_realloc.batch.training import TrainOptions, pack_columns
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.attention.packed_attention import install_packed_attention
from lightning_realloc.runtime.model.training_mode import enable_activation_checkpointing, set_training_mode
from lightning_realloc.runtime.parallel.compiled import compiled_blocks
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from tests.matrices import matrix
from tests.models import tiny_model
from tests.strategies.runs import Batches

BACKEND = "aot_eager"  # traces forward and backward as inductor does, without its minute of C++ compilation


def loss_and_gradients(model: Any, batch: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the mean log-probability of a pack's responses, and its gradients."""
    model.zero_grad()
    loss = token_logprobs(model, batch, only_responses=True).logprobs.mean()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:compile='(aot_)?eager' has no effect")
@pytest.mark.parametrize(
    ("backend", "num_blocks", "recomputes"),
    # "eager" traces the forward pass alone, in a third of the time.
    matrix(product(["eager", BACKEND], [1, 2], [False, True]), ("eager", 1, False), ("eager", 1, True)),
)
def test_losses_and_gradients_are_equal_and_one_program_serves_all_lengths(
    backend: str, num_blocks: int, recomputes: bool
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model("qwen3", num_hidden_layers=num_blocks)
    if recomputes:
        enable_activation_checkpointing(model)
    set_training_mode(model, dropout=False)
    packs = [
        pack_columns(batch, torch.device("cpu"), share_prompts=shared)
        for batch in Batches(3, responses=True) for shared in (False, True)
    ]  # fmt: skip
    plain = [loss_and_gradients(model, batch) for batch in packs]
    programs = []
    for batch, (loss, gradients) in zip(packs, plain, strict=True):
        with compiled_blocks(model, backend):
            ours, our_gradients = loss_and_gradients(model, batch)
        programs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert ours == pytest.approx(loss, abs=1e-6)
        for name, gradient in gradients.items():
            assert torch.allclose(our_gradients[name], gradient, atol=1e-6), name
    assert programs[0] == programs[-1], f"programs after each pack: {programs}"
    assert (programs[0] == 0) == recomputes
    assert not any("forward" in vars(module) for module in model.modules())


def test_blocks_that_recompute_activations_are_said_to_stay_uncompiled_in_training_alone() -> None:
    model = tiny_model("qwen3", num_hidden_layers=1)
    install_packed_attention(model)
    enable_activation_checkpointing(model)
    with warnings.catch_warnings(action="error"), compiled_blocks(model, BACKEND):  # as in generation
        assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["model.layers.0"]
    set_training_mode(model, dropout=False)
    ignored = "'aot_eager' has no effect where activations are recomputed; leave out"
    with pytest.warns(UserWarning, match=ignored), compiled_blocks(model, BACKEND):
        assert not any("forward" in vars(module) for module in model.modules())


def test_unknown_backends_and_models_without_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile='inducktor' must be a backend of torch\.compile: .*inductor"):
        TrainOptions(compile="inducktor")
    with (
        pytest.raises(ConfigError, match="and Linear has none"),
        compiled_blocks(nn.Linear(1, 1), BACKEND),
    ):
        pass
