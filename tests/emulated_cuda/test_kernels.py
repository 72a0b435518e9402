"""Attention of the emulated device equals that of torch; what needs the device itself is in test_emulated_cuda.py."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.emulated_cuda.kernels import _as_batch, _as_row, _attended, _causal, _gradients, _sequences


def test_outputs_and_gradients_of_grouped_heads_are_those_of_torch() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, length, 8) for heads, length in ((4, 5), (2, 7), (2, 7)))
    for mask in (None, _causal(query, key), torch.randn(5, 7)):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        expected = scaled_dot_product_attention(*leaves, attn_mask=mask, scale=0.3, enable_gqa=True)
        grad = torch.randn_like(expected)
        torch.testing.assert_close(_attended(query, key, value, mask, 0.3), expected.detach())
        found = _gradients(grad, query, key, value, mask, 0.3)
        torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, grad))


def test_packed_sequences_attend_to_their_own_keys_in_a_window() -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 3, 8])
    rows = [torch.randn(8, 2, 4) for _ in range(3)]
    for window, expected_keys in (
        ({}, lambda row: range(row + 1)),
        ({"window_size_left": 1}, lambda row: [row - 1, row]),
    ):
        for queries, keys, mask in _sequences(ends, ends, True, window):
            assert queries == keys
            output = _as_row(_attended(*(_as_batch(part[queries]) for part in rows), mask, None))
            for row in range(queries.stop - queries.start):
                seen = [queries.start + other for other in expected_keys(row) if other >= 0]
                query, key, value = rows[0][queries.start + row], rows[1][seen], rows[2][seen]
                shares = (torch.einsum("hd,khd->hk", query, key) / 2).softmax(-1)  # heads of 4: divided by 4**0.5
                torch.testing.assert_close(output[row], torch.einsum("hk,khd->hd", shares, value))
