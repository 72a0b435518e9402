"""Attention inside each sequence of a packed row: all in one varlen call on CUDA, else runs of equal sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_realloc.runtime.forward.attention.query_blocks import ScoreRules, attend_in_blocks
from lightning_realloc.runtime.forward.attention.segments import Segments
from lightning_realloc.runtime.forward.attention.varlen import attend_varlen, can_attend_varlen
from lightning_realloc.runtime.forward.token_group import RowDivision


def attend_whole_rows(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rules: ScoreRules) -> Tensor:
    """Attend on whole rows: (1, H, N, D) -> (1, N, H, D)."""
    if any(segments.shared) or segments.blocks is not None or not _can_attend_varlen(query, value, rules):
        return _attend_by_segment(query, key, value, segments, rules)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    longest, scaling, window = max(segments.lengths), rules.scaling, rules.sliding_window
    ends, sinks = segments.cu_seqlens, rules.sinks
    return attend_varlen(q, k, v, ends, longest, scaling=scaling, window=window, sinks=sinks)[None]


def attend_pieces(query: Tensor, key: Tensor, value: Tensor, division: RowDivision, rules: ScoreRules) -> Tensor:
    """Attend from this rank's share of a row: queries (1, H, T, D), keys (1, H_kv, cp * n, D) -> (1, T, H, D).

    Args:
        key: Slices of all ranks, one after another; ``value`` likewise.
    """
    read = division.keys(window=rules.sliding_window, is_causal=rules.is_causal)
    key, value = (states.index_select(2, read.places) for states in (key, value))
    counts = [len(piece.tokens) for piece in division.pieces]
    if _can_attend_varlen(query, value, rules):
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        keys, scaling, window = (read.key_ends, max(read.counts)), rules.scaling, rules.sliding_window
        longest, sinks = max(counts), rules.sinks
        return attend_varlen(q, k, v, read.query_ends, longest, keys=keys, scaling=scaling, window=window, sinks=sinks)[
            None
        ]
    by_piece = zip(query.split(counts, 2), key.split(read.counts, 2), value.split(read.counts, 2), strict=True)
    outputs = [attend_in_blocks(*piece, first, rules) for piece, first in zip(by_piece, read.firsts, strict=True)]
    return torch.cat(outputs, 2).transpose(1, 2)


def _can_attend_varlen(query: Tensor, value: Tensor, rules: ScoreRules) -> bool:
    is_plain = rules.is_causal and rules.dropout == 0.0 and rules.softcap is None
    return is_plain and can_attend_varlen(query, value)


def _attend_by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rules: ScoreRules) -> Tensor:
    """Attend to one run of equal segments at a time, as a batch."""
    runs = segments.runs
    # split, not slices: the backward of a slice fills a whole (N, ...) gradient with zeros, once per segment.
    sizes = [run.count * run.length for run in runs]
    by_run = zip(*(torch.split(tensor[0].transpose(0, 1), sizes) for tensor in (query, key, value)), runs, strict=True)
    outputs: list[Tensor] = []
    owner = key, value
    blocks: Sequence[Tensor | None] = [None] * len(runs) if segments.blocks is None else segments.blocks.split(sizes)
    for (*packed, run), images in zip(by_run, blocks, strict=True):
        # (count * length, H, D) -> (count, H, length, D)
        q, k, v = (tensor.unflatten(0, (run.count, run.length)).transpose(1, 2) for tensor in packed)
        if run.shared:
            prompts = (held[:, :, : run.shared].expand(run.count, -1, -1, -1) for held in owner)
            k, v = (torch.cat([prompt, own], dim=2) for prompt, own in zip(prompts, (k, v), strict=True))
        else:
            owner = k[-1:], v[-1:]
        if images is None or run.shared:
            attended = _attend_run(q, k, v, segments, rules)
        else:
            attended = rules.attend(q, k, v, _mask_of_images(q, images.view(run.count, -1), rules))
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).unsqueeze(0)


def _mask_of_images(query: Tensor, images: Tensor, rules: ScoreRules) -> Tensor:
    """Return the additive mask (B, 1, S, S) of sequences whose tokens see earlier ones, and all of their own image.

    Args:
        query: (B, H, S, D).
        images: (B, S) number of each token's image, -1 for text.
    """
    places = torch.arange(images.shape[1], device=images.device)
    distance = places[:, None] - places
    seen = (distance >= 0) | ((images[:, :, None] == images[:, None]) & (images >= 0)[:, None])
    if rules.sliding_window is not None:
        seen &= distance < rules.sliding_window
    return query.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))[:, None]


def _attend_run(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rules: ScoreRules) -> Tensor:
    """Attend from the last tokens (B, H, T, D) of sequences to all of them, (B, H_kv, S, D) -> (B, H, T, D)."""
    if rules.softcap is not None:
        return attend_in_blocks(query, key, value, key.shape[2] - query.shape[2], rules)
    return rules.attend(query, key, value, _mask(query, key.shape[2], segments, rules))


def _mask(query: Tensor, num_keys: int, segments: Segments, rules: ScoreRules) -> Tensor | None:
    """Return the additive (queries, keys) mask, aligned at the end; None where `is_causal` suffices.

    A sliding window covers the last ``sliding_window`` tokens, including the token itself.
    """
    num_queries, window = query.shape[2], rules.sliding_window
    if window is not None and num_keys <= window:
        window = None
    if window is None and num_queries == num_keys:
        return None
    name = (num_queries, num_keys, window, query.dtype)
    if name not in segments.masks:
        first = num_keys - num_queries  # position of the first query among the keys
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        if window is not None:
            seen = seen.triu(first + 1 - window)
        seen = seen.tril(first if rules.is_causal else first + (window or num_keys) - 1)
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        segments.masks[name] = mask.masked_fill_(~seen, float("-inf"))
    return segments.masks[name]
