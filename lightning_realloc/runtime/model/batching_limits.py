"""Find properties of a transformers model that prevent packing, batching, generation or training.

Sequences can share a row only if each result depends on the sequence's own tokens and positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import bfloat16, float16, float32, nn

from lightning_realloc.limits import EXPERT_COUNT_KEYS
from lightning_realloc.runtime.dtypes import dtype_name

_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies change beyond a length."""
PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Types of layers, by transformers' names, whose tokens attend to earlier ones by their distance alone."""
_GROUPED_DTYPES = (float32, bfloat16, float16)


def rotary_bounds(config: Any) -> Iterable[tuple[str, int]]:
    """Yield kind and original length of each rotary embedding whose frequencies change beyond that length."""
    for rope in _rotary_settings(config.get_text_config()):
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind in _BY_LENGTH and original is not None:
            yield kind, original


def _rotary_settings(config: Any) -> list[dict[str, Any]]:
    """Return the rotary settings of a config: one for all layers, or one for each type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    context = getattr(config, "max_position_embeddings", None)
    original = getattr(config, "original_max_position_embeddings", None) or context
    several = [settings] if "rope_type" in settings else [s for s in settings.values() if isinstance(s, dict)]
    return [{"original_max_position_embeddings": original, **one} for one in several]


def counts_positions_by_padding(model: nn.Module) -> bool:
    """Return whether a model's positions start after the index of its padding token, as RoBERTa's do, instead of at 0.

    Only its forward does so. Its ``generate`` counts from 0, because transformers passes position ids there.
    """
    names = ("create_position_ids_from_input_ids", "position_embeddings")
    return any(all(hasattr(module, name) for name in names) for module in model.modules())


def attends_to_later_tokens(model: nn.Module) -> bool:
    """Return whether a model is an encoder: none of its attention layers is causal, as far as they say."""
    layers = (vars(module) for module in model.modules() if hasattr(module, "layer_idx"))
    causal = {layer["is_causal"] for layer in layers if isinstance(layer.get("is_causal"), bool)}
    return causal == {False}


def generation_obstacle(model: nn.Module) -> str | None:
    """Return the reason why no engine can generate with a model; None if there is none."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, which does not continue a prompt"
    if counts_positions_by_padding(model):
        return "its forward counts positions from the one after its padding token, and generation counts from 0"
    if attends_to_later_tokens(model):
        return "its tokens attend to later ones, as in an encoder"
    return None


def has_plain_layers(model: nn.Module) -> bool:
    """Return whether all layers are of `PLAIN_LAYERS`, as far as the model's configuration says."""
    return layer_types(model) <= PLAIN_LAYERS


def layer_types(model: nn.Module) -> frozenset[str]:
    """Return transformers' types of the model's layers; none if its configuration does not say."""
    config: Any = getattr(model, "config", None)
    return frozenset(getattr(config and config.get_text_config(), "layer_types", None) or ())


def has_experts(model: nn.Module) -> bool:
    """Return whether a model's configuration declares a mixture of experts."""
    config: Any = model.config
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in EXPERT_COUNT_KEYS)


def experts_obstacle(model: nn.Module) -> tuple[str, str] | None:
    """Return why a model's experts cannot run, and the way out; None if they can or the model has none.

    Transformers' interface for experts still changes; only this function depends on it.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if not hasattr(module, "_apply_gate") or getattr(config, "_experts_implementation", None) != "grouped_mm":
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and parameter.dtype not in _GROUPED_DTYPES:
                return (
                    f"its experts are in {dtype_name(parameter.dtype)}, and torch multiplies all experts of a layer "
                    f"at once in float32, bfloat16 and float16 only",
                    "load it in one of these, or let experts multiply one by one: "
                    "model.set_experts_implementation('eager')",
                )
    return None
