"""Encode samples as bytes, and gather the samples or the exceptions of all ranks.

A column's metadata (name, kind, dtype, shape) is encoded as JSON, and its numbers as raw bytes. Python objects are not
sent, because every rank has them from the data loader.

If one rank alone raised, the others would wait in the next collective. So it sends its exception in place of its
samples, and every rank raises it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.errors import DataError
from lightning_realloc.runtime.messages.failure_store import peer_error
from lightning_realloc.runtime.messages.objects import gather_objects

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    )
}


def encode(samples: Samples) -> Tensor:
    """Return the samples' ids and tensor columns as one (bytes,) uint8 tensor on the host."""
    tensors: list[Tensor] = [samples.ids]
    header: list[list[object]] = []
    for name in sorted(samples.columns):
        column = samples.columns[name]
        assert not isinstance(column, tuple), "python objects are in Samples.data"
        values = column.values if isinstance(column, Ragged) else column
        dtype = str(values.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise DataError(f"column {name!r} has dtype {dtype}, which cannot be sent; use one of {', '.join(_DTYPES)}")
        header.append([name, isinstance(column, Ragged), dtype, list(values.shape)])
        if isinstance(column, Ragged):
            tensors.append(column.lengths)
        tensors.append(values.detach().to("cpu").contiguous())
    return torch.cat([*_json_bytes({"count": len(samples), "columns": header}), *map(_bytes, tensors)])


def decode(blob: Tensor) -> Samples:
    """Return the samples that `encode` was given, without their Python objects."""
    reader = _Reader(blob)
    header = reader.read_json()
    ids = reader.read_tensor(torch.int64, (header["count"],))
    columns: dict[str, Column] = {}
    for name, is_ragged, dtype, shape in header["columns"]:
        lengths = reader.read_tensor(torch.int64, (header["count"],)) if is_ragged else None
        values = reader.read_tensor(_DTYPES[dtype], tuple(shape))
        columns[name] = values if lengths is None else Ragged(values, lengths)
    return Samples(ids, columns)


def encode_message(info: Mapping[str, Any], samples: Mapping[str, Samples]) -> Tensor:
    """Return JSON-compatible values and named sets of samples as one (bytes,) uint8 tensor on the host."""
    blobs = {name: encode(named) for name, named in samples.items()}
    sizes = {name: blob.numel() for name, blob in blobs.items()}
    return torch.cat([*_json_bytes({"info": dict(info), "sizes": sizes}), *blobs.values()])


def decode_message(blob: Tensor) -> tuple[dict[str, Any], dict[str, Samples]]:
    """Return the arguments that `encode_message` was given, without Python objects of the samples."""
    reader = _Reader(blob)
    content = reader.read_json()
    return content["info"], {name: decode(reader.read_bytes(size)) for name, size in content["sizes"].items()}


def all_gather_samples(mine: Samples | Exception | None) -> Samples:
    """Return the samples of all ranks on every rank, in ascending order of their ids. Collective over all ranks.

    Args:
        mine: Samples of this rank. None if another rank contributes the same samples. An exception if this rank
            failed to make them.

    Raises:
        ReallocError: on every rank if one contributed an exception. The failed rank raises its own. Others raise the
            message of the lowest failed rank, in the same class if this package defines it.
    """
    own, sent = (mine if isinstance(mine, Exception) else None), None
    if isinstance(mine, Samples):
        try:
            sent = encode(mine).numpy().tobytes()
        except DataError as error:
            own = error
    everyone = gather_objects((None if own is None else (type(own).__name__, str(own)), sent))
    for rank, (failure, _) in enumerate(everyone):
        if failure is not None:
            if own is not None and (len(everyone) == 1 or dist.get_rank() == rank):
                raise own
            raise peer_error(rank, *failure) from own
    gathered = [decode(torch.frombuffer(bytearray(blob), dtype=torch.uint8)) for _, blob in everyone if blob]
    if not gathered:
        raise DataError("no rank contributed samples; a call must run on at least one rank")
    return Samples.concatenate(gathered).sorted_by_id()


def _json_bytes(value: Any) -> tuple[Tensor, Tensor]:
    """Return the size of a value's JSON text and the text itself, each as a (bytes,) uint8 tensor."""
    text = json.dumps(value).encode()
    return _bytes(torch.tensor([len(text)], dtype=torch.int64)), torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


class _Reader:
    """Reads a blob; every read starts at the end of the last one."""

    def __init__(self, blob: Tensor) -> None:
        self._blob = blob
        self._position = 0

    def read_bytes(self, num_bytes: int) -> Tensor:
        begin, self._position = self._position, self._position + num_bytes
        return self._blob[begin : self._position]

    def read_json(self) -> Any:
        """Return the value of a JSON text, which follows its size."""
        return json.loads(self.read_bytes(int(self.read_tensor(torch.int64, (1,)))).numpy().tobytes())

    def read_tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        # A copy, because a view of the blob may not be aligned for its dtype.
        return self.read_bytes(math.prod(shape) * dtype.itemsize).clone().view(dtype).reshape(shape)
