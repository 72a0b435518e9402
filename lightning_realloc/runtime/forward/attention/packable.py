"""Refuse models and packs whose sequences packed attention cannot keep apart, before they run."""

from __future__ import annotations

import inspect

from torch import nn
from transformers import PreTrainedModel

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.model.batching_limits import (
    PLAIN_LAYERS,
    counts_positions_by_padding,
    experts_obstacle,
    layer_types,
    rotary_bounds,
)
from lightning_realloc.runtime.model.structure import find_transformers_model

ATTENTION = "realloc_packed"
"""Name under which the attention function is registered with transformers, and sdpa's masks with it."""


def check_packable(model: nn.Module) -> None:
    """Raise ConfigError for a transformers model that cannot run packed sequences; other modules pass."""
    hf_model = find_transformers_model(model)
    if hf_model is not None and hf_model.config.get_text_config()._attn_implementation != ATTENTION:
        refuse_unpackable(hf_model)


def refuse_unpackable(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model that cannot run packed sequences; the message says why."""
    name = type(model).__name__.removeprefix("FSDP")  # which sharding adds
    failing = experts_obstacle(model)
    if failing is not None:
        raise ConfigError(f"{name} cannot run: {'; '.join(failing)}")
    # Position ids and keyword arguments reach the layers through the base model in most classes' heads.
    parameters = inspect.signature(type(model.base_model).forward).parameters
    kinds = layer_types(model)
    reason = None
    if kinds - PLAIN_LAYERS:  # first: a recurrent model may fail the other checks, too
        reason = f"its layers {sorted(kinds - PLAIN_LAYERS)} may let tokens see past the end of their sequence"
    elif model._is_stateful and not kinds:  # a class that has recurrent layers in other configurations
        reason = "it carries a recurrent state from token to token, past the end of a sequence"
    elif not model._supports_attention_backend:
        reason = "its attention cannot be replaced (no _supports_attention_backend)"
    elif "position_ids" not in parameters:
        reason = "its forward takes no position_ids"
    elif not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        reason = "its forward passes no keyword arguments on to its attention layers"
    elif model.config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif counts_positions_by_padding(model):
        reason = "it counts positions from the one after its padding token, and packs count from 0"
    if reason is not None:
        raise ConfigError(
            f"{name} cannot run packed sequences: {reason}; use a decoder whose layers are of {sorted(PLAIN_LAYERS)}"
        )


def refuse_mixed_rotations(model: PreTrainedModel, packed: PackedBatch) -> None:
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
