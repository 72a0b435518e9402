"""Low-rank adapters that go to vLLM alone: their names and settings, and the refusal of those that it cannot take."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.vllm.tensor_ranks import file_name
from lightning_realloc.runtime.model.adapter_layers import adapted_layers

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Bounds of ranks that vLLM can make room for."""
_SETTINGS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""Fields of PEFT's configuration that vLLM computes scales from."""


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> tensor for every factor of a model's adapters, named as in PEFT's file without its prefix."""
    parameters = dict(model.named_parameters())
    return {file_name(name): parameters[name].detach() for name in adapter_names(model)}


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of a model's parameters and buffers that belong to adapters."""
    return [
        f"{layer_name}.{name}"
        for layer_name, layer in adapted_layers(model).items()
        for name in layer.state_dict()
        if not name.startswith("base_layer.")
    ]


def adapter_settings(model: nn.Module) -> dict[str, Any]:
    """Return the settings of a model's adapters as vLLM's ``PEFTHelper`` takes them.

    Raises:
        GenerationError: for adapters that vLLM cannot add to its base weights.
    """
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    config = next(iter(configs.values()))
    reason = f"{len(configs)} sets of adapters" if len(configs) > 1 else _obstacle(model, config)
    if reason is not None:
        raise GenerationError(
            f"engine='vllm' cannot add {reason} to its base weights; hand merged weights over by "
            f"VLLMOptions(merge_adapters=True), or use engine='native'"
        )
    patterns = {name: dict(getattr(config, name)) for name in ("rank_pattern", "alpha_pattern")}
    return {name: getattr(config, name) for name in _SETTINGS} | patterns | {"target_modules": []}


def max_rank(settings: dict[str, Any]) -> int:
    """Return the bound of ranks that vLLM makes room for."""
    most = max(settings["r"], *settings["rank_pattern"].values()) if settings["rank_pattern"] else settings["r"]
    return next(bound for bound in _RANKS if bound >= most)


def _obstacle(model: nn.Module, config: Any) -> str | None:
    """Return adapters, by the setting that makes them, which vLLM cannot add to base weights; None if it can."""
    most = max([config.r, *config.rank_pattern.values()])
    settings = {
        "DoRA (use_dora=True)": config.use_dora,
        "adapters of stacked experts (target_parameters)": getattr(config, "target_parameters", None),
        "trained copies (modules_to_save)": config.modules_to_save,
        "adapters with biases": config.bias != "none" or getattr(config, "lora_bias", False),
        f"adapters of rank {most}, which is above {_RANKS[-1]},": most > _RANKS[-1],
    }
    found = next((name for name, is_set in settings.items() if is_set), None)
    if found is not None:
        return found
    layers = adapted_layers(model).items()
    return next((f"adapters of the embeddings {name}" for name, layer in layers if _is_embedding(layer)), None)


def _is_embedding(layer: Any) -> bool:
    return isinstance(layer.get_base_layer(), nn.Embedding)
