"""Find the layers of attention with latent keys and values, as in DeepSeek-V2, that tensor parallelism leaves whole.

A projection makes the latents and the rotary features that the keys of all heads share. Layers that are cut into heads
read all latents; the rotary features go to the heads directly.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_realloc.errors import LayoutError

LATENT = "mla_kv_a_proj"
"""Transformers' style of the projection to latents and rotary features."""
_BEFORE_LATENTS = ("q_a_proj", "q_a_layernorm", "kv_a_layernorm")
"""Layers that transformers' plans with this style leave out: those that they cut read all of their outputs."""


def layers_of_latents(model: nn.Module, projections: Iterable[str]) -> list[str]:
    """Return the names of the modules that make latents, with their adapters: every rank computes them whole.

    Raises:
        LayoutError: for an attention module that does not say how many features are rotary.
    """
    found: list[str] = []
    for name in projections:
        num_rotary(model, name)
        attention, _, own = name.rpartition(".")
        for part in (*_BEFORE_LATENTS, own):
            layer = getattr(model.get_submodule(attention), part, None)
            if layer is not None:
                found += [inner for inner, _ in layer.named_modules(prefix=f"{attention}.{part}")]
    return found


def num_rotary(model: nn.Module, projection: str) -> int:
    """Return how many of a projection's last features are rotary.

    Raises:
        LayoutError: for an attention module that does not say it.
    """
    number = getattr(model.get_submodule(projection.rpartition(".")[0]), "qk_rope_head_dim", None)
    if not isinstance(number, int):
        raise LayoutError(
            f"{projection}: the style {LATENT!r} needs the number of rotary features, as qk_rope_head_dim of its "
            "attention module; pass a tp_plan that says 'replicate' for all projections of this module"
        )
    return number
