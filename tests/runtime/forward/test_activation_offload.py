"""Activations that go to the host between the passes give the same gradients, and free the device's memory."""

from __future__ import annotations

import pytest
import torch

from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.runtime.forward.activation_offload import ActivationOffload
from lightning_realloc.runtime.model.training_mode import enable_activation_checkpointing
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from tests.models import tiny_model


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_offloaded_activations_give_the_same_gradients_and_leave_the_device(checkpointing: bool) -> None:
    device = torch.device("cuda", 0)
    model = tiny_model("llama", num_hidden_layers=6).to(device).train()
    if checkpointing:
        enable_activation_checkpointing(model)
    rows = {"prompt_ids": Ragged.from_list([[5, 6]]), "response_ids": Ragged.from_list([list(range(3, 123))])}
    batch = pack(Samples(torch.arange(1), rows)).to(device)
    offload = ActivationOffload(device, min_bytes=4096)

    def run() -> tuple[list[torch.Tensor], int]:
        model.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated(device)
        loss = token_logprobs(model, batch).logprobs.sum()
        held = torch.cuda.memory_allocated(device) - before
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None], held

    expected, held = run()
    with offload.around(model):
        got, held_offloading = run()
    assert offload.num_offloaded >= 6
    assert held_offloading < held / 2
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert "forward" not in vars(model.model)
