"""How do adapters leave a run? As the folder that PEFT writes and reads, or merged into their base."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from lightning_realloc.errors import CheckpointError
from lightning_realloc.runtime.model.adapter_layers import FILE_PREFIX, merge_permanently, saved_names
from lightning_realloc.strategies.checkpoints.checkpoint_files import reading

CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_MODEL_FILES = (CONFIG_FILE, "generation_config.json", "buffers.safetensors")
"""What is the base's, not the adapters'."""


def read_config(model_class: type[PreTrainedModel], description: Path) -> Any:
    """Return a model's config.

    Raises:
        CheckpointError: for a file that is missing or cannot be read.
    """
    with reading(description / CONFIG_FILE):
        (description / CONFIG_FILE).stat()  # where it is missing, transformers takes the class's defaults
        return model_class.config_class.from_pretrained(description)  # type: ignore[union-attr]


def write_adapters(
    model_class: type[PreTrainedModel],
    description: Path,
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write adapters, and a classifier's head, as ``PeftModel.from_pretrained`` reads them.

    Args:
        description: Where the model's config and the adapters' lie, and perhaps a tokenizer, which goes with them.
        weights: At least those of the adapters, under the model's names.
        dtype: By default as they are.
    """
    names = saved_names(_with_adapters(model_class, description))
    tensors = {FILE_PREFIX + saved: weights[local].contiguous() for saved, local in names.items()}
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})
    for file in description.iterdir():
        if file.is_file() and file.name not in _MODEL_FILES:
            shutil.copy2(file, folder / file.name)


def merged_weights(
    model_class: type[PreTrainedModel], description: Path, weights: Mapping[str, Tensor], base: str | Path | None
) -> dict[str, Tensor]:
    """Return all weights of a model without adapters that computes what the one with them does.

    Args:
        description: Where the model's config and the adapters' lie.
        weights: Of the adapters, and perhaps of the base, which is overwritten.
        base: What the base is loaded from where ``weights`` lack it; by default what the adapters' config names.

    Raises:
        CheckpointError: for a base that is unknown, cannot be loaded, or does not fit.
    """
    model = _with_adapters(model_class, description)
    needed = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if needed - weights.keys():
        weights = _base_weights(model_class, description, needed, base) | dict(weights)
    if missing := sorted(needed - weights.keys()):
        raise CheckpointError(
            f"the base {base or '(what the adapters name)'} has no weights for {', '.join(missing[:4])}; give the one "
            f"that the adapters were trained over as base"
        )
    for name, parameter in model.named_parameters():
        if weights[name].shape != parameter.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(weights[name].shape)} in the base, and the adapters were trained over one "
                f"of shape {tuple(parameter.shape)}; give that one as base"
            )
    model.load_state_dict({name: weights[name].float() for name in needed}, strict=False, assign=True)
    merge_permanently(model)
    merged = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    dtype = reduce(torch.promote_types, (weights[name].dtype for name in needed))
    return {name: tensor.to(dtype) for name, tensor in merged.items()}


def _with_adapters(model_class: type[PreTrainedModel], description: Path) -> PreTrainedModel:
    """Return the model on the meta device."""
    config: Any = _adapter_config(description)
    config.modules_to_save, config.inference_mode = None, False
    from peft import inject_adapter_in_model

    model_config = read_config(model_class, description)
    with torch.device("meta"):
        model = model_class(model_config)
        inject_adapter_in_model(config, model)
    return model


def _adapter_config(description: Path) -> Any:
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise CheckpointError(
            "adapters are written with the package peft; pip install 'lightning-realloc[peft]'"
        ) from error
    with reading(description / ADAPTER_CONFIG_FILE):
        return PeftConfig.from_pretrained(str(description))


def _base_weights(
    model_class: type[PreTrainedModel], description: Path, needed: set[str], base: str | Path | None
) -> dict[str, Tensor]:
    """Return the base's weights under the names that they have beside adapters."""
    source = base or _adapter_config(description).base_model_name_or_path
    if not source:
        raise CheckpointError(
            "the base of these adapters was no folder or name, and is not in the checkpoint; give one as base, or save "
            "checkpoints with ReallocStrategy(save_frozen_roles=True)"
        )
    try:
        loaded: Any = model_class.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the adapters' base {str(source)!r} could not be loaded ({error}); give it as base"
        ) from error
    model, found = loaded
    named = model.named_parameters(remove_duplicate=False)
    plain = {name: parameter.detach() for name, parameter in named if name not in found["missing_keys"]}
    return {
        name: plain[name.replace(".base_layer.", ".")] for name in needed if name.replace(".base_layer.", ".") in plain
    }
