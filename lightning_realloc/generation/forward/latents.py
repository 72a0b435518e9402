"""Keep the latents of multi-head latent attention in the cache, in place of every head's keys and values.

transformers' modules make latents, expand them by a method ``expand_kv``, and pass the result to the attention
function. `latents_kept` replaces that method during a generation, so that latents arrive. A sequence's first tokens
attend in the expanded form, which needs fewer operations. Others attend in the absorbed form, which reads fewer bytes:
a head's projection of keys moves to its queries, and that of values to its output.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_realloc.generation.cache.kv_cache import StepPlaces
from lightning_realloc.limits import ABSORBED_PROJECTION
from lightning_realloc.runtime.parallel.tensor_parallel import is_plain_linear

_METHOD = "expand_kv"
_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


class CachedHeads:
    """Relation of a layer's heads to the keys and values that its cache keeps; by default these are the heads' own."""

    def places(self, places: StepPlaces) -> StepPlaces:
        """Return the places at which the layer stores and reads."""
        return places

    def expand(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the heads' keys and values (N, H_kv, D), given those that the cache keeps."""
        return keys, values

    def absorb(self, queries: Tensor) -> Tensor:
        """Return the queries (N, H, D) for keys that the cache keeps, given the heads' own."""
        return queries

    def project(self, attended: Tensor) -> Tensor:
        """Return the heads' output (N, H, D_v), given the output for values that the cache keeps."""
        return attended


class LatentHeads(CachedHeads):
    """Heads that share one cached key, latents followed by rotary features, which is their value as well.

    A value is as wide as a key, since torch's fused attention on CPU needs that. The rotary part of outputs is dropped.

    Args:
        attention: The module, whose weights it reads in one forward.
        key: A key, for its dtype and device.
    """

    def __init__(self, attention: nn.Module, key: Tensor) -> None:
        self._attention: Any = attention
        self._rank = cast(int, attention.kv_lora_rank)
        self._key = key

    def places(self, places: StepPlaces) -> StepPlaces:
        return LatentPlaces(places)

    def expand(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        latents, rotary = (part.transpose(0, 1)[None] for part in keys.tensor_split([self._rank], -1))
        expanded = getattr(type(self._attention), _METHOD)(self._attention, latents, rotary)
        heads_keys, heads_values = (part[0].transpose(0, 1) for part in expanded)
        return heads_keys, heads_values

    def absorb(self, queries: Tensor) -> Tensor:
        of_keys, _ = self._weights
        plain, rotary = queries.tensor_split([of_keys.shape[1]], -1)
        return torch.cat([_by_head(plain, of_keys), rotary], -1)

    def project(self, attended: Tensor) -> Tensor:
        return _by_head(attended[..., : self._rank], self._weights[1].transpose(1, 2))

    @cached_property
    def _weights(self) -> tuple[Tensor, Tensor]:
        """Weights (H, D, rank) that expand latents to the heads' keys without rotary features, and to their values."""
        sizes = [self._attention.qk_nope_head_dim, self._attention.v_head_dim]
        weight = weight_of(getattr(self._attention, ABSORBED_PROJECTION), self._key.new_empty(0, self._rank))
        of_keys, of_values = weight.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
        return of_keys, of_values


class LatentPlaces(StepPlaces):
    """Places of keys that are their own values, which the cache keeps once."""

    def __init__(self, places: StepPlaces) -> None:
        self._places = places
        self.attended_length = places.attended_length

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        stored = self._places.store(layer, key, value[..., :0])
        return None if stored is None else (stored[0], stored[0])

    def sequence(self, stored: tuple[Tensor, Tensor], slot: int, end: int) -> tuple[Tensor, Tensor]:
        keys, _ = self._places.sequence(_without_values(stored), slot, end)
        return keys, keys

    def blocks(self, stored: tuple[Tensor, Tensor]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for rows, keys, _ in self._places.blocks(_without_values(stored)):
            yield rows, keys, keys


def _without_values(stored: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return stored[0], stored[0][..., :0]


def _by_head(features: Tensor, weights: Tensor) -> Tensor:
    """Return the products (N, H, D_out) of each head's features (N, H, D) and weights (H, D, D_out)."""
    return (features.transpose(0, 1) @ weights).transpose(0, 1)


def weight_of(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return the (D_out, D) weight by which a layer without bias multiplies ``inputs`` (…, D).

    Layers with adapters, hooks or packed weights show it by their outputs of the unit vectors.
    """
    if is_plain_linear(layer) and not layer._forward_hooks and not layer._forward_pre_hooks:
        return layer.weight
    outputs: Tensor = layer(torch.eye(inputs.shape[-1], dtype=inputs.dtype, device=inputs.device))
    return outputs.T


@contextmanager
def latents_kept(model: nn.Module) -> Iterator[None]:
    """Let attention modules that can expand their latents later pass latents to the attention function.

    They pass (1, 1, N, rank + rotary features) as keys and as values.
    """
    before = [(module, vars(module).get(_METHOD)) for module in latent_modules(model)]
    try:
        for module, _ in before:
            vars(module)[_METHOD] = _keep_latents
        yield
    finally:
        for module, method in before:
            if method is None:
                del vars(module)[_METHOD]


@contextmanager
def latents_given_back(model: nn.Module) -> Iterator[None]:
    """Undo `latents_kept` inside the block."""
    modules = [module for module in model.modules() if _keeps_latents(module)]
    try:
        for module in modules:
            del vars(module)[_METHOD]
        yield
    finally:
        for module in modules:
            vars(module)[_METHOD] = _keep_latents


def heads_of(attention: nn.Module, key: Tensor) -> CachedHeads:
    """Return the heads of an attention module in one forward; ``key`` is what it passes as keys."""
    return LatentHeads(attention, key) if _keeps_latents(attention) else CachedHeads()


def latent_modules(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules whose latents can be kept.

    Others expand their latents without ``expand_kv``, or by a layer with a bias, which has no absorbed form.
    """
    return [module for module in model.modules() if _can_keep_latents(module)]


def absorbed_projections(model: nn.Module) -> list[nn.Module]:
    """Return the layers that decoding steps do not call, as queries and outputs absorb them."""
    return [module.get_submodule(ABSORBED_PROJECTION) for module in latent_modules(model)]


def _can_keep_latents(module: nn.Module) -> bool:
    has_parts = hasattr(type(module), _METHOD) and all(isinstance(getattr(module, name, None), int) for name in _SIZES)
    projection = getattr(module, ABSORBED_PROJECTION, None)
    if not has_parts or not isinstance(projection, nn.Module) or "forward" in vars(module):
        return False
    is_own = vars(module).get(_METHOD, _keep_latents) is _keep_latents
    return is_own and not any("bias" in name for name, _ in projection.named_parameters())


def _keeps_latents(module: nn.Module) -> bool:
    return vars(module).get(_METHOD) is _keep_latents


def _keep_latents(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key and value that all heads share, in place of ``expand_kv``; a constant, which graphs check."""
    device, dtype = latents.device.type, latents.dtype
    if torch.is_autocast_enabled(device):  # norms return float32, and the expansion rounds it
        dtype = torch.get_autocast_dtype(device)
    key = torch.cat([latents.to(dtype), rotary.to(dtype)], -1)
    return key, key
