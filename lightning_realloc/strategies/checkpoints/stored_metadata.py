"""Read the ``.metadata`` file of a distributed checkpoint without running code from it.

Torch pickles that file and reads it with ``pickle.load``, which calls any function that the file names. The unpickler
here allows only the classes that torch itself writes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from operator import add
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_realloc.errors import CheckpointError
from lightning_realloc.layout.region import Region, tiles
from lightning_realloc.remote_path import AnyPath
from lightning_realloc.retries.attempts import retried
from lightning_realloc.runtime.dtypes import dtype_named
from lightning_realloc.strategies.checkpoints.checkpoint_files import DamagedCheckpoint, name_read_errors

METADATA_FILE = ".metadata"


class StoredTensor(NamedTuple):
    """Global shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    """Shape of the global tensor."""
    dtype: torch.dtype
    """Dtype of its elements."""


def read_metadata(folder: AnyPath) -> Metadata:
    """Return the description of a checkpoint's tensors and of the file that stores each region.

    Raises:
        CheckpointError: if the file is missing or damaged, or names an unexpected class.
    """
    file = folder / METADATA_FILE
    with name_read_errors(file):
        content = retried(file.read_bytes, file)
        metadata = _MetadataUnpickler(io.BytesIO(content), file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise DamagedCheckpoint(f"{file} holds no description of tensors; another program wrote it")
        _require_whole_tensors(file, metadata)
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise CheckpointError(
                    f"{file} names {stored.relative_path!r}, but the files of a checkpoint lie in its own folder; "
                    f"torch did not write it, use another checkpoint"
                )
    return metadata


def stored_tensors(folder: AnyPath) -> dict[str, StoredTensor]:
    """Return the name, global shape and dtype of every tensor under ``folder``; errors are those of `read_metadata`."""
    return {
        name: StoredTensor(tuple(entry.size), entry.properties.dtype)
        for name, entry in read_metadata(folder).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _require_whole_tensors(file: AnyPath, metadata: Metadata) -> None:
    """Require that the regions of every tensor cover it once, and that a file is named for each.

    Otherwise a part of a tensor would keep the value that it had before it was read.
    """
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.properties.dtype, torch.dtype):
            raise DamagedCheckpoint(f"{file} does not describe {name!r} as a tensor")
        regions = [Region(tuple(chunk.offsets), tuple(map(add, chunk.offsets, chunk.sizes))) for chunk in entry.chunks]
        if not tiles(regions, tuple(entry.size)):
            raise DamagedCheckpoint(f"{file} does not name regions that cover {name!r} once")
        for chunk in entry.chunks:
            if not isinstance(metadata.storage_data.get(MetadataIndex(name, chunk.offsets)), _StorageInfo):
                raise DamagedCheckpoint(f"{file} names no file for the region of {name!r} at {tuple(chunk.offsets)}")


def require_listed(content: AnyPath, description: Mapping[str, Any]) -> None:
    """Require that every file with a region is in the list of files of a checkpoint, whose contents are verified.

    Raises:
        CheckpointError: for a file that is not in the list.
    """
    files = {name.rpartition("/")[2] for name in description["files"]}
    for stored in read_metadata(content).storage_data.values():
        if stored.relative_path not in files:
            raise DamagedCheckpoint(
                f"{content / METADATA_FILE} names {stored.relative_path}, which is not in the checkpoint's list of "
                f"files, so nothing tells whether it is as it was written"
            )


def _memory_format(owner: object, name: str) -> _MEM_FORMAT_ENCODING:
    if owner is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("getattr is allowed for memory formats only")
    return _MEM_FORMAT_ENCODING[name]


_CLASSES = (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(one.__module__, one.__qualname__): one for one in _CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("builtins", "getattr"): _memory_format,  # how Python before 3.11.4 pickles an Enum
    # The folder that torch wrote to. Python 3.13 pickles paths under another module name.
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{(module, "WindowsPath"): PureWindowsPath for module in ("pathlib", "pathlib._local")},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles classes that torch writes into ``.metadata``, and refuses all others before importing them."""

    def __init__(self, stream: IO[bytes], file: AnyPath) -> None:
        super().__init__(stream)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        dtype = dtype_named(name) if module == "torch" else None
        found = dtype or _ALLOWED.get((module, name))
        if found is None:
            raise CheckpointError(
                f"{self._file} names {module}.{name}, which no checkpoint needs and which could run code; use a "
                f"checkpoint from a source that you trust"
            )
        return found
