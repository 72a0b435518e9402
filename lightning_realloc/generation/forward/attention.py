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
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import StepPlaces
from lightning_realloc.generation.core.model_config import OTHER_ENGINE, text_config_of
from lightning_realloc.generation.forward.cached_attention import Scores, StoredLayer, decode, read
from lightning_realloc.generation.forward.expert_records import ExpertRecords
from lightning_realloc.generation.forward.latents import CachedHeads, heads_of, latents_given_back, latents_kept
from lightning_realloc.generation.forward.packed_step import PackedStep, is_visible
from lightning_realloc.runtime.forward.attention.soft_caps import capped
from lightning_realloc.runtime.forward.attention.varlen import attend_varlen, can_attend_varlen
from lightning_realloc.runtime.forward.routers import RoutedPass
from lightning_realloc.runtime.model.image_inputs import image_blocks

IMPLEMENTATION = "realloc_slots"
STEP_ARGUMENT = "realloc_step"


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
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scores: Scores,
        window: int | None,
        heads: CachedHeads,
    ) -> Tensor:
        """Store keys and values (T, H_kv, D) of a layer; return the output (T, H, D_v) of queries (T, H, D)."""
        is_dummy = not self.blocks  # it shows a bounded cache the layers' shapes
        kept = (part[:0] if is_dummy else part for part in (keys, values))
        stored = heads.places(self.cached).store(layer, *kept)
        queries = heads.absorb(queries)
        if stored is None or is_dummy:
            attended = queries.new_zeros(*queries.shape[:2], values.shape[-1])
        else:
            all_keys, all_values = (tensor.flatten(0, 1) for tensor in stored)
            with torch.autocast(queries.device.type, enabled=False):
                attended = self._attend(queries, all_keys, all_values, scores, window)
        return heads.project(attended)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores, window: int | None) -> Tensor:
        """Attend block by block, rescaling what was added before. Source: Milakov, Gimelshein, arXiv:1805.02867."""
        count, heads, size = queries.shape
        groups, exact = keys.shape[1], torch.promote_types(queries.dtype, torch.float32)
        by_group = (queries.to(exact) * scores.scaling).view(count, groups, heads // groups, size)
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
    config = text_config_of(model)
    before, padding = config._attn_implementation, vars(config).get("pad_token_id")
    training = [module for module in model.modules() if module.training]
    try:
        config._attn_implementation = IMPLEMENTATION
        if padding is not None:  # GPT-2 looks for it among the tokens to warn of a missing mask, and waits for them
            vars(config)["pad_token_id"] = None  # past the check of some configs that there is one
        model.eval()
        with latents_kept(model):
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
    config = text_config_of(model)
    before = config._attn_implementation
    try:
        if before == IMPLEMENTATION:
            config._attn_implementation = None  # until the other call sets its own: nothing else runs the model
        with latents_given_back(model):
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
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scaling, others.get("softcap"), others.get("s_aux"))
    if scores.sinks is not None and len(scores.sinks) != query.shape[1]:
        _refuse_attention(module, f"the sinks of {len(scores.sinks)} heads in a layout that leaves it {query.shape[1]}")
    if attention_mask is not None:
        _refuse_attention(module, "a mask of its own")
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: Any = module.layer_idx
    heads = heads_of(module, key)
    if isinstance(step, Tile):
        return step.attend(layer, queries, keys, values, scores, window, heads)[None], None
    places = heads.places(step.cached)
    stored = StoredLayer(places, places.store(layer, keys, values), scores, window)
    return _attend_packed(queries, keys, values, stored, step, heads)[None], None


def _attend_packed(
    queries: Tensor, keys: Tensor, values: Tensor, layer: StoredLayer, step: PackedStep, heads: CachedHeads
) -> Tensor:
    """Attend from a packed step's tokens (N, H, D), given their keys and values (N, H_kv, D) for the cache.

    Returns (N, H, D_v).
    """
    split = step.num_prefill
    attended = []
    if split:
        own = heads.expand(keys[:split], values[:split])
        attended += _attend_segments(queries[:split], own, layer, step, heads)
    if step.counts:
        attended.append(heads.project(decode(heads.absorb(queries[split:]), layer, step)))
    # Contiguous like the output of torch's attention: some layers (AFMoE) take a view of it.
    return torch.cat(attended) if len(attended) > 1 else attended[0].contiguous()


def _attend_segments(
    queries: Tensor, own: tuple[Tensor, Tensor], layer: StoredLayer, step: PackedStep, heads: CachedHeads
) -> list[Tensor]:
    """Attend from the segments' tokens (N, H, D), which have the heads' ``own`` keys and values; return (N, H, D_v)."""
    is_causal = step.blocks is None and layer.scores.are_plain
    if is_causal and step.reads_from_the_beginning and can_attend_varlen(queries, own[1]):
        scaling, window = layer.scores.scaling, layer.window
        return [attend_varlen(queries, *own, *step.segment_bounds(), scaling=scaling, window=window)]
    attended = []
    for segment in step.segments:
        span = slice(segment.start, segment.stop)
        images = None if step.blocks is None else step.blocks[span]
        if segment.begin:  # the slot holds the positions before
            images = None if images is None else pad(images, (segment.begin, 0), value=-1)
            whole = layer.sequence(segment.slots[0], segment.end)
            attended.append(heads.project(read(heads.absorb(queries[span]), whole, layer, images)))
        else:
            attended.append(read(queries[span], (own[0][span], own[1][span]), layer, images))
    return attended


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
    if extras and isinstance(step, PackedStep):
        step.blocks = image_blocks(model, ids[0, : step.num_prefill])
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
    if text_config_of(model)._attn_implementation == IMPLEMENTATION:
        raise GenerationError(
            f"{type(model).__name__} is generated from already, by another thread, or by the call that on_finished or "
            "an environment runs in; wait for the end of that call, or give every engine a model of its own"
        )


def _refuse_attention(module: nn.Module, extra: str) -> None:
    raise GenerationError(
        f"{type(module).__name__} attends with {extra}, which in-process generation does not implement; {OTHER_ENGINE}"
    )


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend_slots)
