"""Vocabulary-parallel logits on simulated ranks give the log-probabilities, divergences and gradients of whole ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_realloc.runtime.forward import tiled_logits
from lightning_realloc.runtime.forward.divergence import TeacherHead, TeacherTokens, vocabulary_divergence
from lightning_realloc.runtime.forward.tiled_logits import select_rows
from lightning_realloc.runtime.forward.token_logprobs import collision_logprobs, selected_logprobs
from lightning_realloc.runtime.forward.vocab_parallel_logits import VocabParallelLogits, local_logits
from tests.runtime.simulated import SimulatedGroup, run_ranks

NUM_ROWS = 7


def _logits(vocabulary: int) -> Tensor:
    logits = 4 * torch.randn(NUM_ROWS, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[2, : vocabulary // 2] = -torch.inf  # all columns of the first of two ranks
    return logits


def _share(whole: Tensor, group: SimulatedGroup) -> Tensor:
    """Return a leaf with this rank's columns."""
    return whole.narrow(-1, *group.local_slice(whole.shape[-1])).clone().requires_grad_()


def _on_ranks(
    whole: Tensor, size: int, value: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor] = lambda z: z
) -> list[tuple[Tensor, Tensor, int]]:
    """Return for every rank the value, the gradient by its columns, and the number of elements it received."""
    upstream = torch.linspace(-1, 2, NUM_ROWS)

    def on_rank(group: SimulatedGroup) -> tuple[Tensor, Tensor, int]:
        share = _share(whole, group)
        found = value(change(VocabParallelLogits.from_local(share, group, whole.shape[-1])))
        (gradient,) = torch.autograd.grad((found * upstream).sum(), share)
        return found.detach(), gradient, group.num_gathered

    return run_ranks(size, on_rank)


def _agrees(whole: Tensor, size: int, value: Callable[[Tensor], Tensor], **settings: Any) -> int:
    """Compare with whole logits; return how many elements a rank received."""
    ((expected, expected_gradient, _),) = _on_whole(whole, value, **settings)
    answers = _on_ranks(whole, size, value, **settings)
    for found, _, _ in answers:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(found, answers[0][0])  # ranks continue with the same bits
    gradient = torch.cat([gradient for _, gradient, _ in answers], -1)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)
    return answers[0][2]


def _on_whole(
    whole: Tensor, value: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor] = lambda z: z
) -> list[tuple[Tensor, Tensor, int]]:
    leaf = whole.clone().requires_grad_()
    found = value(change(leaf))
    (gradient,) = torch.autograd.grad((found * torch.linspace(-1, 2, NUM_ROWS)).sum(), leaf)
    return [(found.detach(), gradient, 0)]


def _logprobs_and_entropy(vocabulary: int) -> Callable[[Tensor], Tensor]:
    tokens = torch.arange(NUM_ROWS) * 5 % vocabulary
    tokens[2] = vocabulary - 1

    def value(logits: Tensor) -> Tensor:
        statistics = selected_logprobs(logits, tokens, temperature=0.7, with_entropy=True)
        assert statistics.entropy is not None
        return statistics.logprobs + 0.3 * statistics.entropy

    return value


# 11 columns are 6 and 5 on 2 ranks; 9 columns are 3, 3, 3 and 0 on 4 ranks.
@pytest.mark.parametrize(("size", "vocabulary"), [(2, 12), (2, 11), (4, 9), (3, 7)])
@pytest.mark.parametrize("chunk_elements", [1 << 23, 10])
def test_shares_give_the_same_logprobs_entropies_and_gradients_as_whole_logits(
    monkeypatch: pytest.MonkeyPatch, size: int, vocabulary: int, chunk_elements: int
) -> None:
    monkeypatch.setattr(tiled_logits, "CHUNK_ELEMENTS", chunk_elements)
    received = _agrees(_logits(vocabulary), size, _logprobs_and_entropy(vocabulary))
    assert received == 3 * NUM_ROWS * size  # in both directions


def test_shares_give_the_same_collision_logprobs_as_whole_logits() -> None:
    logits = _logits(11)

    def on_rank(group: SimulatedGroup) -> Tensor:
        return collision_logprobs(VocabParallelLogits.from_local(_share(logits, group), group, 11), temperature=0.5)

    expected = collision_logprobs(logits, temperature=0.5)
    for found in run_ranks(3, on_rank):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
@pytest.mark.parametrize(("student", "teacher"), [(11, 11), (11, 5), (9, 12)])  # columns: a rank may share none of them
def test_shares_give_the_same_divergences_as_whole_logits(divergence: Any, student: int, teacher: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits, states = torch.randn(NUM_ROWS, student, generator=generator), torch.randn(NUM_ROWS, 4, generator=generator)
    weight, bias = torch.randn(teacher, 4, generator=generator), torch.randn(teacher, generator=generator)

    def value(z: Tensor) -> Tensor:
        tokens = TeacherTokens(states, TeacherHead(weight, bias))
        return vocabulary_divergence(z, tokens, divergence=divergence, mix=0.3, temperature=0.7)

    # Two normalisers and two terms per row.
    assert _agrees(logits, 4, value) == 4 * NUM_ROWS * 4


def test_half_precision_shares_are_normalised_in_fp32_and_keep_their_gradient_dtype() -> None:
    logits = _logits(300).bfloat16()
    value = _logprobs_and_entropy(300)
    ((expected, expected_gradient, _),) = _on_whole(logits, value)
    answers = _on_ranks(logits, 2, value)
    torch.testing.assert_close(answers[1][0], expected, atol=1e-5, rtol=1e-5)
    gradient = torch.cat([gradient for _, gradient, _ in answers], -1)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=0.01)  # 8 bits


def _soft_cap(logits: Tensor) -> Tensor:
    return torch.tanh(logits.float() / 3.0) * torch.tensor(3.0) + logits


@pytest.mark.parametrize("size", [2, 3])
def test_elementwise_changes_keep_logits_in_shares(size: int) -> None:
    logits = _logits(11).clamp(min=-9.0)
    assert _agrees(logits, size, _logprobs_and_entropy(11), change=_soft_cap) == 3 * NUM_ROWS * size


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z.log_softmax(-1),
        lambda z: z.index_fill(-1, torch.tensor([3, 8]), -9.0),
        lambda z: z + torch.linspace(0, 1, 11),
        lambda z: z[:, :11],
        lambda z: torch.where(z > z.mean(-1, keepdim=True), z, z / 2),
    ],
)
def test_changes_across_logits_gather_all_of_them(change: Callable[[Tensor], Tensor]) -> None:
    logits = _logits(11).clamp(min=-9.0)
    received = _agrees(logits, 2, _logprobs_and_entropy(11), change=change)
    assert received >= 2 * NUM_ROWS * 6  # padded shares of 6 columns, joined


def test_writes_into_shares_change_the_whole_logits() -> None:
    logits, changed = _logits(11), _logits(11)

    def on_rank(group: SimulatedGroup) -> Tensor:
        with torch.no_grad():
            shared = VocabParallelLogits.from_local(_share(logits, group), group, 11) * 1.0
            shared[:, 8] = -9.0
            shared[1].mul_(0.5)
            return selected_logprobs(shared, torch.full((NUM_ROWS,), 8)).logprobs

    changed[:, 8] = -9.0
    changed[1].mul_(0.5)
    expected = selected_logprobs(changed, torch.full((NUM_ROWS,), 8)).logprobs
    for found in run_ranks(2, on_rank):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_shares_have_the_shape_of_all_logits_without_a_gather() -> None:
    logits = _logits(11)

    def on_rank(group: SimulatedGroup) -> int:
        shared = VocabParallelLogits.from_local(_share(logits, group)[None], group, 11)
        assert shared.shape == (1, NUM_ROWS, 11) and shared.ndim == 3 and shared.requires_grad
        assert shared.dtype == torch.float32 and "V=11" in repr(shared)
        rows = select_rows(select_rows(shared, 0), torch.tensor([4, 2]))
        assert rows.shape == (2, 11)
        values, share = local_logits(rows)
        assert share is not None and share.num_tokens == 11
        start, length = group.local_slice(11)
        assert torch.equal(values, logits[[4, 2], start : start + length])
        return group.num_gathered

    assert run_ranks(2, on_rank) == [0, 0]


def test_a_row_with_one_finite_logit_has_entropy_zero_on_all_ranks() -> None:
    # z = (-inf, -inf, 0, -inf): log p of the third is 0 and the entropy 0; two draws are always equal
    logits = torch.tensor([[-math.inf, -math.inf, 0.0, -math.inf]])

    def on_rank(group: SimulatedGroup) -> list[float]:
        shared = VocabParallelLogits.from_local(_share(logits, group), group, 4)
        found = selected_logprobs(shared, torch.tensor([2]), with_entropy=True)
        assert found.entropy is not None
        return [found.logprobs.item(), found.entropy.item(), collision_logprobs(shared).item()]

    assert run_ranks(2, on_rank) == [[0.0, 0.0, 0.0]] * 2
