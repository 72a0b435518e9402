"""Getting what one call made to every rank that will use it, or the error that kept a rank from making it.

The bookkeeping of a column (name, kind, dtype, trailing shape) travels as JSON, its numbers as raw bytes: nothing is
pickled. Python objects never travel, every rank has them from the data loader.

A rank that raised alone would leave the others waiting in the next collective. So what it caught takes the place of
its samples, and every rank raises it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc import errors
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.errors import DataError, ReallocError
from lightning_realloc.runtime.compat import all_gather_single

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.float64, torch.float32,
                  torch.float16, torch.bfloat16)
}  # fmt: skip


def encode(samples: Samples) -> Tensor:
    """Return the samples' ids and tensor columns as one (bytes,) uint8 tensor on the host."""
    parts: list[Tensor] = [samples.ids]
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
            parts.append(column.lengths)
        parts.append(values.detach().to("cpu").contiguous())
    text = json.dumps({"count": len(samples), "columns": header}).encode()
    size = torch.tensor([len(text)], dtype=torch.int64)
    blobs = [_bytes(size), torch.frombuffer(bytearray(text), dtype=torch.uint8), *map(_bytes, parts)]
    return torch.cat(blobs)


def decode(blob: Tensor) -> Samples:
    """Return what :func:`encode` was given, less its python objects."""
    reader = _Reader(blob)
    header = reader.json()
    ids = reader.numbers(torch.int64, (header["count"],))
    columns: dict[str, Column] = {}
    for name, is_ragged, dtype, shape in header["columns"]:
        lengths = reader.numbers(torch.int64, (header["count"],)) if is_ragged else None
        values = reader.numbers(_DTYPES[dtype], tuple(shape))
        columns[name] = values if lengths is None else Ragged(values, lengths)
    return Samples(ids, columns)


def encode_message(info: Mapping[str, Any], samples: Mapping[str, Samples]) -> Tensor:
    """Return facts that JSON can hold and sets of samples, each under a name, as one (bytes,) uint8 tensor."""
    blobs = {name: encode(part) for name, part in samples.items()}
    text = json.dumps({"info": dict(info), "sizes": {name: blob.numel() for name, blob in blobs.items()}}).encode()
    size = torch.tensor([len(text)], dtype=torch.int64)
    return torch.cat([_bytes(size), torch.frombuffer(bytearray(text), dtype=torch.uint8), *blobs.values()])


def decode_message(blob: Tensor) -> tuple[dict[str, Any], dict[str, Samples]]:
    """Return what :func:`encode_message` was given, less the samples' python objects."""
    reader = _Reader(blob)
    content = reader.json()
    return content["info"], {name: decode(reader.take(size)) for name, size in content["sizes"].items()}


def all_gather_samples(mine: Samples | Exception | None, *, device: torch.device) -> Samples:
    """Return everybody's samples on every rank, in ascending order of their ids. Collective over all ranks.

    Args:
        mine: What this rank contributes; None where another rank already contributes the same samples; an exception
            where this rank failed to make them.
        device: Where the process group can communicate.

    Raises:
        ReallocError: on every rank when one contributed an exception: its own there, elsewhere one of the same class
            if that is this package's, and the message of the lowest rank that failed.
    """
    mine, blob = _outgoing(mine)
    parts = [blob]
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = list(_all_gather_bytes(blob, device))
    for rank, part in enumerate(parts):
        if _is_failure(part):
            _raise_failure(part, rank, mine if isinstance(mine, Exception) else None)
    made = [decode(part) for part in parts if part.numel()]
    if not made:
        raise DataError("no rank contributed samples; a call must run on at least one rank")
    return Samples.concatenate(made).sorted_by_id()


def _outgoing(mine: Samples | Exception | None) -> tuple[Samples | Exception | None, Tensor]:
    """Return what this rank contributes, and its bytes; samples that cannot be encoded become their error."""
    if mine is None:
        return None, torch.empty(0, dtype=torch.uint8)
    if isinstance(mine, Samples):
        try:
            return mine, encode(mine)
        except DataError as error:
            mine = error
    return mine, _encode_failure(mine)


def _encode_failure(error: Exception) -> Tensor:
    """Return an error's class and message; a negative size tells it from samples."""
    text = json.dumps({"error": type(error).__name__, "message": str(error)}).encode()
    size = torch.tensor([-len(text)], dtype=torch.int64)
    return torch.cat([_bytes(size), torch.frombuffer(bytearray(text), dtype=torch.uint8)])


def _is_failure(blob: Tensor) -> bool:
    return blob.numel() > 0 and int(_Reader(blob).numbers(torch.int64, (1,))[0]) < 0


def _raise_failure(blob: Tensor, rank: int, own: Exception | None) -> NoReturn:
    """Raise what rank ``rank`` caught, or, on that rank, raise it again."""
    if own is not None and (not dist.is_initialized() or dist.get_rank() == rank):
        raise own
    reader = _Reader(blob)
    content = reader.json()
    known = getattr(errors, content["error"], None)
    if isinstance(known, type) and issubclass(known, ReallocError):
        raise known(content["message"]) from own
    raise ReallocError(f"rank {rank} failed with {content['error']}: {content['message']}") from own


def _all_gather_bytes(blob: Tensor, device: torch.device) -> Sequence[Tensor]:
    world = dist.get_world_size()
    sizes = torch.empty(world, dtype=torch.int64, device=device)
    all_gather_single(sizes, torch.tensor([blob.numel()], dtype=torch.int64, device=device))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: blob.numel()] = blob.to(device)
    gathered = torch.empty(world * longest, dtype=torch.uint8, device=device)
    all_gather_single(gathered, padded)
    rows = gathered.cpu().view(world, longest)
    return [rows[rank, :size] for rank, size in enumerate(sizes.tolist())]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


class _Reader:
    """Walks through a blob; every read starts where the last one ended."""

    def __init__(self, blob: Tensor) -> None:
        self._blob = blob
        self._position = 0

    def take(self, num_bytes: int) -> Tensor:
        begin, self._position = self._position, self._position + num_bytes
        return self._blob[begin : self._position]

    def json(self) -> Any:
        """Return what JSON text says, which comes behind its length; that is negative before a failure's."""
        return json.loads(self.take(abs(int(self.numbers(torch.int64, (1,))[0]))).numpy().tobytes())

    def numbers(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        count = 1
        for extent in shape:
            count *= extent
        # A copy: a view of the blob need not be aligned for its dtype.
        return self.take(count * dtype.itemsize).clone().view(dtype).reshape(shape)
