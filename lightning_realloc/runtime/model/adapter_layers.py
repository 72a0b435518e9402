"""Low-rank adapters inside a model: the same model without them, or with them merged into its weights, for a while.

Layers of PEFT's are known by what they have, so nothing here needs PEFT. Both states are the model's own and leave the
weights it is trained with as they are: to the last bit, where merging into them and back out would round twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

ADAPTER = "default"
"""What PEFT calls a model's only adapters."""
FILE_PREFIX = "base_model.model."
"""What PEFT puts before names in its files."""


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return name -> layer for every layer that holds adapters around a base layer."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), nn.Module) and hasattr(module, "merged_adapters")
    }


def trained_copies(model: nn.Module) -> dict[str, Any]:
    """Return name -> wrapper for every module that PEFT trains whole, in a copy next to it: ``modules_to_save``."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "original_module") and isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)
    }


def use_trained_copies(model: nn.Module) -> None:
    """Put the copies that PEFT trains whole in the places of their originals."""
    for name, wrapper in trained_copies(model).items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, wrapper.modules_to_save[wrapper.active_adapters[0]])


def adapter_config(model: nn.Module) -> Any | None:
    """Return PEFT's configuration of a model's adapters, None where there are none; also on stages without any."""
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    return configs.get(ADAPTER)


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names, each with a dot, of what a classifier has over its backbone; () for a language model."""
    if not isinstance(model, PreTrainedModel) or not type(model).__name__.endswith("Classification"):
        return ()
    return tuple(
        f"{name}."
        for name, child in model.named_children()
        if child is not model.base_model and any(True for _ in child.parameters())
    )


def saved_names(model: nn.Module) -> dict[str, str]:
    """Return name in PEFT's file, without its prefix -> parameter of the model, for adapters and heads."""
    from peft import get_peft_model_state_dict

    stand_ins: dict[str, Any] = {name: name for name, _ in model.named_parameters()}
    names: dict[str, str] = get_peft_model_state_dict(model, state_dict=stand_ins, save_embedding_layers=False)
    return names | {name: name for name in stand_ins if name.startswith(head_names(model))}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let a model compute as its base does."""
    # PEFT's own switch also decides which parameters have gradients, which is none of a forward pass's business.
    layers = [layer for layer in adapted_layers(model).values() if not layer.disable_adapters]
    assert not any(layer.merged for layer in layers), "what is merged cannot be off: its weights are other ones"
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def adapters_merged(model: nn.Module) -> Iterator[None]:
    """Let a model compute with merged copies of the weights that its adapters change, as fast as its base does.

    Weights that are sharded, whose forward gathers them, stay apart: their adapters are computed beside them.
    """
    layers = [] if any(isinstance(module, FSDPModule) for module in model.modules()) else adapted_layers(model).values()
    bases: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
    try:
        for layer in layers:
            base = layer.base_layer
            bases[base] = dict(base._parameters)
            for name, parameter in bases[base].items():
                if parameter is not None:
                    base._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            with torch.no_grad():
                layer.merge()
        yield
    finally:
        for base, parameters in bases.items():
            base._parameters.update(parameters)
        for layer in layers:
            layer.merged_adapters.clear()
            vars(layer).get("_caches", {}).clear()  # what DoRA keeps to undo a merge


def merge_for_good(model: nn.Module) -> nn.Module:
    """Put a model's adapters into its weights, and plain layers back in their places; returns the model."""
    with torch.no_grad():
        for name, layer in adapted_layers(model).items():
            layer.merge()
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, layer.base_layer)
    use_trained_copies(model)
    vars(model).pop("peft_config", None)
    return model
