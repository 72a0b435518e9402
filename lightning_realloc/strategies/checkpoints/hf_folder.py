"""Write a role as a Hugging Face folder that ``from_pretrained`` reads.

Every checkpoint already holds the model's config, generation config and tokenizer (`write_configs`). An export, from
a checkpoint or from a running strategy, adds the full weights (`write_model`).
"""

from __future__ import annotations

import copy
import importlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_warn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightning_realloc.data.images.sample_images import ImageProcessor
from lightning_realloc.errors import CheckpointError, DataError
from lightning_realloc.output_files import set_usual_modes
from lightning_realloc.remote_output import uploaded_folder
from lightning_realloc.remote_path import AnyPath
from lightning_realloc.retries.attempts import retried
from lightning_realloc.runtime.dtypes import dtype_named
from lightning_realloc.runtime.model.adapter_layers import adapter_config
from lightning_realloc.runtime.model.image_inputs import placeholder_ids
from lightning_realloc.strategies.checkpoints.adapter_files import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    merged_weights,
    read_config,
    write_adapters,
    written_as_a_whole,
)
from lightning_realloc.strategies.checkpoints.checkpoint_files import name_read_errors

GENERATION_CONFIG_FILE = "generation_config.json"
BUFFERS_FILE = "buffers.safetensors"


def class_path(model: nn.Module) -> str:
    """Return ``module:name`` of the class that a model had before FSDP replaced it."""
    original = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    return f"{original.__module__}:{original.__qualname__}"


def import_model_class(path: str, role: str, *, trust_model_class: bool = False) -> type[PreTrainedModel]:
    """Return the class that `class_path` named.

    Args:
        trust_model_class: Whether any module may be imported, which runs its code; otherwise only modules of
            transformers and of this package, and modules that are imported already.

    Raises:
        CheckpointError: if the class cannot be imported, or is not a transformers model.
    """
    module_name, _, name = path.partition(":")
    is_known = module_name.partition(".")[0] in ("transformers", "lightning_realloc") or module_name in sys.modules
    if not (trust_model_class or is_known):
        raise CheckpointError(
            f"{role} is a {path}, of another library than transformers, and importing it runs its code; if you trust "
            f"{module_name}, set trust_model_class=True, or --trust-model-class on the command line"
        )
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{role} is a {path}, which cannot be imported here ({error}); put its module on PYTHONPATH, or write the "
            f"model during training, with the callback SaveHuggingFace"
        ) from error
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise CheckpointError(
            f"{role} is a {path}, which is no transformers PreTrainedModel and cannot be written as a Hugging Face "
            f"folder; read its weights with lightning_realloc.strategies.checkpoints.sharded_tensors.read_whole"
        )
    return found


def write_configs(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Write a model's configs, tokenizer and persistent buffers, but no parameters.

    Writes nothing if the model is not a transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        return
    folder.mkdir(parents=True, exist_ok=True)
    _config_with_padding(model, tokenizer).save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        # save_pretrained refuses settings that some published models have
        model.generation_config.to_json_file(folder / GENERATION_CONFIG_FILE)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
        _write_processor(model, tokenizer, folder)
    config = adapter_config(model)
    if config is not None:
        config = copy.copy(config)
        config.inference_mode = True  # as PEFT writes it
        config.save_pretrained(str(folder))
    buffers = _persistent_buffers(model)
    if buffers:
        save_file(buffers, folder / BUFFERS_FILE)
        set_usual_modes(folder)


def _write_processor(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the processor of a model of images: the one that data was read with, else that of the tokenizer."""
    if not placeholder_ids(model):
        return
    try:
        found = ImageProcessor.in_use or ImageProcessor.load(tokenizer.name_or_path, {})
    except DataError as error:  # a model that was trained on text alone
        rank_zero_warn(f"the processor of images is left out of {folder}: {error}")
        return
    if found is not None:
        found.save(folder)


def _config_with_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedConfig:
    """Return a model's config; for a sequence classifier with the tokenizer's padding token.

    transformers scores the last token that is not padding, and refuses batches without a padding token. It would skip
    an end token that is also the padding token, although training trains its score. So that is not written.
    """
    config: PreTrainedConfig = model.config
    name = class_path(model).rpartition(":")[2]
    if tokenizer is None or not name.endswith("ForSequenceClassification"):
        return config
    text, pad, end = config.get_text_config(), tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is not None and pad != end and pad < text.vocab_size:
        config = copy.deepcopy(config)
        config.get_text_config().pad_token_id = pad
    elif text.pad_token_id is None or text.pad_token_id == end:
        rank_zero_warn(
            f"the written {name} cannot score batches with padding: pad_token={tokenizer.pad_token!r} of the tokenizer "
            f"must not be missing, its end token, or outside the model's {text.vocab_size} embeddings; give the "
            f"tokenizer another one"
        )
    return config


def write_model(
    model_class: type[PreTrainedModel],
    description: Path,
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    merge: bool = False,
    base: str | Path | None = None,
) -> None:
    """Write a folder that ``from_pretrained`` reads: full weights and the files that `write_configs` wrote.

    A model with adapters is written as the folder that PEFT reads or, with ``merge``, as a model without adapters.

    Args:
        description: Folder that `write_configs` wrote.
        weights: All parameters by name, tied ones under each of their names. The base of adapters may be missing.
        dtype: Dtype of the written floating-point weights; None keeps their dtypes.
        base: Path or name of the base, used if ``weights`` lack it; None uses the one it was loaded from.

    Raises:
        CheckpointError: if the weights do not fit the config, or the folder cannot be written, which then stays as it
            was.
    """
    if (description / ADAPTER_CONFIG_FILE).is_file() and not merge:
        write_adapters(model_class, description, weights, folder, dtype=dtype)
        return
    config = read_config(model_class, description)
    if (description / ADAPTER_CONFIG_FILE).is_file():
        weights = merged_weights(model_class, description, weights, base)
        vars(config).pop("quantization_config", None)  # the adapters' base may be; merged weights are not
    with torch.device("meta"):
        model = model_class(config)
    if (description / BUFFERS_FILE).is_file():
        with name_read_errors(description / BUFFERS_FILE):
            weights = {**weights, **load_file(description / BUFFERS_FILE)}
    if dtype is not None:
        weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
    try:
        missing, unknown = model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"the weights do not fit the sizes in {description / CONFIG_FILE}: {error}") from error
    model.tie_weights()
    left = [name for name in missing if model.get_parameter_or_buffer(name).is_meta]
    if left or unknown:
        raise CheckpointError(
            f"the weights do not fit {model_class.__name__}: missing {left[:4]}, unknown {list(unknown)[:4]}; "
            f"use the version of transformers that they were saved with"
        )
    _separate_shared_memory(model)
    with written_as_a_whole(folder, CONFIG_FILE, replaces="model*.safetensors*") as partial:
        retried(lambda: model.save_pretrained(partial), folder)
        for file in description.iterdir():
            if file.is_file() and file.name not in (CONFIG_FILE, BUFFERS_FILE, ADAPTER_CONFIG_FILE):
                shutil.copyfile(file, partial / file.name)


def write_running_model(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
    folder: AnyPath,
    *,
    role: str,
    dtype: torch.dtype | None = None,
    merge: bool = False,
) -> None:
    """Write the same folder as `write_model`, from a model that is laid out over ranks and its full ``weights``."""
    model_class = import_model_class(class_path(model), role)
    with tempfile.TemporaryDirectory() as description:
        write_configs(model, tokenizer, Path(description))
        with uploaded_model(folder, Path(description), merge=merge) as local:
            write_model(model_class, Path(description), weights, local, dtype=dtype, merge=merge)


def uploaded_model(folder: AnyPath, description: Path, *, merge: bool) -> AbstractContextManager[Path]:
    """Give a folder for `write_model`, whose files are uploaded at the end if ``folder`` is an address."""
    is_adapter = (description / ADAPTER_CONFIG_FILE).is_file() and not merge
    marker, weights = (ADAPTER_CONFIG_FILE, "adapter_model*") if is_adapter else (CONFIG_FILE, "model*.safetensors*")
    return uploaded_folder(folder, last=marker, replaces=weights)


def parse_dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    """Return ``torch.bfloat16`` for ``"bfloat16"``, ``"torch.bfloat16"`` and itself; None stays None.

    Raises:
        CheckpointError: if the name is not a floating-point dtype.
    """
    if given is None:
        return None
    dtype = dtype_named(str(given))
    if dtype is None or not dtype.is_floating_point:
        raise CheckpointError(f"dtype={given!r} is no floating-point dtype; use 'float32', 'bfloat16' or 'float16'")
    return dtype


def _separate_shared_memory(model: nn.Module) -> None:
    """Copy parameters that share memory but are not tied by the model's config.

    ``save_pretrained`` would write only one of them, and ``from_pretrained`` would not restore the other.
    """
    seen: set[int] = set()
    for parameter in model.parameters():  # yields tied parameters once
        if parameter.data_ptr() in seen:
            parameter.data = parameter.data.clone()
        seen.add(parameter.data_ptr())


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: buffer.detach().cpu().contiguous()
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
