"""Hand the weights of a model on this rank to vLLM: through shared memory, CUDA IPC, or a folder.

Parameters keep the names that they have in the model's checkpoint. Copies in shared memory are bounded: weights go in
chunks, each in the place of the one before.
"""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lightning_realloc.errors import GenerationError
from lightning_realloc.runtime.dtypes import dtype_name
from lightning_realloc.runtime.model.adapter_layers import adapted_layers
from lightning_realloc.runtime.model.image_inputs import placeholder_ids
from lightning_realloc.runtime.model.quantized import quantized_layers
from lightning_realloc.runtime.transfer.shared_memory import ALIGNMENT_BYTES, HEADER_BYTES, SharedSegment

_WRAPPED_TOWERS = frozenset({"clip_vision_model", "siglip_vision_model"})
"""Towers whose weights vLLM has in a module ``vision_model``, as checkpoints before transformers 5 do."""
_TOWER = re.compile(r"(\bvision_tower\.)(?!vision_model\.)")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> tensor for every weight and saved buffer, as in a checkpoint; of shared ones only the first name.

    Raises:
        GenerationError: for weights that vLLM cannot take over: adapters, 4-bit weights, shards.
    """
    for kind, found in (("adapters", adapted_layers(model)), ("4-bit weights", quantized_layers(model))):
        if found:
            raise GenerationError(
                f"engine='vllm' takes over whole weights, and {next(iter(found))} has {kind}; train whole weights, or "
                f"use engine='native'"
            )
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if hasattr(tensor, "full_tensor"):
            raise GenerationError(
                f"engine='vllm' takes over whole weights, and this rank holds a shard of {name}; generate in a layout "
                f"with tp=1 and fsdp=1"
            )
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    if placeholder_ids(model):  # their towers have other names in checkpoints, which vLLM expects
        weights = revert_weight_conversion(cast(PreTrainedModel, model), weights)
        tower = getattr(getattr(model.config, "vision_config", None), "model_type", None)
        if tower in _WRAPPED_TOWERS:
            weights = {_TOWER.sub(r"\1vision_model.", name): weight for name, weight in weights.items()}
    return weights


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of a weight in a chunk."""

    name: str
    begin: int
    """First byte."""


def plan_chunks(num_bytes: Mapping[str, int], *, most: int) -> tuple[tuple[Slot, ...], ...]:
    """Return weights of these sizes in chunks of at most ``most`` bytes, in order; a larger weight is a chunk alone."""
    chunks: list[tuple[Slot, ...]] = []
    chunk: list[Slot] = []
    used = 0
    for name, size in num_bytes.items():
        if chunk and used + size > most:
            chunks.append(tuple(chunk))
            chunk, used = [], 0
        chunk.append(Slot(name, used))
        used += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return (*chunks, tuple(chunk)) if chunk else tuple(chunks)


class SharedMemoryHandOver:
    """Copies weights into memory that vLLM's process maps, chunk by chunk.

    Larger chunks are fewer messages, and take more memory next to both copies.
    """

    backend = "shared_memory"

    def __init__(self, *, chunk_bytes: int = 256 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._segment: SharedSegment | None = None

    def chunks(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """Yield the description of each chunk, while it lies in the memory."""
        weights = weights_of(model)
        plan = plan_chunks({name: weight.nbytes for name, weight in weights.items()}, most=self._chunk_bytes)
        segment = self._segment_of(max(_end(chunk, weights) for chunk in plan))
        for chunk in plan:
            described = []
            for slot in chunk:
                weight = weights[slot.name]
                segment.tensor(slot.begin, weight.shape, weight.dtype).copy_(weight)
                described.append((slot.name, dtype_name(weight.dtype), list(weight.shape), slot.begin))
            handle = segment.handle
            yield {"path": handle.path, "token": handle.token.hex(), "begin": HEADER_BYTES, "tensors": described}
        segment.discard()

    def _segment_of(self, num_bytes: int) -> SharedSegment:
        try:
            if self._segment is not None and self._segment.handle.size >= num_bytes:
                self._segment.reserve()
            else:
                self._segment = SharedSegment.create(num_bytes, backing="memfd")
        except OSError as error:
            raise GenerationError(
                f"{num_bytes} bytes of shared memory for handing weights to vLLM cannot be had: {error}; use "
                f"engine='native', or a larger machine"
            ) from error
        return self._segment


class CudaIPCHandOver:
    """Gives vLLM handles of the weights where they are, on the device of both processes.

    Not tested: there was no machine with vLLM for CUDA.
    """

    backend = "ipc"

    def chunks(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """Yield one description of all weights, which stay as they are until vLLM has copied them."""
        from torch.multiprocessing.reductions import reduce_tensor

        weights = {name: weight.contiguous() for name, weight in weights_of(model).items()}
        uuid = str(torch.cuda.get_device_properties(next(iter(weights.values())).device).uuid)
        handles = [{uuid: reduce_tensor(weight)[1]} for weight in weights.values()]
        yield {
            "names": list(weights),
            "dtype_names": [dtype_name(weight.dtype) for weight in weights.values()],
            "shapes": [list(weight.shape) for weight in weights.values()],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }


def write_weights(model: Any, folder: Path) -> None:
    """Write a model's weights and configuration into a folder that vLLM reads."""
    model.config.save_pretrained(folder)
    weights = {name: weight.contiguous().cpu() for name, weight in weights_of(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _end(chunk: Sequence[Slot], weights: Mapping[str, Tensor]) -> int:
    return max(slot.begin + weights[slot.name].nbytes for slot in chunk)
