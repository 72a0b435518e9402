"""Write and read sharded tensors with torch's distributed checkpoint, described by the package's own regions.

Torch's planners support only DTensors. A rank here may hold several boxes of a fused weight, or a plain tensor that is
a tensor-parallel slice. Two small planners write and read exactly the regions that a rank holds. So a checkpoint can
be read into any other layout and any other number of ranks.
"""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_realloc.errors import CheckpointError
from lightning_realloc.layout.region import Region
from lightning_realloc.layout.sharding import Piece
from lightning_realloc.remote_path import AnyPath, RemotePath
from lightning_realloc.strategies.checkpoints.checkpoint_files import name_read_errors, raise_on_all_ranks
from lightning_realloc.strategies.checkpoints.remote.remote_files import RemoteFiles, read_slice
from lightning_realloc.strategies.checkpoints.stored_metadata import METADATA_FILE, read_metadata


class StoredTensor(NamedTuple):
    """Global shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    """Shape of the global tensor."""
    dtype: torch.dtype
    """Dtype of its elements."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensor:
    """One rank's shard of a global tensor."""

    shape: tuple[int, ...]
    """Shape of the global tensor."""
    dtype: torch.dtype
    """Dtype of every shard."""
    pieces: tuple[Piece, ...]
    """Regions that this rank holds; () on a rank that holds nothing."""
    local: Tensor | None
    """This rank's local tensor, in which each piece begins at its offset; None on a rank that holds nothing."""

    def view(self, starts: tuple[int, ...]) -> Tensor:
        """Return the view of the local tensor with the region that begins at ``starts``."""
        piece = next(piece for piece in self.pieces if piece.region.starts == starts)
        if self.local is None:
            raise KeyError(f"this rank holds no tensor for its region at {starts}")
        view = self.local
        for dim, (offset, extent) in enumerate(zip(piece.offset, piece.region.shape, strict=True)):
            view = view.narrow(dim, offset, extent)
        return view

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Return the nonempty regions as torch's chunks."""
        return [
            ChunkStorageMetadata(torch.Size(piece.region.starts), torch.Size(piece.region.shape))
            for piece in self.pieces
            if piece.region.numel
        ]


State = Mapping[str, ShardedTensor]
"""Name in the checkpoint -> this rank's shard."""
SHARD_SUFFIX = ".distcp"
"""Suffix of the files with tensors."""
VISIBLE_WITHIN_S = 30.0
"""Seconds within which a file has to be seen by other nodes; NFS may remember for as long that it was missing."""
_POLL_S = 0.1
"""Seconds between two looks for such a file."""
_MISSING = "{folder} holds no tensor {name!r}; read it with the version of lightning-realloc that wrote it"


class _SavePlanner(DefaultSavePlanner):
    """Writes every region once: one of the ranks that hold the same region writes it."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state
        self._copies: dict[MetadataIndex, Tensor] | None = None

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in self._state.items():
            for chunk in tensor.chunks():
                data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def copy_to_host(self, plan: SavePlan) -> None:
        """Copy the regions that this rank writes, and let go of the tensors."""
        self._copies = {item.index: self._view(item).to("cpu", copy=True).contiguous() for item in plan.items}
        self._state = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        if self._copies is not None:
            return self._copies.pop(write_item.index)
        return self._view(write_item).cpu().contiguous()

    def _view(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        assert index.offset is not None, "regions are always written with their offset"
        return self._state[index.fqn].view(tuple(index.offset)).detach()


class _LoadPlanner(DefaultLoadPlanner):
    """Reads stored regions that overlap this rank's regions directly into its local tensors."""

    def __init__(self, state: State, folder: AnyPath) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state
        self._folder = folder

    def set_up_planner(
        self, state_dict: object, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "the reader supplies the checkpoint's metadata"
        items: list[ReadItem] = []
        for name, tensor in self._state.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(_MISSING.format(folder=self._folder, name=name))
            items += create_read_items_for_chunk_list(name, stored, tensor.chunks())
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None, "regions are always read with their offset"
        view = self._state[index.fqn].view(tuple(index.offset)).detach()
        for dim, (offset, extent) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, extent)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: `resolve_tensor` returned the destination itself."""


class _Reader(FileSystemReader):
    """Reads shards without unpickling classes named by ``.metadata``; errors name the file."""

    def __init__(self, folder: AnyPath) -> None:
        super().__init__(_torch_path(folder))
        if isinstance(folder, RemotePath):
            self.fs, self.path = RemoteFiles(), str(folder)
        self._folder = folder
        self._metadata = read_metadata(folder)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            with name_read_errors(self._folder / METADATA_FILE):
                by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with name_read_errors(self._folder / name):
                super().read_data(LoadPlan(items), planner)
        return super().read_data(LoadPlan([]), planner)

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        if isinstance(self._folder, RemotePath):
            return read_slice(file, offset=sinfo.offset, length=sinfo.length)
        local: IO[bytes] = super()._slice_file(file, sinfo)
        return local


class ShardWriter(FileSystemWriter):
    """Writes one rank's regions after all ranks have planned, so that writing needs no other rank.

    Does not force the files to the disk.

    Args:
        state: This rank's shards.
        folder: Folder to write to.
        files: Files of an object store; None for a local folder.
        after: Name of a file there that the first rank has written before, and that every rank must see; None for none.
    """

    def __init__(
        self, state: State, folder: AnyPath, *, files: RemoteFiles | None = None, after: str | None = None
    ) -> None:
        super().__init__(_torch_path(folder), single_file_per_rank=True, sync_files=False)
        if files is not None:
            self.fs, self.path = files, str(folder)
        self._planner = _SavePlanner(state)
        self._plan = SavePlan([])
        self._metadata: Metadata | None = None
        self._folder = folder
        self._after = after

    @property
    def checkpoint_id(self) -> str | Path:
        """Path or address that ``.metadata`` records, of a class that its reader allows."""
        return self._folder if isinstance(self._folder, Path) else str(self._folder)

    def plan_on_all_ranks(self) -> None:
        """Agree on the rank that writes each region. Collective over all ranks if there are several."""
        with _name_failures(self._folder), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process")
            save_state({}, storage_writer=self, planner=self._planner, no_dist=not dist.is_initialized())

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that this rank writes to the first rank's folder; torch calls this in the collective."""
        if self._after is not None:
            _wait_for_file(self._folder, self._after)
        prepared: SavePlan = super().prepare_local_plan(plan)
        return prepared

    def write_data(self, plan: SavePlan, planner: object) -> Future[list[WriteResult]]:
        """Keep the plan; torch calls this in the collective."""
        self._plan = plan
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: object) -> None:
        """Keep the description; torch calls this on the first rank."""
        self._metadata = metadata

    def copy_to_host(self) -> None:
        """Copy this rank's regions, so that they are written as they are now."""
        self.per_thread_copy_ahead = 0  # on CUDA, torch would copy them a second time
        self._planner.copy_to_host(self._plan)

    def write(self) -> list[WriteResult]:
        """Write this rank's regions, and return where they are."""
        written: list[WriteResult] = super().write_data(self._plan, self._planner).value()
        return written

    def complete(self, written: list[list[WriteResult]]) -> None:
        """Write ``.metadata`` from the results of `write` of all ranks. For the first rank."""
        assert self._metadata is not None, "the first rank completes a checkpoint after planning"
        super().finish(self._metadata, written)


def files_of(folder: Path, rank: int) -> list[Path]:
    """Return the files that a rank wrote to a local folder."""
    return sorted(folder.glob(f"__{rank}_*{SHARD_SUFFIX}"))


def _wait_for_file(folder: AnyPath, name: str) -> None:
    """Wait until a file that another rank has written can be seen.

    Raises:
        CheckpointError: if it cannot be seen within `VISIBLE_WITHIN_S`.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise CheckpointError(
                f"rank {rank} ({socket.gethostname()}) does not see {folder}, to which the first rank writes; save to "
                f"a file system that all nodes share, or to an object store such as s3://"
            )
        with suppress(OSError):
            next(folder.parent.iterdir(), None)  # refreshes what a client of NFS remembers
        time.sleep(_POLL_S)


def _torch_path(folder: AnyPath) -> Path:
    """Return the path for torch's constructors, which open nothing, and make a local path of any other."""
    return folder if isinstance(folder, Path) else Path(folder.name)


@contextmanager
def _name_failures(folder: AnyPath) -> Iterator[None]:
    """Convert torch's error, which it raises on every rank, into a CheckpointError.

    Raises:
        CheckpointError: that of a rank that failed.
    """
    try:
        yield
    except CheckpointException as failed:  # a BaseException, which `except Exception` does not catch
        error = next(iter(failed.failures.values()))[0]
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise error from failed
        raise CheckpointError(f"{folder} cannot be used: {type(error).__name__}: {error}") from failed


def load(state: State, folder: AnyPath, *, alone: bool = False) -> None:
    """Fill every local tensor from ``folder``. Collective over all ranks unless ``alone``.

    Raises:
        CheckpointError: on every rank, if one of them cannot read a file.
    """
    no_dist = alone or not dist.is_initialized()
    rank, world_size = (0, 1) if no_dist else (dist.get_rank(), dist.get_world_size())
    with raise_on_all_ranks(folder, rank=rank, world_size=world_size):
        reader = _Reader(folder)
    with _name_failures(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        load_state({}, storage_reader=reader, planner=_LoadPlanner(state, folder), no_dist=no_dist)


def stored_tensors(folder: AnyPath) -> dict[str, StoredTensor]:
    """Return the name, global shape and dtype of every tensor under ``folder``.

    Raises:
        CheckpointError: if ``.metadata`` is missing, damaged, or names unexpected classes.
    """
    return {
        name: StoredTensor(tuple(entry.size), entry.properties.dtype)
        for name, entry in read_metadata(folder).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_whole(folder: AnyPath, names: Iterable[str]) -> dict[str, Tensor]:
    """Return full tensors by name, in this process alone, reading no others.

    Raises:
        CheckpointError: if ``folder`` does not hold one of the names.
    """
    stored = stored_tensors(folder)
    state: dict[str, ShardedTensor] = {}
    for name in names:
        if name not in stored:
            raise CheckpointError(_MISSING.format(folder=folder, name=name))
        shape, dtype = stored[name]
        whole = Piece(Region((0,) * len(shape), shape), (0,) * len(shape))
        state[name] = ShardedTensor(shape, dtype, (whole,), torch.empty(shape, dtype=dtype))
    load(state, folder, alone=True)
    return {name: tensor.local for name, tensor in state.items() if tensor.local is not None}
