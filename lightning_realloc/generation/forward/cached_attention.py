"""Attention of a layer's tokens to what its cache holds, by torch's fused attention where possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_realloc.generation.cache.kv_cache import StepPlaces
from lightning_realloc.generation.forward.packed_step import PackedStep, is_visible
from lightning_realloc.runtime.forward.attention.soft_caps import capped

_QUERY_BLOCK = 1024
"""Queries of one segment that share a mask; bounds the mask's memory."""
_SCORED_QUERY_BLOCK = 128
"""The same for layers without fused attention, where every head's scores take memory too."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Turns the products of one layer's queries and keys into weights."""

    scaling: float
    """Factor of the products."""
    softcap: float | None = None
    """Replaces scores by ``softcap * tanh(score / softcap)``. Source: Gemma 2, arXiv:2408.00118, section 2."""
    sinks: Tensor | None = None
    """(H,) Score per query head of one more key, which has no value; weights then sum to less than 1. Source: gpt-oss,
    arXiv:2508.10925, section 2.2."""

    @property
    def are_plain(self) -> bool:
        """Whether torch's fused attention computes the weights."""
        return self.softcap is None and self.sinks is None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor) -> Tensor:
        """Return the output (B, H, T, D_v) of queries (B, H, T, D) on keys and values (B, H_kv, S, D).

        If query heads that share a key-value head were laid out as rows of one, H is H_kv, and T holds the first of
        these heads' rows, then the second's. ``mask`` broadcasts to (B, H, T, S). It is boolean, True where a query
        sees a key, or is added to the scores.
        """
        if self.are_plain:
            grouped = queries.shape[1] != keys.shape[1]
            return scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=self.scaling, enable_gqa=grouped
            )
        repeats = queries.shape[1] // keys.shape[1]
        if repeats > 1:
            keys, values = (tensor.repeat_interleave(repeats, 1) for tensor in (keys, values))
        scores = (queries @ keys.transpose(-1, -2)).float()
        scores = capped(scores * self.scaling, self.softcap)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        if self.sinks is not None:
            batch, heads, rows, _ = scores.shape
            by_row = self.sinks.float().view(heads, -1).repeat_interleave(rows // (len(self.sinks) // heads), 1)
            scores = torch.cat([scores, by_row.expand(batch, heads, rows)[..., None]], -1)
        weights = torch.softmax(scores, -1)[..., : keys.shape[2]]
        return weights.to(values.dtype) @ values


@dataclass(frozen=True, slots=True, eq=False)
class StoredLayer:
    """A layer's content of the cache, with the rules by which tokens attend to it."""

    places: StepPlaces
    stored: Any
    """The layer's storage, as `places` returns and takes it."""
    scores: Scores
    window: int | None
    """Last positions that a token sees; None: all."""

    def sequence(self, slot: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (end, H_kv, D) of a slot's first positions, valid until the next call."""
        return self.places.sequence(self.stored, slot, end)


def decode(queries: Tensor, layer: StoredLayer, step: PackedStep) -> Tensor:
    """Attend from the slots' tokens (N, H, D) to the slots' content; return (N, H, D_v)."""
    laid_out = step.grid.lay_out(queries)
    attended = [_decode_grid(step.grid.as_grid(laid_out), layer, step)]
    for overhang in step.grid.overhangs:
        own = laid_out[overhang.start : overhang.stop]
        whole = layer.sequence(overhang.slot, step.row_lengths[overhang.slot])
        mask = step.overhang_mask(overhang, layer.window, own.dtype)
        attended.append(_decode_overhang(own, whole, mask, layer.scores))
    return step.grid.tokens_of(torch.cat(attended) if len(attended) > 1 else attended[0])


def _decode_overhang(queries: Tensor, contents: tuple[Tensor, Tensor], mask: Tensor, scores: Scores) -> Tensor:
    """Attend from the last T tokens (T, H, D) of a slot to all of it (S, H_kv, D); return (T, H, D_v)."""
    keys, values = (tensor.transpose(0, 1)[None] for tensor in contents)
    count, groups, repeats = len(queries), keys.shape[1], queries.shape[1] // keys.shape[1]
    by_group = queries.view(count, groups, repeats, -1).permute(1, 2, 0, 3).reshape(1, groups, repeats * count, -1)
    attended = scores.attend(by_group, keys, values, mask=mask.repeat(repeats, 1))
    return attended.view(groups, repeats, count, -1).permute(2, 0, 1, 3).reshape(count, groups * repeats, -1)


def _decode_grid(grid: Tensor, layer: StoredLayer, step: PackedStep) -> Tensor:
    """Attend from a grid of tokens (rows, width, H, D) to their slots; return (rows * width, H, D_v)."""
    rows, width, heads = grid.shape[:3]
    blocks = []
    for own, keys, values in layer.places.blocks(layer.stored):
        count, length, groups = keys.shape[:3]
        # Query heads that share a key-value head become query positions, so keys are read once.
        by_group = grid[own].reshape(count, width, groups, heads // groups, -1).permute(0, 2, 3, 1, 4)
        mask = step.decode_mask(layer.window, heads // groups, grid.dtype)
        attended = layer.scores.attend(
            by_group.reshape(count, groups, heads // groups * width, -1),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            mask=mask[own, ..., :length],
        )
        blocks.append(attended.reshape(count, groups, heads // groups, width, -1).permute(0, 3, 1, 2, 4))
    by_token = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    return by_token.reshape(rows * width, heads, -1)


def read(queries: Tensor, contents: tuple[Tensor, Tensor], layer: StoredLayer, images: Tensor | None = None) -> Tensor:
    """Attend causally from the last T tokens (T, H, D) of a sequence to all of it (S, H_kv, D); return (T, H, D_v).

    With ``images`` (S,), tokens also see later ones of the same image; -1 is text.
    """
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (queries, *contents))
    num_queries, length = q.shape[2], k.shape[2]
    scores, window = layer.scores, layer.window
    if images is None and scores.are_plain and num_queries == length and (window is None or window >= length):
        grouped = q.shape[1] != k.shape[1]
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scores.scaling, enable_gqa=grouped)
        return attended[0].transpose(0, 1)
    blocks = []
    size = _QUERY_BLOCK if scores.are_plain else _SCORED_QUERY_BLOCK
    for begin in range(length - num_queries, length, size):
        end = min(begin + size, length)
        first = 0 if window is None else max(0, begin - window + 1)
        own = slice(begin - length + num_queries, end - length + num_queries)
        last = end if images is None else length
        distance = torch.arange(begin, end, device=q.device)[:, None] - torch.arange(first, last, device=q.device)
        mask = is_visible(distance, window)
        if images is not None:
            mask |= (distance < 0) & (images[begin:end, None] == images[first:last]) & (images[begin:end, None] >= 0)
        blocks.append(scores.attend(q[:, :, own], k[:, :, first:last], v[:, :, first:last], mask=mask))
    return torch.cat(blocks, 2)[0].transpose(0, 1)
