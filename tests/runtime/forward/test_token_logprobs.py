"""Values and gradients of chunked log-probabilities equal those of torch's log_softmax."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_realloc.runtime.forward import tiled_logits
from lightning_realloc.runtime.forward.token_logprobs import collision_logprobs, selected_logprobs


def _plain(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_agree_with_the_plain_formula(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    monkeypatch.setattr(tiled_logits, "CHUNK_ELEMENTS", 3 * 11)  # 7 rows in chunks of 3, 3 and 1
    logits = (4 * torch.randn(7, 11, generator=torch.Generator().manual_seed(0))).requires_grad_()
    tokens = torch.arange(7)
    weights, more_weights = torch.linspace(-1, 2, 7), torch.linspace(1, -1, 7)
    expected = _plain(logits, tokens, temperature)
    (expected_gradient,) = torch.autograd.grad((weights * expected[0] + more_weights * expected[1]).sum(), logits)
    actual = selected_logprobs(logits, tokens, temperature=temperature, with_entropy=True)
    assert actual.entropy is not None
    (gradient,) = torch.autograd.grad((weights * actual.logprobs + more_weights * actual.entropy).sum(), logits)
    torch.testing.assert_close(actual.logprobs, expected[0].float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual.entropy, expected[1].float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)


def test_two_equal_logits_give_half_the_probability_each() -> None:
    # z = (0, 0): log p = -ln 2 and the entropy is ln 2; z = (0, -inf): log p = 0, entropy 0
    statistics = selected_logprobs(
        torch.tensor([[0.0, 0.0], [0.0, -math.inf]]), torch.tensor([1, 0]), with_entropy=True
    )
    assert statistics.entropy is not None
    assert statistics.logprobs.tolist() == pytest.approx([-math.log(2), 0.0])
    assert statistics.entropy.tolist() == pytest.approx([math.log(2), 0.0])


def test_half_precision_logits_are_normalised_in_fp32_and_keep_their_gradient_dtype() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    statistics = selected_logprobs(logits, torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(statistics.logprobs, logits.float().log_softmax(-1)[:, 0], atol=1e-5, rtol=0)
    assert statistics.entropy is None
    statistics.logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_collision_logprobs_are_the_log_of_summed_squared_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_logits, "CHUNK_ELEMENTS", 10)  # chunks of two rows and of one
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, -torch.inf], [2.0, 1.0, 0.0, -1.0, 3.0], [90.0, 0.0, 0.0, 0.0, 0.0]])
    expected = (logits / 0.5).softmax(-1).square().sum(-1).log()
    assert torch.allclose(collision_logprobs(logits.requires_grad_(), temperature=0.5), expected, atol=1e-6)
    # With four equally likely tokens, two draws are equal one time in four.
    assert collision_logprobs(logits)[0].exp().item() == pytest.approx(0.25)
    assert not collision_logprobs(logits).requires_grad
