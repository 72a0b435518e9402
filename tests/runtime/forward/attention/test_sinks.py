"""Attention with sinks equals the plain softmax over one more score, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_realloc.runtime.forward.attention.sinks import AttendWithSinks, attend_with_sinks


def naive(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor, scaling: float) -> Tensor:
    """Return the output (B, H, T, D_v): each query's softmax over its keys and its head's sink."""
    groups = query.shape[1] // key.shape[1]
    scores = scaling * query @ key.repeat_interleave(groups, 1).mT + mask
    whole = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return whole.softmax(-1)[..., :-1] @ value.repeat_interleave(groups, 1)


def inputs(*, queries: int, keys: int, heads: int = 4, groups: int = 2, value_dim: int = 6) -> list[Tensor]:
    """Return queries, keys, values and sinks in double precision."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, queries, 8), (2, groups, keys, 8), (2, groups, keys, value_dim), (heads,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


CAUSAL = torch.full((5, 5), float("-inf"), dtype=torch.float64).triu(1)
WINDOW = CAUSAL + torch.full_like(CAUSAL, float("-inf")).tril(-2)
EARLIER = torch.full_like(CAUSAL, float("-inf")).triu()
MASKS = {
    "causal": (5, None, CAUSAL),
    "window": (5, WINDOW, WINDOW),
    "boolean": (5, WINDOW == 0, WINDOW),
    "none": (7, None, torch.zeros(5, 7, dtype=torch.float64)),
    "a query without keys": (5, EARLIER, EARLIER),
}


@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients_are_those_of_the_formula(name: str) -> None:
    keys, mask, added = MASKS[name]
    query, key, value, sinks = leaves = inputs(queries=5, keys=keys)
    actual = attend_with_sinks(query, key, value, mask, sinks, is_causal=name == "causal", scaling=0.3)
    expected = naive(query, key, value, added, sinks, 0.3)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(output, leaves, weights) for output in (actual, expected))
    torch.testing.assert_close(ours, theirs)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, scale: float, **window: int) -> tuple[Tensor, ...]:
    """Return output (N, H, D) and log-sum-exp (H, N) of one sequence, as flash kernels do."""
    scores = scale * torch.einsum("nhd,mhd->hnm", q, k) + _hidden(len(q), window["window_size_left"])
    empty = q.new_empty(0)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v), scores.logsumexp(-1), empty, empty, empty


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, sums: Tensor, *_: Any, scale: float, **window: int
) -> tuple[Tensor, ...]:
    """Return gradients from the saved output and log-sum-exp. Source: Dao, arXiv:2307.08691, algorithm 2."""
    scores = scale * torch.einsum("nhd,mhd->hnm", q, k) + _hidden(len(q), window["window_size_left"])
    weights = (scores - sums[..., None]).exp()
    by_weight = torch.einsum("nhd,mhd->hnm", grad, v) - (grad * output).sum(-1).T[..., None]
    by_score = scale * weights * by_weight
    return (
        torch.einsum("hnm,mhd->nhd", by_score, k), torch.einsum("hnm,nhd->mhd", by_score, q),
        torch.einsum("hnm,nhd->mhd", weights, grad),
    )  # fmt: skip


def _hidden(size: int, seen: int) -> Tensor:
    hidden = torch.full((size, size), float("-inf"))
    return hidden.triu(1) if seen < 0 else hidden.triu(1) + hidden.tril(-seen - 1)


@pytest.mark.parametrize("seen", [-1, 1])
def test_kernels_without_sinks_give_values_and_gradients_of_those_with(seen: int) -> None:
    query, key, value, sinks = (part.detach().float() for part in inputs(queries=5, keys=5, groups=4, value_dim=8))
    rows = [part[0].transpose(0, 1) for part in (query, key, value)]
    leaves = [part.clone().requires_grad_() for part in (*rows, sinks)]
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", _flash_forward, "CPU")
        library.impl("_flash_attention_backward", _flash_backward, "CPU")
        ends = torch.tensor([0, 5])
        actual = AttendWithSinks.apply(*leaves, (ends, ends, 5, 5), 0.3, seen)
        weights = torch.randn_like(actual)
        ours = torch.autograd.grad(actual, leaves, weights)
    q, k, v = (part.transpose(0, 1)[None] for part in leaves[:3])
    expected = naive(q, k, v, _hidden(5, seen), leaves[3], 0.3)[0].transpose(0, 1)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaves, weights))
