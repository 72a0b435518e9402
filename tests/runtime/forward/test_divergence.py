"""Divergences over the vocabulary, computed in chunks, equal autograd through the plain formula."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.runtime.forward import tiled_logits
from lightning_realloc.runtime.forward.divergence import TeacherHead, TeacherTokens, vocabulary_divergence
from lightning_realloc.runtime.parallel.packed_forward import packed_logits, predicting_states
from tests.models import tiny_model


def plain(student: Tensor, teacher: Tensor, divergence: str, mix: float) -> Tensor:
    """Return the divergences of rows of logits by their definitions, in float64."""
    s, t = (logits.double().softmax(-1) for logits in (student, teacher))
    if divergence == "forward_kl":
        return (t * (t / s).log()).sum(-1)
    if divergence == "reverse_kl":
        return (s * (s / t).log()).sum(-1)
    m = mix * t + (1 - mix) * s
    return mix * (t * (t / m).log()).sum(-1) + (1 - mix) * (s * (s / m).log()).sum(-1)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_elements", [1 << 23, 40])
def test_values_and_gradients_equal_those_of_the_definition(
    divergence: Any, with_bias: bool, chunk_elements: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 19, generator=generator, requires_grad=True)
    states, weight = torch.randn(7, 5, generator=generator), torch.randn(19, 5, generator=generator)
    bias = torch.randn(19, generator=generator) if with_bias else None
    upstream = torch.randn(7, generator=generator)
    with mock.patch.object(tiled_logits, "CHUNK_ELEMENTS", chunk_elements):
        found = vocabulary_divergence(
            logits, TeacherTokens(states, TeacherHead(weight, bias)), divergence=divergence, mix=0.3, temperature=0.7
        )
        (gradient,) = torch.autograd.grad(found @ upstream, logits)
    again = logits.detach().clone().requires_grad_()
    teacher = torch.nn.functional.linear(states, weight, bias)
    expected = plain(again / 0.7, teacher / 0.7, divergence, 0.3)
    (slope,) = torch.autograd.grad((expected * upstream).sum(), again)
    assert torch.allclose(found.double(), expected, atol=1e-5)
    assert torch.allclose(gradient, slope, atol=1e-5)


def test_equal_distributions_have_no_divergence_and_no_gradient() -> None:
    generator = torch.Generator().manual_seed(2)
    states, weight = torch.randn(3, 4, generator=generator), torch.randn(9, 4, generator=generator)
    logits = (states @ weight.T + 1.0).requires_grad_()
    for divergence in ("forward_kl", "reverse_kl", "js"):
        found = vocabulary_divergence(logits, TeacherTokens(states, TeacherHead(weight)), divergence=divergence)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        assert found.abs().max() < 1e-6 and gradient.abs().max() < 1e-6


@pytest.mark.parametrize("longer", ["student", "teacher"])
def test_padding_of_one_vocabulary_is_left_out(longer: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits, states, weight = (torch.randn(*size, generator=generator) for size in ((2, 9), (2, 4), (9, 4)))
    ours, head = (logits[:, :6], weight) if longer == "teacher" else (logits, weight[:6])
    ours = ours.clone().requires_grad_()
    found = vocabulary_divergence(ours, TeacherTokens(states, TeacherHead(head)), divergence="reverse_kl")
    expected = plain(logits[:, :6], states @ weight[:6].T, "reverse_kl", 0.5)
    assert torch.allclose(found.double(), expected, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), ours)
    assert gradient.shape == ours.shape and not gradient[:, 6:].any()


def test_a_device_holds_the_columns_of_a_head_that_were_selected_last() -> None:
    weight, bias = torch.arange(12.0).view(6, 2), torch.arange(6.0)
    head, device = TeacherHead(weight, bias), torch.empty(0, device="meta")
    for columns, num in ((slice(0, 3), 3), (slice(3, 6), 3), (slice(0, 6), 6), (slice(6, 6), 0)):
        there = head.select(columns, device)
        assert all(part is not None and part.device.type == "meta" and len(part) == num for part in there)
        assert head.select(columns, device) == there
        for part, whole in zip(head.select(columns, weight), (weight, bias), strict=True):
            assert part is not None and torch.equal(part, whole[columns])
            assert not num or part.data_ptr() == whole[columns].data_ptr()  # the host needs no second copy
    half, _ = head.select(slice(1, 2), weight.bfloat16())
    assert half.dtype == torch.bfloat16 and half.tolist() == [[2.0, 3.0]]
    assert head.num_tokens == 6


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_a_head_computes_the_logits_from_the_predicting_states(family: str, share_prompts: bool) -> None:
    model = tiny_model(family)
    columns = {
        "prompt_ids": Ragged.from_list([[5, 6, 7], [5, 6, 7], [8]]),
        "response_ids": Ragged.from_list([[11, 12], [13, 14, 15], [16]]),
    }
    packed = pack(Samples(torch.arange(3), columns), share_prompts=share_prompts)
    with torch.no_grad():
        states, logits = predicting_states(model, packed), packed_logits(model, packed)
        made = model.get_output_embeddings()(states)
    mask = packed.response_mask
    assert torch.allclose(made[mask], logits[packed.predecessors[mask]], atol=1e-5)
    assert not states[0].any()
