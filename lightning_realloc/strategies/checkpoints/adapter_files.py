"""Write adapters as the folder that PEFT reads, or merge them into their base model's weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from lightning_realloc.errors import CheckpointError
from lightning_realloc.output_files import added_files
from lightning_realloc.remote_path import require_files
from lightning_realloc.retries.attempts import retried
from lightning_realloc.runtime.model.adapter_layers import FILE_PREFIX, inject_adapters, merge_permanently, saved_names
from lightning_realloc.runtime.model.hub_kernels import refuse_kernels
from lightning_realloc.runtime.model.quantized import quantized_layers
from lightning_realloc.strategies.checkpoints.checkpoint_files import name_read_errors

CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_MODEL_FILES = (CONFIG_FILE, "generation_config.json", "buffers.safetensors")
"""Files that describe the base model, and are not copied next to the adapters."""


def read_config(model_class: type[PreTrainedModel], description: Path) -> Any:
    """Return a model's config. Raises CheckpointError if the file is missing or cannot be read."""
    with name_read_errors(description / CONFIG_FILE):
        (description / CONFIG_FILE).stat()  # without a file, transformers silently uses the class's defaults
        config = _config_of(model_class, description)
    refuse_kernels(config, str(description))
    return config


def _config_of(model_class: type[PreTrainedModel], source: str | Path) -> Any:
    """Return a config of the model's own class: AutoConfig knows registered types of models alone."""
    return model_class.config_class.from_pretrained(source)  # type: ignore[union-attr]


def write_adapters(
    model_class: type[PreTrainedModel],
    description: Path,
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write adapters, and a classifier's head, in the format that ``PeftModel.from_pretrained`` reads.

    Args:
        description: Folder with the configs of model and adapters. A tokenizer in it is copied.
        weights: Weights by the model's parameter names; must contain those of the adapters.
        dtype: Dtype of the written weights; None keeps their dtypes.
    """
    names = saved_names(_with_adapters(model_class, description))
    tensors = {FILE_PREFIX + saved: weights[local].contiguous() for saved, local in names.items()}
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    with written_as_a_whole(folder, ADAPTER_CONFIG_FILE) as partial:
        file_of_weights = partial / ADAPTER_WEIGHTS_FILE
        retried(lambda: save_file(tensors, file_of_weights, metadata={"format": "pt"}), folder)
        for file in description.iterdir():
            if file.is_file() and file.name not in _MODEL_FILES:
                shutil.copyfile(file, partial / file.name)


@contextmanager
def written_as_a_whole(folder: Path, config_file: str, *, replaces: str | None = None) -> Iterator[Path]:
    """Give a folder for a model's files, which `added_files` moves into ``folder``, its config last.

    Raises:
        CheckpointError: if the files cannot be written.
    """
    try:
        with added_files(folder, last=(config_file,), replaces=replaces) as partial:
            yield partial
    except (OSError, SafetensorError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(
            f"{folder} cannot be written: {cause}; earlier files there are unchanged, make room or give another folder"
        ) from error


def merged_weights(
    model_class: type[PreTrainedModel], description: Path, weights: Mapping[str, Tensor], base: str | Path | None
) -> dict[str, Tensor]:
    """Return the weights of an equivalent model without adapters.

    Args:
        description: Folder with the configs of model and adapters.
        weights: Weights of the adapters, and optionally of the base.
        base: Path or name of the base model, loaded if ``weights`` lack the base. None uses the name in the adapters'
            config.

    Raises:
        CheckpointError: if the base is unknown, cannot be loaded, or has other parameters or shapes.
    """
    model = _with_adapters(model_class, description)
    needed = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if needed - weights.keys():
        weights = _base_weights(model_class, description, needed, base) | dict(weights)
    if missing := sorted(needed - weights.keys()):
        raise CheckpointError(
            f"the base {base or '(named by the adapters)'} has no weights for {', '.join(missing[:4])}; give the one "
            f"that the adapters were trained on as base"
        )
    for name, parameter in model.named_parameters():
        if weights[name].shape != parameter.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(weights[name].shape)} in the base, but the adapters were trained on a base "
                f"with shape {tuple(parameter.shape)}; give that one as base"
            )
    # A merge adds to the adapted weights in place, and those of a running model are given.
    taken = {name: weights[name].to(torch.float32, copy=".base_layer." in name) for name in needed}
    model.load_state_dict(taken, strict=False, assign=True)
    merge_permanently(model)
    merged = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    dtype = reduce(torch.promote_types, (weights[name].dtype for name in needed))
    return {name: tensor.to(dtype) for name, tensor in merged.items()}


def _with_adapters(model_class: type[PreTrainedModel], description: Path) -> PreTrainedModel:
    """Return the model with adapters, on the meta device."""
    config: Any = _adapter_config(description)
    config.modules_to_save, config.inference_mode = None, False
    model_config = read_config(model_class, description)
    with torch.device("meta"):
        model = model_class(model_config)
        inject_adapters(config, model)
    return model


def _adapter_config(description: Path) -> Any:
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise CheckpointError(
            "writing adapters needs the package peft; pip install 'lightning-realloc[peft]'"
        ) from error
    with name_read_errors(description / ADAPTER_CONFIG_FILE):
        return PeftConfig.from_pretrained(str(description))


def _base_weights(
    model_class: type[PreTrainedModel], description: Path, needed: set[str], base: str | Path | None
) -> dict[str, Tensor]:
    """Return the base's weights under their names in the model with adapters."""
    source = base or _adapter_config(description).base_model_name_or_path
    if not source:
        raise CheckpointError(
            "these adapters do not name their base as a folder or model name, and it is not in the checkpoint; give "
            "one as base, or save checkpoints with ReallocStrategy(save_frozen_roles=True)"
        )
    try:
        require_files(source, CONFIG_FILE)
        refuse_kernels(_config_of(model_class, source), str(source))
        loaded: Any = model_class.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # damaged files raise errors of any class
        raise CheckpointError(
            f"the adapters' base {str(source)!r} could not be loaded ({type(error).__name__}: {error}); give it as base"
        ) from error
    model, found = loaded
    if quantized_layers(model):
        raise CheckpointError(
            f"the adapters' base {str(source)!r} holds 4-bit weights, and a merge would round them again; give the "
            f"unquantized model as base, or export the adapters alone"
        )
    named = model.named_parameters(remove_duplicate=False)
    plain = {name: parameter.detach() for name, parameter in named if name not in found["missing_keys"]}
    bare = {name: ".".join(part for part in name.split(".") if part != "base_layer") for name in needed}
    return {name: plain[own] for name, own in bare.items() if own in plain}
