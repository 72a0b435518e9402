"""Files and variables of the environment that vLLM's process starts with."""

from __future__ import annotations

import copy
import os
import uuid
from pathlib import Path
from typing import Any

import torch

from lightning_realloc.batch.prompt_images import PromptImages
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.vllm.owned_folder import OwnedFolder
from lightning_realloc.generation.vllm.tensor_ranks import TensorRanks, visible_device

_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of torchrun, by which vLLM would take itself for one of the run's ranks."""
_DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process but this one and workers of tensor parallelism
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked worker would hold the connection open
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks next to each other would all be bound to the first cores
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def folder_with_settings(model: Any, tokenizer: Any, images: PromptImages | None) -> OwnedFolder:
    """Return a folder with the settings that vLLM starts with.

    Raises:
        GenerationError: if it cannot be written.
    """
    folder = None
    try:
        folder = OwnedFolder()
        _save_settings(folder.path, model, tokenizer, images)
    except OSError as error:
        if folder is not None:
            folder.cleanup()
        place = error.filename or "the folder of temporary files"
        raise GenerationError(
            f"{error.strerror or error}: files for vLLM cannot be written to {place}; free space there, or set TMPDIR "
            f"to another folder"
        ) from error
    return folder


def _save_settings(folder: Path, model: Any, tokenizer: Any, images: PromptImages | None) -> None:
    """Write the configuration that vLLM starts with, and its tokenizer or processor."""
    config = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]  # which vLLM would guess otherwise
    config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if images is not None:
        images.save_processor(folder)  # with its tokenizer


def variables(device: torch.device, ranks: TensorRanks | None, folder: Path) -> dict[str, str]:
    """Return the environment of vLLM's process, whose own files go with ``folder``."""
    given = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    made = {**_DEFAULTS, **given}
    if device.type == "cuda":
        devices = (visible_device(device),) if ranks is None else ranks.devices
        made["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        made["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of CUDA IPC are pickled
    most = 107 - len(f"/{uuid.UUID(int=0)}")  # characters; the path of a socket there ends with an id
    if len(str(folder)) <= most:
        made |= {"VLLM_RPC_BASE_PATH": str(folder), "TMPDIR": str(folder)}
    return made
