"""Attention function that keeps the sequences of a pack apart.

Transformers separates the sequences of a row only if positions restart, the cache is off and no mask is given. A
mistake in any of the three is silent. This module therefore registers its own attention function. It takes the segments
as an argument and raises an error for a model that does not pass them on. It has two names: under that of packs no mask
is made, for which transformers would wait for the device to learn whether positions restart.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.routers import routing_arguments
from lightning_realloc.runtime.forward.sinks import attend_with_sinks
from lightning_realloc.runtime.forward.token_group import (
    TokenGroup,
    own_tokens,
    refuse_undivided,
    token_group,
    whole_rows,
)
from lightning_realloc.runtime.forward.varlen import attend_varlen, can_attend_varlen
from lightning_realloc.runtime.model.batching_limits import (
    PLAIN_LAYERS,
    counts_positions_by_padding,
    experts_obstacle,
    layer_types,
    rotary_bounds,
)
from lightning_realloc.runtime.model.dry_run import ForwardFailed, dry_run
from lightning_realloc.runtime.model.quantized import quantized_layers
from lightning_realloc.runtime.model.structure import check_extra_inputs, copy_without_weights

_log = logging.getLogger(__name__)
ATTENTION = "realloc_packed"
"""Name under which the attention function is registered with transformers, and sdpa's masks with it."""
ATTENTION_OF_PACKS = "realloc_segments"
"""Its name during the forward of a pack, for which there is no mask."""
_UNSUPPORTED_OPTIONS = ("softcap", "position_bias", "cache")
_UNKNOWN_WINDOW = -1
_in_packed_forward: ContextVar[bool] = ContextVar("in_packed_forward", default=False)


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent segments of equal length that see equally many shared tokens."""

    count: int
    """Number of segments."""
    length: int
    """Tokens of each segment."""
    shared: int
    """Shared prompt tokens that each segment sees. The last segment with ``shared=0`` before the run holds them."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Boundaries of the sequences of a pack, an argument of the attention function."""

    lengths: tuple[int, ...]
    """Tokens of each of the B sequences in the row."""
    cu_seqlens: Tensor
    """(B + 1,) int32 cumulative lengths on the model's device."""
    shared: tuple[int, ...]
    """Shared prompt tokens that each sequence sees. The last sequence before it with a 0 here holds them."""
    tokens: TokenGroup | None = None
    """Ranks that divide the tokens of the row; None: the model runs on all of them."""
    row: Tensor | None = None
    """(1, N) token ids of the whole row, by which a pipeline's stage knows its micro-batch."""
    masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    """Additive masks, made once for all layers."""

    @property
    def runs(self) -> list[Run]:
        """Runs of adjacent sequences that are alike, in order, such as a group's responses of one length."""
        kinds = itertools.groupby(zip(self.lengths, self.shared, strict=True))
        return [Run(len(list(members)), length, shared) for (length, shared), members in kinds]


def check_packable(model: nn.Module) -> None:
    """Raise ConfigError for a transformers model that cannot run packed sequences; other modules pass."""
    hf_model = _find_transformers_model(model)
    if hf_model is not None and hf_model.config._attn_implementation != ATTENTION:
        _refuse_unpackable(hf_model)


def check_segments(models: Iterable[nn.Module]) -> None:
    """Raise ConfigError for a model, not divided yet, whose attention does not get the segments of a pack.

    Runs a pack through a copy without weights on the meta device, once for models of one class and configuration.
    Models that cannot run there, as some with experts, raise when they run their first pack.
    """
    checked: list[tuple[type, PreTrainedConfig]] = []
    for model in models:
        known = _find_transformers_model(model)
        if known is None or quantized_layers(model):  # a copy shares quantized layers
            continue
        kind = (type(model), known.config)
        if kind not in checked:
            checked.append(kind)
            _check_segments(model)


def _check_segments(model: nn.Module) -> None:
    copy = copy_without_weights(model).to("meta")
    install_packed_attention(copy)
    hf_model = transformers_model(copy)
    hf_model.config._attn_implementation = ATTENTION_OF_PACKS
    token, ids = _in_packed_forward.set(True), torch.zeros(1, 2, dtype=torch.long, device="meta")
    segments = Segments((2,), torch.tensor([0, 2], dtype=torch.int32), (0,))
    try:
        dry_run(copy, input_ids=ids, position_ids=ids, packed_segments=segments)
    except ForwardFailed as error:
        _log.debug("%s cannot run on the meta device: %s", type(model).__name__, error)
    finally:
        _in_packed_forward.reset(token)


def install_packed_attention(model: nn.Module) -> None:
    """Make ``model`` keep packed sequences apart; other forward passes work as with sdpa.

    The function stays installed, because a backward pass that recomputes activations calls it again.

    Raises:
        ConfigError: if the model cannot run packed sequences; the message says why.
    """
    hf_model = transformers_model(model)
    if hf_model.config._attn_implementation == ATTENTION:
        return
    _refuse_unpackable(hf_model)
    for name in (ATTENTION, ATTENTION_OF_PACKS):
        if name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(name, segment_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    hf_model.set_attn_implementation(ATTENTION)
    if hf_model.config._attn_implementation != ATTENTION:
        raise ConfigError(
            f"{type(hf_model).__name__} cannot run packed sequences: transformers cannot replace its attention; "
            f"use a model class that calls ALL_ATTENTION_FUNCTIONS"
        )


@contextmanager
def packed_attention(model: nn.Module, packed: PackedBatch) -> Iterator[dict[str, Any]]:
    """Yield the keyword arguments for calling ``model`` on this pack, or on this rank's slice, inside the block."""
    install_packed_attention(model)
    hf_model = transformers_model(model)
    tokens = token_group(hf_model)
    _refuse_mixed_rotations(hf_model, packed)
    if tokens is not None:
        refuse_undivided(hf_model, packed, tokens)
    if packed.extras:
        check_extra_inputs(hf_model, packed.extras)
    token = _in_packed_forward.set(True)
    hf_model.config._attn_implementation = ATTENTION_OF_PACKS
    try:
        yield {
            "input_ids": packed.input_ids if tokens is None else tokens.cut(packed.input_ids[0])[None],
            "position_ids": packed.position_ids if tokens is None else tokens.cut(packed.position_ids[0])[None],
            "use_cache": False,
            "packed_segments": Segments(packed.lengths, packed.cu_seqlens, packed.shared, tokens, packed.input_ids),
            **packed.extras,
            **routing_arguments(model, packed, tokens),
        }
    finally:
        hf_model.config._attn_implementation = ATTENTION
        _in_packed_forward.reset(token)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model: ``model`` itself, or the one that it wraps (adapters, compile)."""
    if (found := _find_transformers_model(model)) is not None:
        return found
    raise ConfigError(
        f"packed sequences need a transformers model; {type(model).__name__} is none and contains none, "
        f"build it from PreTrainedModel or with AutoModelForCausalLM"
    )


def _find_transformers_model(model: nn.Module) -> PreTrainedModel | None:
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def _refuse_unpackable(model: PreTrainedModel) -> None:
    name = type(model).__name__.removeprefix("FSDP")  # which sharding adds
    failing = experts_obstacle(model)
    if failing is not None:
        raise ConfigError(f"{name} cannot run: {'; '.join(failing)}")
    # Position ids and keyword arguments reach the layers through the base model in most classes' heads.
    parameters = inspect.signature(type(model.base_model).forward).parameters
    text, kinds = model.config.get_text_config(), layer_types(model)
    reason = None
    if not model._supports_attention_backend:
        reason = "its attention cannot be replaced (no _supports_attention_backend)"
    elif "position_ids" not in parameters:
        reason = "its forward takes no position_ids"
    elif not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        reason = "its forward passes no keyword arguments on to its attention layers"
    elif kinds - PLAIN_LAYERS:
        reason = f"its layers {sorted(kinds - PLAIN_LAYERS)} let tokens see past the end of their sequence"
    elif model._is_stateful and not kinds:  # a class that has recurrent layers in other configurations
        reason = "it carries a recurrent state from token to token, past the end of a sequence"
    elif model.config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif getattr(text, "attn_logit_softcapping", None) is not None:
        reason = f"its attention caps scores (attn_logit_softcapping={text.attn_logit_softcapping})"
    elif counts_positions_by_padding(model):
        reason = "it counts positions from the one after its padding token, and packs count from 0"
    if reason is not None:
        raise ConfigError(
            f"{name} cannot run packed sequences: {reason}; use a decoder whose layers are of {sorted(PLAIN_LAYERS)}"
        )


def _refuse_mixed_rotations(model: PreTrainedModel, packed: PackedBatch) -> None:
    """Raise ConfigError for sequences whose rotary frequencies differ from those of the row's longest sequence."""
    lengths = [length + shared for length, shared in zip(packed.lengths, packed.shared, strict=True)]
    longest, shortest = max(lengths), min(lengths)
    for kind, original in rotary_bounds(model.config):
        if longest > original and shortest <= (original if kind == "longrope" else longest - 1):
            raise ConfigError(
                f"{type(model).__name__} cannot run sequences of {shortest} and {longest} tokens in one pack: beyond "
                f"{original} tokens the longest sequence of a row sets the frequencies of its {kind} rotary "
                f"embedding for all; keep prompt and response within {original} tokens"
            )


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = _UNKNOWN_WINDOW,
    packed_segments: Segments | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend inside each segment: query (1, H, N, D), key and value (1, H_kv, N, D) -> (1, N, H, D).

    ``s_aux`` are transformers' (H,) attention sinks.
    """
    if packed_segments is None:
        if _in_packed_forward.get():
            raise ConfigError(
                f"{type(module).__name__} got packed sequences without their segments, so they would see each other: "
                f"its model does not pass keyword arguments on; use another model class"
            )
        if s_aux is not None:  # which transformers' function would ignore
            if is_causal is None:
                is_causal = attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True)
            attended = attend_with_sinks(
                query, key, value, attention_mask, s_aux, dropout=dropout, is_causal=is_causal, scaling=scaling
            )
            return attended.transpose(1, 2).contiguous(), None
        window = None if sliding_window == _UNKNOWN_WINDOW else sliding_window
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, sliding_window=window, **options
        )
    _refuse_other_scores(module, attention_mask, options)
    if sliding_window == _UNKNOWN_WINDOW:
        _refuse_masked_window(module, packed_segments)
        sliding_window = None
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if any(packed_segments.shared) and not is_causal:
        raise ConfigError(
            f"{type(module).__name__} attends to later tokens, so its prompt states depend on the response and "
            f"responses cannot share them; set share_prompts=False on the algorithm"
        )
    settings = _Attention(is_causal, scaling, dropout, sliding_window, s_aux)
    tokens = packed_segments.tokens
    if tokens is None:
        return _attend(query, key, value, packed_segments, settings), None
    size, heads = sum(packed_segments.lengths), query.shape[1]
    query, key, value = (whole_rows(states, tokens, size, num_queries=heads) for states in (query, key, value))
    if s_aux is not None:
        settings = replace(settings, sinks=s_aux.chunk(tokens.size)[tokens.index])
    return own_tokens(_attend(query, key, value, packed_segments, settings), tokens), None


def _refuse_other_scores(module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a layer whose scores are more than the products of queries and keys."""
    unsupported = [name for name in _UNSUPPORTED_OPTIONS if options.get(name) is not None]
    if unsupported:
        raise ConfigError(
            f"packed attention does not support {unsupported}, which {type(module).__name__} passes; "
            f"use a model whose attention is plain softmax attention"
        )
    if attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} attends with a mask of its own, which packed attention would ignore; use a "
            f"model that leaves masks to transformers"
        )


def _refuse_masked_window(module: nn.Module, segments: Segments) -> None:
    """Raise ConfigError for a layer whose window is in its config and mask only: packs do not use the mask."""
    declared = getattr(getattr(module, "config", None), "sliding_window", None)
    longest = max(map(operator.add, segments.lengths, segments.shared))
    if declared and longest > declared:  # 0: none, as Qwen2-MoE writes it
        raise ConfigError(
            f"{type(module).__name__} attends with a sliding window of {declared} by its mask only, "
            f"which packed attention ignores, and a sample has {longest} tokens; keep prompt and response within "
            f"{declared}, or use a model that passes its window to its attention"
        )


@dataclass(frozen=True, slots=True)
class _Attention:
    is_causal: bool
    scaling: float | None
    dropout: float
    sliding_window: int | None
    sinks: Tensor | None


def _attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, settings: _Attention) -> Tensor:
    """Attend on whole rows: (1, H, N, D) -> (1, N, H, D)."""
    is_plain = settings.is_causal and settings.dropout == 0.0 and not any(segments.shared)
    if not is_plain or not can_attend_varlen(query, value):
        return _attend_by_segment(query, key, value, segments, settings)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    longest, scaling, window = max(segments.lengths), settings.scaling, settings.sliding_window
    ends, sinks = segments.cu_seqlens, settings.sinks
    return attend_varlen(q, k, v, ends, longest, scaling=scaling, window=window, sinks=sinks)[None]


def _attend_by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, settings: _Attention) -> Tensor:
    """Attend to one run of equal segments at a time, as a batch."""
    runs = segments.runs
    # split, not slices: the backward of a slice fills a whole (N, ...) gradient with zeros, once per segment.
    sizes = [run.count * run.length for run in runs]
    by_run = zip(*(torch.split(tensor[0].transpose(0, 1), sizes) for tensor in (query, key, value)), runs, strict=True)
    outputs: list[Tensor] = []
    owner = key, value
    for *packed, run in by_run:
        # (count * length, H, D) -> (count, H, length, D)
        q, k, v = (tensor.unflatten(0, (run.count, run.length)).transpose(1, 2) for tensor in packed)
        if run.shared:
            prompts = (held[:, :, : run.shared].expand(run.count, -1, -1, -1) for held in owner)
            k, v = (torch.cat([prompt, own], dim=2) for prompt, own in zip(prompts, (k, v), strict=True))
        else:
            owner = k[-1:], v[-1:]
        mask = _mask(q, k.shape[2], segments, settings)
        is_causal = settings.is_causal and mask is None
        attended = attend_with_sinks(
            q, k, v, mask, settings.sinks, dropout=settings.dropout, is_causal=is_causal, scaling=settings.scaling
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).unsqueeze(0)


def _mask(query: Tensor, num_keys: int, segments: Segments, settings: _Attention) -> Tensor | None:
    """Return the additive (queries, keys) mask, aligned at the end; None where `is_causal` suffices.

    A sliding window covers the last ``sliding_window`` tokens, including the token itself.
    """
    num_queries, window = query.shape[2], settings.sliding_window
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
        seen = seen.tril(first if settings.is_causal else first + (window or num_keys) - 1)
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        segments.masks[name] = mask.masked_fill_(~seen, float("-inf"))
    return segments.masks[name]
