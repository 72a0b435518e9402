"""Attention function that keeps the sequences of a pack apart.

Transformers separates the sequences of a row only if positions restart, the cache is off and no mask is given. A
mistake in any of the three is silent. This module therefore registers its own attention function. It takes the segments
as an argument and raises an error for a model that does not pass them on. It has two names: under that of packs no mask
is made, for which transformers would wait for the device to learn whether positions restart.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.attention.image_rows import (
    own_images,
    row_blocks,
    row_positions,
    tower_takes_part,
)
from lightning_realloc.runtime.forward.attention.packable import ATTENTION, refuse_mixed_rotations, refuse_unpackable
from lightning_realloc.runtime.forward.attention.query_blocks import ScoreRules
from lightning_realloc.runtime.forward.attention.segment_scores import attend_pieces, attend_whole_rows
from lightning_realloc.runtime.forward.attention.segments import Segments
from lightning_realloc.runtime.forward.attention.token_exchange import exchanged_keys, exchanged_queries, own_tokens
from lightning_realloc.runtime.forward.routers import routing_arguments
from lightning_realloc.runtime.forward.token_group import RowDivision, refuse_undivided, row_division
from lightning_realloc.runtime.model.dry_run import ForwardFailed, dry_run
from lightning_realloc.runtime.model.image_inputs import present_inputs
from lightning_realloc.runtime.model.quantized import quantized_layers
from lightning_realloc.runtime.model.structure import (
    check_extra_inputs,
    copy_without_weights,
    find_transformers_model,
    transformers_model,
)

_log = logging.getLogger(__name__)
ATTENTION_OF_PACKS = "realloc_segments"
"""Its name during the forward of a pack, for which there is no mask."""
_UNSUPPORTED_OPTIONS = ("position_bias", "cache")
_UNKNOWN_WINDOW = -1
_in_packed_forward: ContextVar[bool] = ContextVar("in_packed_forward", default=False)


def attention_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration whose attention functions run packs: that of the text decoder."""
    return model.config.get_text_config()


def check_segments(models: Iterable[nn.Module]) -> None:
    """Raise ConfigError for a model, not divided yet, whose attention does not get the segments of a pack.

    Runs a pack through a copy without weights on the meta device, once for models of one class and configuration.
    Models that cannot run there, as some with experts, raise when they run their first pack.
    """
    checked: list[tuple[type, PreTrainedConfig]] = []
    for model in models:
        known = find_transformers_model(model)
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
    attention_config(hf_model)._attn_implementation = ATTENTION_OF_PACKS
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
    if attention_config(hf_model)._attn_implementation == ATTENTION:
        return
    refuse_unpackable(hf_model)
    for name in (ATTENTION, ATTENTION_OF_PACKS):
        if name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(name, segment_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    hf_model.set_attn_implementation(
        ATTENTION if attention_config(hf_model) is hf_model.config else {"text_config": ATTENTION}
    )
    if attention_config(hf_model)._attn_implementation != ATTENTION:
        raise ConfigError(
            f"{type(hf_model).__name__} cannot run packed sequences: transformers cannot replace its attention; "
            f"use a model class that calls ALL_ATTENTION_FUNCTIONS"
        )


@contextmanager
def packed_attention(model: nn.Module, packed: PackedBatch) -> Iterator[dict[str, Any]]:
    """Yield the keyword arguments for calling ``model`` on this pack, or on this rank's slice, inside the block."""
    install_packed_attention(model)
    hf_model = transformers_model(model)
    division = row_division(hf_model, packed)
    refuse_mixed_rotations(hf_model, packed)
    if division is not None:
        refuse_undivided(hf_model, packed, division.group)
    if packed.extras:
        check_extra_inputs(hf_model, packed.extras)
    positions, further = row_positions(hf_model, packed), present_inputs(hf_model, packed.extras)
    blocks = row_blocks(hf_model, packed)
    segments = Segments(packed.lengths, packed.cu_seqlens, packed.shared, division, packed.input_ids, blocks)
    token = _in_packed_forward.set(True)
    attention_config(hf_model)._attn_implementation = ATTENTION_OF_PACKS
    try:
        inputs = {
            "input_ids": packed.input_ids if division is None else division.cut(packed.input_ids[0])[None],
            "position_ids": positions if division is None else _own_positions(positions, division),
            "use_cache": False,
            "packed_segments": segments,
            **further,
            **routing_arguments(model, packed, division),
        }
        with tower_takes_part(hf_model), own_images(hf_model, packed, division):
            yield inputs
    finally:
        attention_config(hf_model)._attn_implementation = ATTENTION
        _in_packed_forward.reset(token)


def _own_positions(positions: Tensor, division: RowDivision) -> Tensor:
    """Return a rank's (..., 1, n) slice of the positions (..., 1, N) of a row."""
    return division.cut(positions.movedim(-1, 0)).movedim(0, -1)


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
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend inside each segment: query (1, H, N, D), key and value (1, H_kv, N, D) -> (1, N, H, D).

    ``s_aux`` are transformers' (H,) attention sinks, and ``softcap`` its bound of scores.
    """
    if softcap is not None and s_aux is not None:
        raise ConfigError(
            f"{type(module).__name__} attends with sinks and with scores capped at {softcap}, and packed attention "
            f"computes one of both; use another model"
        )
    if packed_segments is None:
        if _in_packed_forward.get():
            raise ConfigError(
                f"{type(module).__name__} got packed sequences without their segments, so they would see each other: "
                f"its model does not pass keyword arguments on; use another model class"
            )
        if s_aux is not None or softcap is not None:  # which transformers' function would ignore
            if is_causal is None:
                is_causal = attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True)
            rules = ScoreRules(is_causal, scaling, dropout, None, s_aux, softcap)
            return rules.attend(query, key, value, attention_mask).transpose(1, 2).contiguous(), None
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
    rules = ScoreRules(is_causal, scaling, dropout, sliding_window, s_aux, softcap)
    division = packed_segments.division
    if division is None:
        return attend_whole_rows(query, key, value, packed_segments, rules), None
    return _attend_divided(query, key, value, packed_segments, division, rules), None


def _attend_divided(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, division: RowDivision, rules: ScoreRules
) -> Tensor:
    """Attend from and to this rank's slice of a row, in exchange with the ranks that hold the others."""
    group = division.group
    query, (key, value) = exchanged_queries(query, division), (exchanged_keys(part, division) for part in (key, value))
    if rules.sinks is not None:
        rules = replace(rules, sinks=rules.sinks.chunk(group.head_shares)[group.head_share])
    if division.pieces:
        return own_tokens(attend_pieces(query, key, value, division, rules), division)
    key, value = (states[:, :, : division.num_tokens] for states in (key, value))
    return own_tokens(attend_whole_rows(query, key, value, segments, rules), division)


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
