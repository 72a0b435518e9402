"""What makes a transformers model depend on more than a sequence's own tokens and their places, or fail by itself?

Asked of models before their sequences share a row: for generation, and for packed forward passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import bfloat16, float16, float32, nn

_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies are other ones beyond a length."""
_GROUPED_DTYPES = (float32, bfloat16, float16)


def rotary_bounds(config: Any) -> Iterable[tuple[str, int]]:
    """Yield the kind and the original length of each rotary embedding that changes beyond it."""
    for rope in _rotary_settings(config.get_text_config()):
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind in _BY_LENGTH and original is not None:
            yield kind, original


def _rotary_settings(config: Any) -> list[dict[str, Any]]:
    """Return the rotary settings of a config: one for all layers, or one per type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    context = getattr(config, "max_position_embeddings", None)
    original = getattr(config, "original_max_position_embeddings", None) or context
    several = [settings] if "rope_type" in settings else [s for s in settings.values() if isinstance(s, dict)]
    return [{"original_max_position_embeddings": original, **one} for one in several]


def counts_positions_by_padding(model: nn.Module) -> bool:
    """Return whether a model counts positions from behind its padding token, as RoBERTa does, and not from 0.

    Its own ``generate`` counts from 0, other than its forward: transformers gives positions where there are none.
    """
    names = ("create_position_ids_from_input_ids", "position_embeddings")
    return any(all(hasattr(module, name) for name in names) for module in model.modules())


def why_no_response(model: nn.Module) -> str | None:
    """Return why neither engine can go on with a prompt by a model; None: both may try."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "it is an encoder-decoder model, which does not go on with a prompt"
    if counts_positions_by_padding(model):
        return "its forward counts positions from behind its padding token, and generation counts from 0"
    return None


def why_experts_fail(model: nn.Module) -> tuple[str, str] | None:
    """Return why the experts of a model cannot multiply, and what to do; None: they can, or it has none.

    How experts multiply is young in transformers: this function alone asks.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if not hasattr(module, "_apply_gate") or getattr(config, "_experts_implementation", None) != "grouped_mm":
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and parameter.dtype not in _GROUPED_DTYPES:
                return (
                    f"its experts are in {str(parameter.dtype).removeprefix('torch.')}, and torch multiplies all of a "
                    f"layer's at once in float32, bfloat16 and float16 alone",
                    "load it in one of these, or let experts multiply one by one: "
                    "model.set_experts_implementation('eager')",
                )
    return None
