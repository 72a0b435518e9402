"""Disable or merge a model's low-rank adapters temporarily, without changing its trained weights.

PEFT's layers are recognised by their attributes, so most of this module does not import PEFT. Merging works on copies
of the weights: merging into the weights and back would round twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from lightning_realloc.runtime.model.quantized import quantized_layers

ADAPTER = "default"
"""PEFT's name for the adapters of a model that has one set of them."""
FILE_PREFIX = "base_model.model."
"""Prefix of parameter names in PEFT's files."""
_RECORDED = "_recorded_adapters_change_outputs"
"""Attribute of a copy without weights with the answer for its original."""
_KEPT = "_kept_merged_weights"
"""Attribute of a model with the copies that `adapters_merged` keeps."""


def inject_adapters(config: Any, model: nn.Module) -> None:
    """Add adapters to a model, in place.

    PEFT warns of ranks for parameters that it finds among no modules, and applies them. It gives such ranks to experts
    itself, where ``target_modules`` names their layers as in models of transformers 4.
    """
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        if config.target_parameters or not (config.rank_pattern or config.alpha_pattern):
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        inject_adapter_in_model(config, model)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return name -> layer for every layer that holds adapters around a base layer."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module._modules.get("base_layer"), nn.Module) and hasattr(module, "merged_adapters")
    }


def adapters_change_outputs(model: nn.Module) -> bool:
    """Return whether a model's adapters change its outputs: whether a second factor of LoRA, zero at first, is not.

    A copy without weights needs the answer of `record_adapters`.
    """
    recorded: bool | None = vars(model).get(_RECORDED)
    factors = (weight for name, weight in model.named_parameters() if ".lora_B." in name)
    return any(bool(weight.any()) for weight in factors) if recorded is None else recorded


def record_adapters(empty: nn.Module, model: nn.Module) -> None:
    """Record in a copy without weights whether the adapters of the original change its outputs."""
    vars(empty)[_RECORDED] = adapters_change_outputs(model)


def trained_copies(model: nn.Module) -> dict[str, Any]:
    """Return name -> wrapper for every module that PEFT trains as a full copy (``modules_to_save``)."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "original_module") and isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)
    }


def use_trained_copies(model: nn.Module) -> None:
    """Replace PEFT's wrappers by the full copies that it trains (``modules_to_save``)."""
    for name, wrapper in trained_copies(model).items():
        model.set_submodule(name, wrapper.modules_to_save[wrapper.active_adapters[0]])


def adapter_config(model: nn.Module) -> Any | None:
    """Return PEFT's configuration of a model's adapters, also on stages without adapters; None for other models."""
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    return configs.get(ADAPTER)


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes, each ending with a dot, of a classifier's head modules; () for a language model."""
    if not isinstance(model, PreTrainedModel) or not type(model).__name__.endswith("Classification"):
        return ()
    return tuple(
        f"{name}."
        for name, child in model.named_children()
        if child is not model.base_model and any(True for _ in child.parameters())
    )


def saved_names(model: nn.Module) -> dict[str, str]:
    """Return name in PEFT's file (without prefix) -> parameter of the model, for adapters and heads."""
    from peft import get_peft_model_state_dict

    state: dict[str, Any] = {name: name for name, _ in model.named_parameters()}  # names in the place of tensors
    names: dict[str, str] = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return names | {name: name for name in state if name.startswith(head_names(model))}


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Make a model compute without its adapters inside the block."""
    # PEFT's own switch also changes which parameters require gradients.
    layers = [layer for layer in adapted_layers(model).values() if not layer.disable_adapters]
    assert not any(layer.merged for layer in layers), "merged adapters cannot be disabled: they are in the weights"
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def adapters_merged(model: nn.Module, *, keeps_copies: bool = False) -> Iterator[None]:
    """Make a model compute with merged copies of the adapted weights inside the block, as fast as its base model.

    Adapters are computed next to the weights under FSDP, whose forward gathers the weights, and over 4-bit weights,
    which a merge would round.

    Args:
        model: The model.
        keeps_copies: Whether the copies' memory stays for the next merge, whose copies then have the same addresses;
            not those of variants such as DoRA.
    """
    if not keeps_copies:
        free_merged(model)
    kept: dict[nn.Module, dict[str, nn.Parameter]] = vars(model).setdefault(_KEPT, {}) if keeps_copies else {}
    is_gathered = any(isinstance(module, FSDPModule) for module in model.modules())
    packed = set(quantized_layers(model).values())
    adapted = () if is_gathered else adapted_layers(model).values()
    layers = [layer for layer in adapted if layer.get_base_layer() not in packed]
    bases: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
    try:
        for layer in layers:
            base = layer.get_base_layer()
            own = bases.setdefault(base, dict(base._parameters))
            only = getattr(layer, "parameter_name", None)  # of experts; several layers may be around the same ones
            # PEFT's variants, such as DoRA, replace the copies.
            copies = {} if getattr(layer, "lora_variant", None) else kept.setdefault(base, {})
            base._parameters |= _copied(own if only is None else {only: own[only]}, copies)
            with torch.no_grad():
                layer.merge()
        yield
    finally:
        for base, parameters in bases.items():
            base._parameters.update(parameters)
        for layer in layers:
            layer.merged_adapters.clear()
            vars(layer).get("_caches", {}).clear()  # DoRA's data for undoing a merge


def _copied(
    parameters: Mapping[str, nn.Parameter | None], copies: dict[str, nn.Parameter]
) -> Mapping[str, nn.Parameter]:
    """Return copies of parameters, in the memory of ``copies`` if there are some."""
    for name, parameter in parameters.items():
        if parameter is not None and name in copies:
            copies[name].data.copy_(parameter.detach())
        elif parameter is not None:
            copies[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
    return copies


def free_merged(model: nn.Module) -> None:
    """Free the copies that `adapters_merged` keeps."""
    vars(model).pop(_KEPT, None)


def merge_permanently(model: nn.Module) -> nn.Module:
    """Merge a model's adapters into its weights, restore its plain layers, and return it."""
    with torch.no_grad():
        layers = adapted_layers(model)
        for layer in layers.values():
            layer.merge()
        for name, layer in layers.items():
            if not name.endswith(".base_layer"):  # an inner one of several around the same experts
                model.set_submodule(name, layer.get_base_layer())
    use_trained_copies(model)
    vars(model).pop("peft_config", None)
    return model
