"""RMS norms by torch's fused kernel compute the same, and the model is restored afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_realloc.generation.forward.fused_layers import fused_norms
from tests.models import tiny_model

NORMS = {"llama": 5, "qwen3": 9, "mixtral": 5, "gpt_oss": 5, "gemma2": 0, "gpt2": 0}
"""Family -> norms of a model of two blocks that are fused."""


@pytest.mark.parametrize("family", NORMS)
def test_fused_norms_compute_the_same_and_are_restored(family: str) -> None:
    model, ids = tiny_model(family).eval().requires_grad_(False), torch.arange(7)[None]
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
    expected, state = model(ids).logits, [dict(vars(module)) for module in model.modules()]
    with fused_norms(model) as num_norms:
        torch.testing.assert_close(model(ids).logits, expected)
    assert num_norms == NORMS[family]
    assert [dict(vars(module)) for module in model.modules()] == state


def test_bfloat16_norms_are_as_exact_as_the_models() -> None:
    norm = tiny_model("llama").get_submodule("model.norm").bfloat16().requires_grad_(False)
    norm.weight.copy_(torch.linspace(0.5, 1.5, norm.weight.numel()))
    input = torch.randn(64, norm.weight.numel(), generator=torch.Generator().manual_seed(0)).bfloat16()
    own = norm(input)
    exact = nn.functional.rms_norm(input.double(), norm.weight.shape, norm.weight.double(), norm.variance_epsilon)
    with fused_norms(norm):
        fused = norm(input)
        assert torch.equal(norm(input.float()), type(norm).forward(norm, input.float()))  # weights of another dtype
    assert (fused - exact).abs().mean() <= (own - exact).abs().mean()
    assert fused.dtype is torch.bfloat16


def test_other_norms_are_left_alone() -> None:
    class LikeRMSNorm(nn.Module):
        """Computes something else under a similar name."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-5

        def forward(self, input: Tensor) -> Tensor:
            return input * self.weight

    class WiderRMSNorm(LikeRMSNorm):
        """Takes another argument."""

        def forward(self, input: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
            return input * gate

    replaced = tiny_model("llama").get_submodule("model.norm")
    replaced.forward = replaced.forward
    for module in (LikeRMSNorm(), WiderRMSNorm(), nn.LayerNorm(8), replaced):
        with fused_norms(module) as num_norms:
            assert num_norms == 0
