"""Attention of Hugging Face models over the slot cache, without model code of this package.

transformers looks attention up in a registry by the name in the model's config. `slot_attention` sets our name there
during one generation. The function finds its `PackedStep` among the keyword arguments that models pass on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import StepPlaces
from lightning_realloc.generation.core.model_config import OTHER_ENGINE
from lightning_realloc.generation.forward.expert_records import ExpertRecords
from lightning_realloc.generation.forward.packed_step import PackedStep, is_visible
from lightning_realloc.runtime.forward.attention.soft_caps import capped
from lightning_realloc.runtime.forward.attention.varlen import attend_varlen, can_attend_varlen
from lightning_realloc.runtime.forward.routers import RoutedPass

IMPLEMENTATION = "realloc_slots"
STEP_ARGUMENT = "realloc_step"
_QUERY_BLOCK = 1024
"""Queries of one segment that share a mask; bounds the mask's memory."""
_SCORED_QUERY_BLOCK = 128
"""The same for layers without fused attention, where every head's scores take memory too."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Turns the products of one layer's queries and keys into weights."""

    scaling: float | None
    """Factor of the products; None: one over the square root of the head size."""
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
        scores = scores * (queries.shape[-1] ** -0.5 if self.scaling is None else self.scaling)
        scores = capped(scores, self.softcap)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        if self.sinks is not None:
            batch, heads, rows, _ = scores.shape
            by_row = self.sinks.float().view(heads, -1).repeat_interleave(rows // (len(self.sinks) // heads), 1)
            scores = torch.cat([scores, by_row.expand(batch, heads, rows)[..., None]], -1)
        weights = torch.softmax(scores, -1)[..., : keys.shape[2]]
        return weights.to(values.dtype) @ values


@dataclass(slots=True)
class Tile:
    """Inputs that the layers of a forward share whose tokens read their sequences in blocks of fixed size.

    See `batch_invariant`.
    """

    cached: StepPlaces
    max_length: int
    """Largest position + 1."""
    blocks: Sequence[tuple[Tensor, Tensor]]
    """For each block of positions, (T, block) indices in the cache, and each token's distance from them. Without blocks
    it is a dummy, which neither stores nor reads."""
    attended: set[int] = field(default_factory=set, init=False)
    """Layers that have attended."""
    _hidden: dict[int | None, list[Tensor]] = field(default_factory=dict, init=False)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores, window: int | None
    ) -> Tensor:
        """Store keys and values (T, H_kv, D) of a layer; return the output (T, H, D_v) of queries (T, H, D)."""
        is_dummy = not self.blocks  # it shows a bounded cache the layers' shapes
        stored = self.cached.store(layer, *(part[:0] if is_dummy else part for part in (keys, values)))
        if stored is None or is_dummy:
            return queries.new_zeros(*queries.shape[:2], values.shape[-1])
        all_keys, all_values = (tensor.flatten(0, 1) for tensor in stored)
        with torch.autocast(queries.device.type, enabled=False):
            return self._attend(queries, all_keys, all_values, scores, window)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores, window: int | None) -> Tensor:
        """Attend block by block, rescaling what was added before. Source: Milakov, Gimelshein, arXiv:1805.02867."""
        count, heads, size = queries.shape
        groups, exact = keys.shape[1], torch.promote_types(queries.dtype, torch.float32)
        scaling = size**-0.5 if scores.scaling is None else scores.scaling
        by_group = (queries.to(exact) * scaling).view(count, groups, heads // groups, size)
        highest = by_group.new_full((count, groups, heads // groups, 1), float("-inf"))
        total = torch.zeros_like(highest)
        if scores.sinks is not None:
            highest = scores.sinks.to(exact).view(1, groups, -1, 1).expand_as(highest)
            total = torch.ones_like(total)
        output = by_group.new_zeros(*by_group.shape[:3], values.shape[-1])
        for (places, _), hidden in zip(self.blocks, self._hidden_positions(window), strict=True):
            own = capped(by_group @ keys[places].permute(0, 2, 3, 1).to(exact), scores.softcap)
            own = own.masked_fill(hidden, float("-inf"))
            raised = torch.maximum(highest, own.amax(-1, keepdim=True))
            shift = raised.masked_fill(raised == float("-inf"), 0.0)  # nothing was visible yet
            weights, kept = (own - shift).exp(), (highest - shift).exp()
            total = total * kept + weights.sum(-1, keepdim=True)
            output = output * kept + weights @ values[places].permute(0, 2, 1, 3).to(exact)
            highest = raised
        return (output / total).to(values.dtype).reshape(count, heads, -1)

    def _hidden_positions(self, window: int | None) -> list[Tensor]:
        """Return masks (T, 1, 1, block), True for positions that a token does not see; made once per forward."""
        if window not in self._hidden:
            self._hidden[window] = [~is_visible(distance, window)[:, None, None] for _, distance in self.blocks]
        return self._hidden[window]


@contextmanager
def slot_attention(model: nn.Module) -> Iterator[None]:
    """Let the model attend through the slot cache, in evaluation mode; restore everything at the end.

    The training mode of each module is restored separately: some may have been in evaluation mode on purpose.
    """
    config: Any = model.config
    before, padding = config._attn_implementation, vars(config).get("pad_token_id")
    training = [module for module in model.modules() if module.training]
    try:
        config._attn_implementation = IMPLEMENTATION
        if padding is not None:  # GPT-2 looks for it among the tokens to warn of a missing mask, and waits for them
            vars(config)["pad_token_id"] = None  # past the check of some configs that there is one
        model.eval()
        yield
    finally:
        config._attn_implementation = before
        if padding is not None:
            vars(config)["pad_token_id"] = padding
        for module in training:
            module.training = True


@contextmanager
def attention_given_back(model: nn.Module) -> Iterator[None]:
    """Let another engine generate from the model, between two steps of a call that does."""
    config: Any = model.config
    before = config._attn_implementation
    try:
        if before == IMPLEMENTATION:
            config._attn_implementation = None  # until the other call sets its own: nothing else runs the model
        yield
    finally:
        config._attn_implementation = before


class StepArgument:
    """Wraps a step on its way through a model's forward: FSDP copies dataclasses, and casts their tensors."""

    def __init__(self, step: PackedStep | Tile) -> None:
        self.step = step


def attend_slots(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | Literal["unset"] | None = "unset",
    realloc_step: StepArgument | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend with queries (1, H, N, D), keys and values (1, H_kv, N, D) of one packed row; return (1, N, H, D)."""
    if realloc_step is None:
        raise GenerationError(
            f"{type(module).__name__} was run without what an engine passes to attention. Either something else ran "
            "its model (an environment, on_finished, a hook), or another one with the same config object, while an "
            "engine generates: run it before or after generate(), or a copy. Or its model does not pass keyword "
            f"arguments on to its attention function, which in-process generation needs: {OTHER_ENGINE}"
        )
    step = realloc_step.step
    window = _checked_window(module, step, sliding_window)
    if others.get("position_bias") is not None:
        _refuse_attention(module, "position_bias")
    scores = Scores(scaling, others.get("softcap"), others.get("s_aux"))
    if scores.sinks is not None and len(scores.sinks) != query.shape[1]:
        _refuse_attention(module, f"the sinks of {len(scores.sinks)} heads in a layout that leaves it {query.shape[1]}")
    if attention_mask is not None:
        _refuse_attention(module, "a mask of its own")
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: Any = module.layer_idx
    if isinstance(step, Tile):
        return step.attend(layer, queries, keys, values, scores, window)[None], None
    return _attend_packed(layer, queries, keys, values, step, scores, window)[None], None


def _attend_packed(
    layer: int, queries: Tensor, keys: Tensor, values: Tensor, step: PackedStep, scores: Scores, window: int | None
) -> Tensor:
    """Attend from a packed step's tokens (N, H, D), whose keys and values are (N, H_kv, D); return (N, H, D_v)."""
    split = step.num_prefill
    stored = step.cached.store(layer, keys, values)
    attended = []
    if step.reads_from_the_beginning and scores.are_plain and can_attend_varlen(queries, values):
        read = attend_varlen(
            queries[:split], keys[:split], values[:split], *step.segment_bounds(),
            scaling=scores.scaling, window=window,
        )  # fmt: skip
        attended.append(read)
    else:
        for segment in step.segments:
            span = slice(segment.start, segment.stop)
            whole = (keys[span], values[span])
            if segment.begin:  # the slot holds the positions before
                whole = step.cached.sequence(stored, segment.slots[0], segment.end)
            attended.append(_read(queries[span], whole, scores, window))
    if step.counts:
        attended.append(_decode(queries[split:], stored, step, scores, window))
    # Contiguous like the output of torch's attention: some layers (AFMoE) take a view of it.
    return torch.cat(attended) if len(attended) > 1 else attended[0].contiguous()


def _checked_window(module: nn.Module, step: PackedStep | Tile, window: int | Literal["unset"] | None) -> int | None:
    """Return the layer's sliding window; refuse layers that attend to other tokens than a causal window's."""
    if module.layer_idx in step.attended:
        _refuse_attention(module, "the same layer twice in a forward")
    step.attended.add(module.layer_idx)  # type: ignore[arg-type]
    if getattr(module, "is_causal", True) is False:
        _refuse_attention(module, "tokens to later ones")
    if window != "unset":
        return window
    # Some models pass their window to the mask only, and this attention gets no mask. Qwen2-MoE writes 0 for none.
    declared: int | None = getattr(module.config, "sliding_window", None)
    if declared and step.max_length > declared:
        _refuse_attention(module, f"a sliding window of {declared} that only its mask states")
    return None


def run_packed(
    model: nn.Module,
    ids: Tensor,
    positions: Tensor,
    step: PackedStep | Tile,
    *,
    kept: int | Tensor,
    extras: Mapping[str, Tensor] | None = None,
    routed: RoutedPass | None = None,
) -> Tensor:
    """Return the logits (K, V) of the last ``kept`` tokens, or of those at these indices (K,).

    ``ids`` and ``positions`` are (1, N). ``extras`` are further inputs of the model by keyword. ``routed`` records the
    experts of the tokens, which are stored next to their keys and values.
    """
    output = model(
        input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept,
        **{STEP_ARGUMENT: StepArgument(step)}, **(extras or {}), **({} if routed is None else routed.arguments),
    )  # fmt: skip
    if not step.attended:  # the forward mixed samples
        raise GenerationError(
            f"{type(model).__name__} cannot be generated from in process: its layers do not look their attention up in "
            f"its forward; {OTHER_ENGINE}"
        )
    if routed is not None:
        ExpertRecords.store(routed, step.cached)
    logits: Tensor = output.logits[0]
    return logits


def check_idle(model: nn.Module) -> None:
    """Raise GenerationError if another call is generating from the model, as both would replace its attention."""
    config: Any = model.config
    if config._attn_implementation == IMPLEMENTATION:
        raise GenerationError(
            f"{type(model).__name__} is generated from already, by another thread, or by the call that on_finished or "
            "an environment runs in; wait for the end of that call, or give every engine a model of its own"
        )


def _refuse_attention(module: nn.Module, extra: str) -> None:
    raise GenerationError(
        f"{type(module).__name__} attends with {extra}, which in-process generation does not implement; {OTHER_ENGINE}"
    )


def _decode(queries: Tensor, stored: Any, step: PackedStep, scores: Scores, window: int | None) -> Tensor:
    """Attend from the slots' tokens (N, H, D) to the slots' content; return (N, H, D_v)."""
    laid_out = step.grid.lay_out(queries)
    attended = [_decode_grid(step.grid.as_grid(laid_out), stored, step, scores, window)]
    for overhang in step.grid.overhangs:
        own = laid_out[overhang.start : overhang.stop]
        whole = step.cached.sequence(stored, overhang.slot, step.row_lengths[overhang.slot])
        attended.append(_decode_overhang(own, whole, step.overhang_mask(overhang, window, own.dtype), scores))
    return step.grid.tokens_of(torch.cat(attended) if len(attended) > 1 else attended[0])


def _decode_overhang(queries: Tensor, contents: tuple[Tensor, Tensor], mask: Tensor, scores: Scores) -> Tensor:
    """Attend from the last T tokens (T, H, D) of a slot to all of it (S, H_kv, D); return (T, H, D_v)."""
    keys, values = (tensor.transpose(0, 1)[None] for tensor in contents)
    count, groups, repeats = len(queries), keys.shape[1], queries.shape[1] // keys.shape[1]
    by_group = queries.view(count, groups, repeats, -1).permute(1, 2, 0, 3).reshape(1, groups, repeats * count, -1)
    attended = scores.attend(by_group, keys, values, mask=mask.repeat(repeats, 1))
    return attended.view(groups, repeats, count, -1).permute(2, 0, 1, 3).reshape(count, groups * repeats, -1)


def _decode_grid(grid: Tensor, stored: Any, step: PackedStep, scores: Scores, window: int | None) -> Tensor:
    """Attend from a grid of tokens (rows, width, H, D) to their slots; return (rows * width, H, D_v)."""
    rows, width, heads = grid.shape[:3]
    blocks = []
    for own, keys, values in step.cached.blocks(stored):
        count, length, groups = keys.shape[:3]
        # Query heads that share a key-value head become query positions, so keys are read once.
        by_group = grid[own].reshape(count, width, groups, heads // groups, -1).permute(0, 2, 3, 1, 4)
        mask = step.decode_mask(window, heads // groups, grid.dtype)
        attended = scores.attend(
            by_group.reshape(count, groups, heads // groups * width, -1),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            mask=mask[own, ..., :length],
        )
        blocks.append(attended.reshape(count, groups, heads // groups, width, -1).permute(0, 3, 1, 2, 4))
    by_token = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    return by_token.reshape(rows * width, heads, -1)


def _read(queries: Tensor, contents: tuple[Tensor, Tensor], scores: Scores, window: int | None) -> Tensor:
    """Attend causally from the last T tokens (T, H, D) of a sequence to all of it (S, H_kv, D); return (T, H, D_v)."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (queries, *contents))
    num_queries, length = q.shape[2], k.shape[2]
    if scores.are_plain and num_queries == length and (window is None or window >= length):
        grouped = q.shape[1] != k.shape[1]
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scores.scaling, enable_gqa=grouped)
        return attended[0].transpose(0, 1)
    blocks = []
    size = _QUERY_BLOCK if scores.are_plain else _SCORED_QUERY_BLOCK
    for begin in range(length - num_queries, length, size):
        end = min(begin + size, length)
        first = 0 if window is None else max(0, begin - window + 1)
        own = slice(begin - length + num_queries, end - length + num_queries)
        distance = torch.arange(begin, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        mask = is_visible(distance, window)
        blocks.append(scores.attend(q[:, :, own], k[:, :, first:end], v[:, :, first:end], mask=mask))
    return torch.cat(blocks, 2)[0].transpose(0, 1)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend_slots)
