"""How a Hugging Face model attends to the cache of slots, without any model code of ours.

transformers looks attention up in a registry by the name in the model's config. `slot_attention` puts our name there
for the time of one generation; the function finds its `PackedStep` among the keyword arguments that models pass on.
One forward handles a single packed row: first the segments, which are tokens of new prompts or tokens that follow what
a slot holds; then the tokens of every running sample: the one that its next token is read off, and behind it the tokens
drafted to follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import Segment, StepPlaces
from lightning_realloc.generation.forward.attention_scores import Scores
from lightning_realloc.generation.forward.ragged_layout import Overflow, PaddedRows
from lightning_realloc.runtime.forward.varlen import attend_varlen, can_attend_varlen
from lightning_realloc.runtime.model.batching_limits import experts_obstacle, generation_obstacle, rotary_bounds

IMPLEMENTATION = "realloc_slots"
STEP_ARGUMENT = "realloc_step"
_UNKNOWN_WINDOW = -1
_QUERY_BLOCK = 1024
"""Queries of one segment that share a mask: it bounds the mask's memory."""
_SCORED_QUERY_BLOCK = 128
"""The same where every head's scores are held, too."""
_CHANGES_ATTENTION = ("position_bias",)
_OTHER_ENGINE = "use HFEngine, or engine='hf' in an algorithm, which goes by the model's own generate()"
_OTHER_MODEL = "use a decoder-only model such as Llama"
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(slots=True)
class PackedStep:
    """What the layers of one forward have in common."""

    cached: StepPlaces
    """Where tokens are written to the cache, and how slots are read."""
    positions: Tensor
    """(N,) position of each token of the rows: those of slot 0, then those of slot 1 …"""
    counts: Sequence[int]
    """How many of them are each slot's: one, or more where drafted tokens follow it."""
    row_lengths: Sequence[int]
    """Positions of each of these slots, with those of its tokens."""
    max_length: int
    """Largest position + 1."""
    segments: tuple[Segment, ...] = ()
    num_prefill: int = 0
    """Tokens of segments, which stand in front of the rows'."""
    grid: PaddedRows = field(init=False)
    attended: set[int] = field(default_factory=set, init=False)
    """Layers that attended by it."""
    _masks: dict[tuple[int | None, int, torch.dtype], Tensor] = field(default_factory=dict, init=False)
    _segment_bounds: tuple[Tensor, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.grid = PaddedRows(self.counts, self.positions.device)

    @property
    def reads_from_the_beginning(self) -> bool:
        """Whether there are segments, all of them a sequence's first tokens."""
        return bool(self.segments) and not any(segment.begin for segment in self.segments)

    def segment_bounds(self) -> tuple[Tensor, int]:
        """Return where segments begin, and the last one ends, (segments + 1,) int32, and the tokens of the longest one.

        Made once per forward.
        """
        if self._segment_bounds is None:
            bounds = [0, *(segment.stop for segment in self.segments)]
            longest = max(segment.stop - segment.start for segment in self.segments)
            self._segment_bounds = torch.tensor(bounds, dtype=torch.int32, device=self.positions.device), longest
        return self._segment_bounds

    def decode_mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask (slots, 1, repeats * width, attended length), made once per forward.

        Additive and in the queries' dtype, since SDPA would convert a boolean mask again in every layer.
        """
        repeats = repeats if self.grid.width > 1 else 1  # a single position broadcasts
        mask = self._masks.get((window, repeats, dtype))
        if mask is None:
            keys = torch.arange(self.cached.attended_length, device=self.positions.device)
            distance = self.grid.of(self.grid.lay_out(self.positions))[..., None] - keys
            mask = _additive(_may_see(distance, window), dtype)
            mask = self._masks[window, repeats, dtype] = mask.repeat(1, repeats, 1)[:, None]
        return mask

    def overhang_mask(self, overhang: Overflow, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask (T, S) of a slot's last T tokens, which attend to the slot's S positions.

        A view of one mask for all slots, made once per forward: it tells distances, and these are alike everywhere.
        """
        longest, most = self.max_length, self.grid.longest_overhang
        mask = self._masks.get((window, 0, dtype))
        if mask is None:
            device = self.positions.device
            distance = (
                longest + torch.arange(most, device=device)[:, None] - torch.arange(longest + most, device=device)
            )
            mask = self._masks[window, 0, dtype] = _additive(_may_see(distance, window), dtype)
        count = overhang.stop - overhang.start
        return mask[:count, longest + count - self.row_lengths[overhang.slot] : longest + count]


@contextmanager
def slot_attention(model: nn.Module) -> Iterator[None]:
    """Let the model attend through the slot cache, in evaluation mode; put everything back at the end.

    Modules that were in training mode return to it one by one: some may have been in evaluation mode on purpose.
    """
    config: Any = model.config
    before = config._attn_implementation
    training = [module for module in model.modules() if module.training]
    config._attn_implementation = IMPLEMENTATION
    try:
        model.eval()
        yield
    finally:
        config._attn_implementation = before
        for module in training:
            module.training = True


class StepArgument:
    """Takes a step through a model's forward as it is: FSDP casts what it finds in dataclasses, and makes new ones."""

    def __init__(self, step: PackedStep) -> None:
        """Hold ``step``."""
        self.step = step


def attend_slots(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = _UNKNOWN_WINDOW,
    realloc_step: StepArgument | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend with queries (1, H, N, D), keys and values (1, H_kv, N, D) of one packed row; return (1, N, H, D)."""
    if realloc_step is None:
        raise GenerationError(
            f"{type(module).__name__} was run without what an engine hands on to attention. Either something else ran "
            "its model (an environment, on_finished, a hook), or another one with the same config object, while an "
            "engine generates: run it before or after generate(), or a copy. Or its model does not hand keyword "
            f"arguments on to its attention function, which in-process generation needs: {_OTHER_ENGINE}"
        )
    step = realloc_step.step
    if module.layer_idx in step.attended:
        _refuse_attention(module, "the same layer twice in a forward")
    step.attended.add(module.layer_idx)  # type: ignore[arg-type]
    if getattr(module, "is_causal", True) is False:
        _refuse_attention(module, "tokens to what comes after them")
    if sliding_window == _UNKNOWN_WINDOW:
        # Some models hand their window to the mask alone, and masks are not built for this attention.
        declared = getattr(module.config, "sliding_window", None)
        sliding_window = None
        if declared and step.max_length > declared:  # 0: none, as Qwen2-MoE writes it
            _refuse_attention(module, f"a sliding window of {declared} that it states in its mask alone")
    for name in _CHANGES_ATTENTION:
        if others.get(name) is not None:
            _refuse_attention(module, name)
    scores = Scores(scaling, others.get("softcap"), others.get("s_aux"))
    if scores.sinks is not None and len(scores.sinks) != query.shape[1]:
        _refuse_attention(module, f"the sinks of {len(scores.sinks)} heads in a layout that leaves it {query.shape[1]}")
    if attention_mask is not None:
        _refuse_attention(module, "a mask of its own")
    split = step.num_prefill
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    stored = step.cached.store(module.layer_idx, keys, values)  # type: ignore[arg-type]
    attended = []
    if scores.are_plain and can_attend_varlen(query, value) and step.reads_from_the_beginning:
        read = attend_varlen(
            queries[:split], keys[:split], values[:split], *step.segment_bounds(),
            scaling=scores.scaling, window=sliding_window,
        )  # fmt: skip
        attended.append(read)
    else:
        attended.extend(
            _read_segment(segment, queries, keys, values, stored, step, scores, sliding_window)
            for segment in step.segments
        )
    if step.counts:
        attended.append(_decode(queries[split:], stored, step, scores, sliding_window))
    # As torch's own attention does: some layers (AFMoE) take a view of it.
    return (torch.cat(attended) if len(attended) > 1 else attended[0].contiguous())[None], None


def check_supported(model: nn.Module, *, max_length: int) -> None:
    """Refuse models whose attention cannot run through the registry and the slot cache.

    ``max_length`` is the longest sequence that will be held.
    """
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if config is None:
        _refuse(name, "it is no Hugging Face model, which has a config", "load one by AutoModelForCausalLM")
    reason = generation_obstacle(model)
    if reason is not None:
        _refuse(name, reason, _OTHER_MODEL)
    if not getattr(model, "_supports_attention_backend", False):
        _refuse(name, "its attention does not go through transformers' attention registry")
    head = getattr(model, "get_output_embeddings", None)
    if head is not None and head() is None:
        _refuse(name, "it has no head for the next token", "load it by AutoModelForCausalLM")
    text = config.get_text_config()
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if foreign:
        _refuse(name, f"it has layers of type {', '.join(foreign)}")
    failing = experts_obstacle(model)
    if failing is not None:
        _refuse(name, *failing)
    for kind, original in rotary_bounds(config):
        if max_length > original:
            _refuse(
                name,
                f"its {kind} rotary embedding changes with the batch's longest sequence beyond {original} positions "
                f"and this call may reach {max_length}",
                "lower max_new_tokens or max_length to stay within them",
            )


def check_attended(model: nn.Module, step: PackedStep) -> None:
    """Refuse a model after whose forward no layer attended through the slots: what it computed mixes samples."""
    if not step.attended:
        _refuse(type(model).__name__, "its layers do not look their attention up in its forward")


def check_loaded(model: nn.Module) -> None:
    """Refuse a model that has shapes alone."""
    if any(weight.is_meta for weight in model.parameters()):
        name = type(model).__name__
        _refuse(
            name,
            "its weights are on the meta device, which holds no numbers",
            "load it by from_pretrained, with nothing offloaded",
        )


def check_idle(model: nn.Module) -> None:
    """Refuse to generate from a model twice at a time: both calls would take its attention."""
    config: Any = model.config
    if config._attn_implementation == IMPLEMENTATION:
        raise GenerationError(
            f"{type(model).__name__} is generated from already, by another thread, or by the call that on_finished or "
            "an environment was called from; wait for that call's end, or give every engine a model of its own"
        )


def _refuse_attention(module: nn.Module, extra: str) -> None:
    raise GenerationError(
        f"{type(module).__name__} attends with {extra}, which in-process generation does not implement; {_OTHER_ENGINE}"
    )


def _refuse(name: str, reason: str, way_out: str = _OTHER_ENGINE) -> None:
    raise GenerationError(f"{name} cannot be generated from in process: {reason}; {way_out}")


def _decode(queries: Tensor, stored: Any, step: PackedStep, scores: Scores, window: int | None) -> Tensor:
    """Attend from the slots' tokens (N, H, D) to the slots' contents; return (N, H, D_v)."""
    laid_out = step.grid.lay_out(queries)
    attended = [_decode_grid(step.grid.of(laid_out), stored, step, scores, window)]
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
    for index in range(step.cached.num_blocks()):
        own, keys, values = step.cached.block(stored, index)
        count, length, groups = keys.shape[:3]
        # Query heads that share a key-value head become query positions: keys are then read once and never repeated.
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


def _read_segment(
    segment: Segment,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    stored: Any,
    step: PackedStep,
    scores: Scores,
    window: int | None,
) -> Tensor:
    """Attend from a segment's tokens to these and to what its slot holds before them; return (T, H, D_v)."""
    span = slice(segment.start, segment.stop)
    whole = (keys[span], values[span])
    if segment.begin:
        whole = step.cached.sequence(stored, segment.slots[0], segment.end)
    return _read(queries[span], whole, scores, window)


def _read(queries: Tensor, contents: tuple[Tensor, Tensor], scores: Scores, window: int | None) -> Tensor:
    """Attend from the last T tokens (T, H, D) of a sequence to all of it (S, H_kv, D), causally; return (T, H, D_v)."""
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
        mask = _causal_mask(begin, first, end, window, q.device)
        blocks.append(scores.attend(q[:, :, own], k[:, :, first:end], v[:, :, first:end], mask=mask))
    return torch.cat(blocks, 2)[0].transpose(0, 1)


def _causal_mask(begin: int, first: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys at positions first … end the queries at begin … end may see."""
    distance = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, end, device=device)
    return _may_see(distance, window)


def _may_see(distance: Tensor, window: int | None) -> Tensor:
    """Return whether a query sees a key so many positions before it; ``window``: the last ones that it sees."""
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to scores so that those count which are to be kept."""
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, float("-inf"))


def segments_of(lengths: Sequence[int], slots: Sequence[tuple[int, ...]], begins: Sequence[int]) -> tuple[Segment, ...]:
    """Return where tokens of sequences lie in the packed row; those of length zero have no segment."""
    segments, start = [], 0
    for length, held_by, begin in zip(lengths, slots, begins, strict=True):
        if length:
            segments.append(Segment(start, start + length, held_by, begin))
        start += length
    return tuple(segments)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend_slots)
