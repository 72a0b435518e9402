from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from lightning_realloc.runtime.forward.deferred_weights import DeferredWeights
from lightning_realloc.runtime.model.training_mode import enable_activation_checkpointing, set_training_mode
from lightning_realloc.runtime.parallel.tensor_parallel import local_products
from tests.models import tiny_model
from tests.runtime.reference import with_lora

ROWS = [torch.arange(number, number + 12).view(2, 6) for number in (3, 20, 40)]


def _model(*, checkpointing: bool = False, lora_modules: Sequence[str] = ()) -> nn.Module:
    model: nn.Module = tiny_model("qwen2")
    if checkpointing:
        enable_activation_checkpointing(model)
    model = with_lora(model, tuple(lora_modules))
    set_training_mode(model, dropout=False)
    return model


def _loss(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        return model(input_ids=ids, use_cache=False).logits.float().square().mean()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora_modules", [(), ("q_proj", "down_proj")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_computed_later_are_those_of_a_backward_pass(
    checkpointing: bool, lora_modules: Sequence[str], dtype: torch.dtype
) -> None:
    whole, model = (_model(checkpointing=checkpointing, lora_modules=lora_modules) for _ in range(2))
    for ids in ROWS:
        _loss(whole, ids, dtype).backward()

    deferred, layers = DeferredWeights(), local_products(model)
    with deferred.leaving_out(layers):
        losses = [_loss(model, ids, dtype) for ids in ROWS]
        for loss in losses:
            deferred.begin_backward()
            loss.backward()
    trained = [layer.weight for layer in layers if layer.weight.requires_grad]
    assert len(trained) == (14 if not lora_modules else 2 * 2 * 2)
    assert all(weight.grad is None for weight in trained)
    for _ in ROWS:
        deferred.compute_oldest()

    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(name).grad, parameter.grad, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert not any("forward" in vars(module) for module in model.modules())
