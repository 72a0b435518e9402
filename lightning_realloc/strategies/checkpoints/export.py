"""Export one role of a checkpoint folder as a Hugging Face folder, in one process without a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_realloc.errors import CheckpointError
from lightning_realloc.output_files import PARTIAL
from lightning_realloc.remote_output import local_copy, require_writable
from lightning_realloc.remote_path import AnyPath, RemotePath, as_path
from lightning_realloc.strategies.checkpoints import hf_folder, sharded_tensors
from lightning_realloc.strategies.checkpoints.adapter_files import ADAPTER_CONFIG_FILE, CONFIG_FILE
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    MODELS_FOLDER,
    check_files,
    content_folder,
    raise_on_all_ranks,
    read_description,
)
from lightning_realloc.strategies.checkpoints.model_card import ModelCard
from lightning_realloc.strategies.checkpoints.safety.last_pointer import pointed_checkpoint
from lightning_realloc.strategies.checkpoints.sharded_state import optimizer_key, weight_key
from lightning_realloc.strategies.checkpoints.stored_metadata import stored_tensors
from lightning_realloc.strategies.pool.weight_averages import AVERAGE


def export_checkpoint(
    checkpoint: str | Path | RemotePath,
    folder: str | Path | RemotePath,
    *,
    role: str = "actor",
    dtype: str | torch.dtype | None = None,
    merge: bool = False,
    averaged: bool = False,
    base: str | Path | None = None,
    trust_model_class: bool = False,
) -> AnyPath:
    """Write one role of a checkpoint as a folder that ``from_pretrained`` reads, and return that folder.

    A role with adapters is written as the folder of adapters that PEFT reads or, with ``merge``, as the merged model.
    The model card of the run is written, too, as ``SaveHuggingFace`` does.

    Args:
        checkpoint: Folder that ModelCheckpoint or ``trainer.save_checkpoint`` wrote, or its address.
        folder: Folder or address to write to: new, empty, or an earlier export, which is overwritten.
        role: Name of the role.
        dtype: Dtype of the written floating-point weights, such as ``"bfloat16"``; None keeps the dtype of training.
        merge: Whether adapters are merged into their base.
        averaged: Whether to write the averages that an ``EMA`` kept instead of the weights.
        base: Path or name of the base of adapters; None uses the one that the role was loaded from.
        trust_model_class: Whether the module of a class that is none of transformers may be imported, which runs its
            code.

    Raises:
        CheckpointError: if ``checkpoint`` is not a checkpoint or is damaged, has no weights or averages of the role,
            or ``folder`` holds other files or cannot be written.
    """
    source, target = pointed_checkpoint(as_path(checkpoint)), as_path(folder)
    with raise_on_all_ranks(source):
        kind = hf_folder.parse_dtype(dtype)
        description = read_description(source)
        content = content_folder(source, description)
        entry = _role_entry(source, description["roles"], role)
        model_class = hf_folder.import_model_class(entry["class"], role, trust_model_class=trust_model_class)
        check_output(target)
        check_files(source, description)
        weights = _read_weights(content, role, entry, averaged=averaged)
        with (
            local_copy(content / MODELS_FOLDER / role) as configs,
            hf_folder.uploaded_model(target, configs, merge=merge) as local_target,
        ):
            hf_folder.write_model(model_class, configs, weights, local_target, dtype=kind, merge=merge, base=base)
            if isinstance(target, RemotePath):  # the card is uploaded with the model
                _write_card(entry, local_target, title=target.name)
        if isinstance(target, Path):
            _write_card(entry, target, title=target.absolute().name)
    return target


def _write_card(entry: dict[str, Any], folder: Path, *, title: str) -> None:
    if entry.get("model_card") is not None:  # earlier versions stored none
        is_adapter = (folder / ADAPTER_CONFIG_FILE).is_file()
        ModelCard(**{**entry["model_card"], "title": title, "is_adapter": is_adapter}).write(folder)


def check_output(folder: AnyPath) -> None:
    """Refuse to write into a folder with other files.

    Raises:
        CheckpointError: unless ``folder`` is new, empty or an earlier export, and can be written to.
    """
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; a Hugging Face model is a folder, give another path")
    require_writable(folder)
    earlier = (CONFIG_FILE, ADAPTER_CONFIG_FILE)
    found = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    was_begun = any(name.startswith(PARTIAL) for name in found)  # a kill leaves it
    if found and not was_begun and not any((folder / name).is_file() for name in earlier):
        raise CheckpointError(
            f"{folder} holds files but no earlier export that could be overwritten; give a new or empty folder"
        )


def _role_entry(checkpoint: AnyPath, roles: dict[str, Any], role: str) -> dict[str, Any]:
    saved = [name for name, entry in roles.items() if entry["saved"]]
    if role not in saved:
        why = "it was not trained, and save_frozen_roles was off" if role in roles else "it has no such role"
        raise CheckpointError(f"{checkpoint} holds no weights of {role!r}: {why}; it holds those of {', '.join(saved)}")
    entry: dict[str, Any] = roles[role]
    return entry


def _read_weights(checkpoint: AnyPath, role: str, entry: dict[str, Any], *, averaged: bool) -> dict[str, Tensor]:
    stored = stored_tensors(checkpoint)  # may lack the base of adapters
    names = {weight_key(role, name): name for name in entry["parameters"] if weight_key(role, name) in stored}
    if averaged:
        keys = {name: optimizer_key(role, name, AVERAGE) for name in names.values()}
        if not any(key in stored for key in keys.values()):
            raise CheckpointError(
                f"{checkpoint} holds no averages of {role!r}: it was trained without the callback EMA, or saved before "
                f"its first update; leave --averaged out to write the weights"
            )
        # A weight that is frozen or never had a gradient has no average.
        names = {keys[name] if keys[name] in stored else key: name for key, name in names.items()}
    weights = {names[key]: tensor for key, tensor in sharded_tensors.read_whole(checkpoint, names).items()}
    return weights | {alias: weights[owner] for alias, owner in entry["tied"].items() if owner in weights}
