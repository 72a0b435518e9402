"""Hand the weights of a model on this rank to vLLM: through shared memory, CUDA IPC, or a folder.

Parameters keep the names that they have in the model's checkpoint. Copies in shared memory are bounded: weights go in
chunks, each in the place of the one before.
"""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.vllm.lone_adapters import adapter_names
from lightning_realloc.generation.vllm.tensor_ranks import TensorRanks, file_name, num_bytes
from lightning_realloc.limits import VLLM_CHUNK_BYTES
from lightning_realloc.runtime.dtypes import dtype_name
from lightning_realloc.runtime.model.image_inputs import placeholder_ids
from lightning_realloc.runtime.model.quantized import quantized_layers
from lightning_realloc.runtime.transfer.point_to_point import region_view
from lightning_realloc.runtime.transfer.shared_memory import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    SegmentHandle,
    SharedSegment,
)

_WRAPPED_TOWERS = frozenset({"clip_vision_model", "siglip_vision_model"})
"""Towers whose weights vLLM has in a module ``vision_model``, as checkpoints before transformers 5 do."""
_TOWER = re.compile(r"(\bvision_tower\.)(?!vision_model\.)")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> tensor for every weight and saved buffer, as in a checkpoint; of shared ones only the first name.

    Under tensor parallelism these are shards. Layers with adapters give their base weights, which hold the adapters
    while they are merged.

    Raises:
        GenerationError: for weights that vLLM cannot take over: 4-bit weights, shards of FSDP.
    """
    if found := quantized_layers(model):
        raise GenerationError(
            f"engine='vllm' takes over whole weights, and {next(iter(found))} has 4-bit weights; train whole weights, "
            f"or use engine='native'"
        )
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    factors = set(adapter_names(model))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if hasattr(tensor, "full_tensor"):
            raise GenerationError(
                f"engine='vllm' takes over whole weights, and this rank holds a shard of {name}; generate in a layout "
                f"with fsdp=1"
            )
        if id(tensor) not in seen and name not in factors:
            seen.add(id(tensor))
            weights[file_name(name)] = tensor.detach()
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
    """Copies weights into memory that vLLM's processes map, chunk by chunk.

    Larger chunks are fewer messages, and take more memory next to both copies. Tensor-parallel ranks write their shards
    into one memory, so that none holds more of the model than its shards and a chunk.

    Args:
        ranks: The ranks that hold shards of the weights; None: this rank holds whole ones.
    """

    backend = "shared_memory"

    def __init__(self, *, ranks: TensorRanks | None = None, chunk_bytes: int = VLLM_CHUNK_BYTES) -> None:
        self._ranks, self._chunk_bytes = ranks, chunk_bytes
        self._segment: SharedSegment | None = None

    def chunks(self, weights: Mapping[str, Tensor], kind: str = "weights") -> Generator[dict[str, Any]]:
        """Yield the description of each chunk, while it lies in the memory. ``kind`` names the weights to other ranks.

        Close the iterator if a chunk is not taken: other ranks wait.
        """
        plan = self._plan(weights)
        segment = self._segment_of(max(end for _, end in plan))
        handle = segment.handle
        if self._ranks is not None:
            self._ranks.exchange({"do": "give", "kind": kind, "handle": [handle.path, handle.size, handle.token.hex()]})
        for chunk, _ in plan:
            self._write(segment, chunk, weights)
            self._meet_others()
            described = [
                (slot.name, dtype_name(weights[slot.name].dtype), list(self._shape(slot.name, weights)), slot.begin)
                for slot in chunk
            ]
            is_taken = False
            try:
                yield {"path": handle.path, "token": handle.token.hex(), "begin": HEADER_BYTES, "tensors": described}
                is_taken = True
            finally:
                if self._ranks is not None:
                    self._ranks.exchange(is_taken)
        segment.discard()

    def give(self, weights: Mapping[str, Tensor], handle: Sequence[Any]) -> None:
        """Write this rank's shards into the memory of the first rank, which calls `chunks`."""
        assert self._ranks is not None
        path, size, token = handle
        segment, problem = None, None
        try:
            segment = SharedSegment.attach(SegmentHandle(path, size, bytes.fromhex(token)))
        except OSError as error:
            problem = str(error)
        for chunk, _ in self._plan(weights):
            if segment is not None:
                self._write(segment, chunk, weights)
            self._ranks.exchange(problem)
            if not self._ranks.exchange(None)[0]:
                return

    def _meet_others(self) -> None:
        """Wait until other ranks have written their shards.

        Raises:
            GenerationError: if one cannot write.
        """
        problems = [] if self._ranks is None else [one for one in self._ranks.exchange(None) if one is not None]
        if problems:
            assert self._ranks is not None
            self._ranks.exchange(False)
            raise GenerationError(
                f"ranks of a tensor-parallel group cannot hand their shards to vLLM: {problems[0]}; let them see each "
                f"other's processes, or generate in a layout with tp=1"
            )

    def num_bytes(self, weights: Mapping[str, Tensor]) -> int:
        """Return the bytes of whole weights, each of which was copied once by one of the ranks."""
        return sum(num_bytes(self._shape(name, weights), weight.dtype) for name, weight in weights.items())

    def _plan(self, weights: Mapping[str, Tensor]) -> list[tuple[tuple[Slot, ...], int]]:
        """Return the chunks of whole weights, with the end of each."""
        sizes = {name: num_bytes(self._shape(name, weights), weight.dtype) for name, weight in weights.items()}
        chunks = plan_chunks(sizes, most=self._chunk_bytes)
        return [(chunk, max(slot.begin + sizes[slot.name] for slot in chunk)) for chunk in chunks]

    def _shape(self, name: str, weights: Mapping[str, Tensor]) -> tuple[int, ...]:
        local = tuple(weights[name].shape)
        return local if self._ranks is None else self._ranks.whole_shape(name, local)

    def _write(self, segment: SharedSegment, chunk: Sequence[Slot], weights: Mapping[str, Tensor]) -> None:
        for slot in chunk:
            weight = weights[slot.name]
            whole = segment.tensor(slot.begin, self._shape(slot.name, weights), weight.dtype)
            pieces = None if self._ranks is None else self._ranks.own_pieces(slot.name)
            if pieces is None:
                whole.copy_(weight)
            for piece in pieces or ():
                local = region_view(weight, piece.offset, piece.region.shape)
                region_view(whole, piece.region.starts, piece.region.shape).copy_(local)

    def _segment_of(self, size: int) -> SharedSegment:
        try:
            if self._segment is not None and self._segment.handle.size >= size:
                self._segment.reserve()
            else:
                self._segment = SharedSegment.create(size, backing="memfd")
        except OSError as error:
            raise GenerationError(
                f"{size} bytes of shared memory for handing weights to vLLM cannot be had: {error}; use "
                f"engine='native', or a larger machine"
            ) from error
        return self._segment


class CudaIPCHandOver:
    """Gives vLLM handles of the weights where they are, on the device of both processes.

    Not tested: there was no machine with vLLM for CUDA.
    """

    backend = "ipc"

    def chunks(self, weights: Mapping[str, Tensor], kind: str = "weights") -> Generator[dict[str, Any]]:
        """Yield one description of all weights, which stay as they are until vLLM has copied them."""
        from torch.multiprocessing.reductions import reduce_tensor

        weights = {name: weight.contiguous() for name, weight in weights.items()}
        uuid = str(torch.cuda.get_device_properties(next(iter(weights.values())).device).uuid)
        handles = [{uuid: reduce_tensor(weight)[1]} for weight in weights.values()]
        yield {
            "names": list(weights),
            "dtype_names": [dtype_name(weight.dtype) for weight in weights.values()],
            "shapes": [list(weight.shape) for weight in weights.values()],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }

    def num_bytes(self, weights: Mapping[str, Tensor]) -> int:
        """Return the bytes that vLLM copied."""
        return sum(weight.nbytes for weight in weights.values())


def write_weights(model: Any, folder: Path) -> int:
    """Write a model's weights and configuration into a folder that vLLM reads; return the weights' bytes."""
    model.config.save_pretrained(folder)
    weights = {name: weight.contiguous().cpu() for name, weight in weights_of(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.nbytes for weight in weights.values())
