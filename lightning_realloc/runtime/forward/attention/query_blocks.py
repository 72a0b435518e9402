"""Attention of a sequence's last tokens, block by block, where no kernel takes their offset or their soft cap.

Scores and masks take memory of queries times keys: only those of one block exist at a time, in both passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_realloc.runtime.forward.attention.sinks import attend_with_sinks
from lightning_realloc.runtime.forward.attention.soft_caps import attend_capped

QUERY_BLOCK = 256
"""Queries of a block. More are faster, and take more memory."""


@dataclass(frozen=True, slots=True)
class ScoreRules:
    """Settings of a layer that turn products of queries and keys into weights."""

    is_causal: bool
    scaling: float | None
    """Factor of the products; None: one over the square root of the head size."""
    dropout: float
    sliding_window: int | None
    """Last tokens that each token sees, itself included; None: all."""
    sinks: Tensor | None
    """(H,) scores that join the softmax's denominator, without a value."""
    softcap: float | None
    """Bound of the scores; None: none."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output (B, H, T, D_v) of queries (B, H, T, D) on keys and values (B, H_kv, S, D or D_v).

        Args:
            mask: What a query sees, windows included. None: keys up to its own, or all, by ``is_causal``.
        """
        is_causal, scaling, dropout = self.is_causal and mask is None, self.scaling, self.dropout
        if self.softcap is not None:
            return attend_capped(
                query, key, value, mask, softcap=self.softcap, dropout=dropout, is_causal=is_causal, scaling=scaling
            )
        return attend_with_sinks(
            query, key, value, mask, self.sinks, dropout=dropout, is_causal=is_causal, scaling=scaling
        )

    def visible(self, query: Tensor, first: int, num_keys: int) -> Tensor | None:
        """Return a mask (T, S), True where a query sees a key; None where each sees all.

        Args:
            query: (..., T, D).
            first: Position of the first query among the keys.
        """
        window = self.sliding_window
        if not self.is_causal and window is None:
            return None
        positions = first + torch.arange(query.shape[-2], device=query.device)
        distance = positions[:, None] - torch.arange(num_keys, device=query.device)
        seen = distance >= (0 if self.is_causal or window is None else 1 - window)
        return seen if window is None else seen & (distance < window)

    def span(self, start: int, stop: int, num_keys: int) -> range:
        """Return the keys that queries at these positions see."""
        window = self.sliding_window
        reach = num_keys if window is None else window - 1
        return range(max(0, start - reach), min(num_keys, stop + (0 if self.is_causal else reach)))


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, first: int, rules: ScoreRules) -> Tensor:
    """Return the output (B, H, T, D_v) of queries (B, H, T, D) on keys and values (B, H_kv, S, D or D_v).

    Args:
        first: Position of the first query among the keys.
    """
    outputs, num_keys = [], key.shape[2]
    starts = range(0, query.shape[2], QUERY_BLOCK)
    recomputes = torch.is_grad_enabled() and len(starts) > 1
    for start in starts:
        own = query[:, :, start : start + QUERY_BLOCK]
        span = rules.span(first + start, first + start + own.shape[2], num_keys)
        k, v = (states[:, :, span.start : span.stop] for states in (key, value))
        block = own, k, v, first + start - span.start, rules
        if recomputes:
            # Random states are saved at a cost, and only dropout needs them.
            draws = rules.dropout > 0
            outputs.append(checkpoint(_attend_block, *block, use_reentrant=False, preserve_rng_state=draws))
        else:
            outputs.append(_attend_block(*block))
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]


def _attend_block(query: Tensor, key: Tensor, value: Tensor, first: int, rules: ScoreRules) -> Tensor:
    return rules.attend(query, key, value, rules.visible(query, first, key.shape[2]))
