"""Attention in blocks of queries equals the plain softmax over all scores, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_realloc.runtime.forward.attention import query_blocks
from lightning_realloc.runtime.forward.attention.query_blocks import ScoreRules, attend_in_blocks

QUERIES, KEYS = 7, 11


def naive(query: Tensor, key: Tensor, value: Tensor, first: int, rules: ScoreRules) -> Tensor:
    """Return the output (B, H, T, D_v) by all scores, and a mask made position by position."""
    groups, reach = query.shape[1] // key.shape[1], rules.sliding_window or KEYS
    key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    scores = 0.3 * query @ key.mT
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    for row, place in torch.cartesian_prod(torch.arange(QUERIES), torch.arange(KEYS)).tolist():
        distance = first + row - place
        if not (0 if rules.is_causal else 1 - reach) <= distance < reach:
            scores[:, :, row, place] = float("-inf")
    if rules.sinks is not None:
        scores = torch.cat([scores, rules.sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., :KEYS] @ value


@pytest.mark.parametrize("block", [3, 16])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scores", ["plain", "sinks", "capped", "capped, to later tokens", "to later tokens"])
def test_values_and_gradients_are_those_of_the_formula(
    scores: str, window: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_blocks, "QUERY_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, QUERIES, 8), (2, 2, KEYS, 8), (2, 2, KEYS, 6), (4,)
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    query, key, value, sinks = leaves
    is_causal = "later" not in scores
    rules = ScoreRules(
        is_causal, 0.3, 0.0, window, sinks if scores == "sinks" else None, 0.5 if "capped" in scores else None
    )
    first = KEYS - QUERIES if is_causal else 2
    actual, expected = (attend(query, key, value, first, rules) for attend in (attend_in_blocks, naive))
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    trained = leaves if scores == "sinks" else leaves[:3]
    ours, theirs = (torch.autograd.grad(output, trained, weights) for output in (actual, expected))
    torch.testing.assert_close(ours, theirs)
