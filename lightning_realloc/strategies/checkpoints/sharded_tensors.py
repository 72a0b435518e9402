"""Write and read sharded tensors with torch's distributed checkpoint, described by the package's own regions.

Torch's planners support only DTensors. A rank here may hold several boxes of a fused weight, or a plain tensor that is
a tensor-parallel slice. Two small planners write and read exactly the regions that a rank holds. So a checkpoint can
be read into any other layout and any other number of ranks.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
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
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_realloc.errors import CheckpointError
from lightning_realloc.layout.region import Region
from lightning_realloc.layout.sharding import Piece
from lightning_realloc.remote_path import AnyPath, RemotePath
from lightning_realloc.retries.attempts import retried
from lightning_realloc.runtime.messages.objects import gather_on_first, scatter_objects
from lightning_realloc.runtime.transfer.point_to_point import region_view
from lightning_realloc.strategies.checkpoints.checkpoint_files import name_read_errors, raise_on_all_ranks
from lightning_realloc.strategies.checkpoints.stored_metadata import METADATA_FILE, read_metadata, stored_tensors

if TYPE_CHECKING:
    from lightning_realloc.strategies.checkpoints.remote.remote_files import RemoteFiles


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensor:
    """One rank's shard of a global tensor."""

    shape: tuple[int, ...]
    """Shape of the global tensor."""
    dtype: torch.dtype
    """Dtype of every shard."""
    pieces: tuple[Piece, ...]
    """Regions that this rank holds; () on a rank that holds nothing."""
    local: Tensor | None = field(default=None, metadata={"sent": False})
    """This rank's local tensor, in which each piece begins at its offset; None on a rank that holds nothing, and for
    the shard of another rank."""

    def view(self, starts: tuple[int, ...]) -> Tensor:
        """Return the view of the local tensor with the region that begins at ``starts``, without gradients."""
        piece = next(piece for piece in self.pieces if piece.region.starts == starts)
        if self.local is None:
            raise KeyError(f"this rank holds no tensor for its region at {starts}")
        return region_view(self.local.detach(), piece.offset, piece.region.shape)

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Return the nonempty regions as torch's chunks."""
        return [
            ChunkStorageMetadata(torch.Size(piece.region.starts), torch.Size(piece.region.shape))
            for piece in self.pieces
            if piece.region.numel
        ]


class WrittenRegion(NamedTuple):
    """File and position of a region that one rank wrote, as plain data for the first rank."""

    name: str
    """Name of the tensor in the checkpoint."""
    starts: tuple[int, ...]
    """Begin of the region."""
    file: str
    """File below the checkpoint's folder."""
    offset: int
    """Position in the file."""
    length: int
    """Bytes in the file."""


State = Mapping[str, ShardedTensor]
"""Name in the checkpoint -> this rank's shard."""
SHARD_SUFFIX = ".distcp"
"""Suffix of the files with tensors."""
_MISSING = "{folder} holds no tensor {name!r}; read it with the version of lightning-realloc that wrote it"


class _SavePlanner(DefaultSavePlanner):
    """Writes every region once: one of the ranks that hold the same region writes it."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.held = {name: tensor for name, tensor in state.items() if tensor.pieces}
        """The tensors of which this rank holds regions."""
        self._copies: dict[MetadataIndex, Tensor] | None = None

    def divide(self, everyone: Iterable[State]) -> tuple[list[list[int]], Metadata]:
        """Return the positions of the regions that each rank writes, among those it holds, and the description."""
        held = list(map(_write_items, everyone))
        plans, metadata = self.create_global_plan(list(map(SavePlan, held)))
        written = [{item.index for item in plan.items} for plan in plans]
        chosen = zip(held, written, strict=True)
        return [[at for at, item in enumerate(items) if item.index in kept] for items, kept in chosen], metadata

    def copy_to_host(self, plan: SavePlan) -> None:
        """Copy the regions that this rank writes, and let go of the tensors."""
        indices = [item.index for item in plan.items]
        self._copies = {index: _view(self.held, index).to("cpu", copy=True).contiguous() for index in indices}
        self.held = {}

    def release_copies(self) -> None:
        """Free the copies."""
        self._copies = None

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _view(self.held, index).cpu().contiguous() if self._copies is None else self._copies[index]


def _write_items(held: State) -> list[WriteItem]:
    """Return torch's description of the regions that a rank holds, in their order."""
    items = []
    for name, tensor in held.items():
        for chunk in tensor.chunks():
            data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def _view(state: State, index: MetadataIndex) -> Tensor:
    assert index.offset is not None, "regions are always named with their offset"
    return state[index.fqn].view(tuple(index.offset))


class _LoadPlanner(DefaultLoadPlanner):
    """Reads stored regions that overlap this rank's regions directly into its local tensors."""

    def __init__(self, state: State, folder: AnyPath) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state
        self._folder = folder

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "the reader supplies the checkpoint's metadata"
        items: list[ReadItem] = []
        for name, tensor in self._state.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(_MISSING.format(folder=self._folder, name=name))
            items += create_read_items_for_chunk_list(name, stored, tensor.chunks())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _view(self._state, index)


class _Reader(FileSystemReader):
    """Reads shards without unpickling classes named by ``.metadata``; errors name the file."""

    def __init__(self, folder: AnyPath) -> None:
        super().__init__(_torch_path(folder))
        if isinstance(folder, RemotePath):
            from lightning_realloc.strategies.checkpoints.remote.remote_files import RemoteFiles

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
                retried(partial(super().read_data, LoadPlan(items), planner), self._folder / name)
        return super().read_data(LoadPlan([]), planner)

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        if isinstance(self._folder, RemotePath):  # torch would read it in many small requests
            place = self._folder / sinfo.relative_path
            return io.BytesIO(place.read_bytes(start=sinfo.offset, end=sinfo.offset + sinfo.length))
        local: IO[bytes] = super()._slice_file(file, sinfo)
        return local


class ShardWriter(FileSystemWriter):
    """Writes one rank's regions after all ranks have planned, so that writing needs no other rank.

    Does not force the files to the disk.

    Args:
        files: Files of an object store; None for a local folder.
    """

    def __init__(self, state: State, folder: AnyPath, *, files: RemoteFiles | None = None) -> None:
        super().__init__(_torch_path(folder), single_file_per_rank=True, sync_files=False)
        if files is not None:
            self.fs, self.path = files, str(folder)
        self._planner = _SavePlanner(state)
        self._plan = SavePlan([])
        self._metadata: Metadata | None = None
        self._folder = folder

    @property
    def checkpoint_id(self) -> str | Path:
        """Path or address that ``.metadata`` records, of a class that its reader allows."""
        return self._folder if isinstance(self._folder, Path) else str(self._folder)

    def plan_on_all_ranks(self) -> None:
        """Agree on the rank that writes each region. Collective over all ranks if there are several.

        Torch's own `save` would do so by collectives that unpickle what they receive.
        """
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        with raise_on_all_ranks(self._folder, rank=rank, world_size=world_size), _name_failures(self._folder):
            self.set_up_storage_writer(rank == 0, rank=rank)
            self.prepare_local_plan(SavePlan([]))
        everyone, chosen = gather_on_first(self._planner.held), list[list[int]]()
        with raise_on_all_ranks(self._folder, rank=rank, world_size=world_size), _name_failures(self._folder):
            if rank == 0:
                chosen, self._metadata = self._planner.divide(everyone)
        items = _write_items(self._planner.held)
        self._plan = SavePlan([items[at] for at in scatter_objects(chosen)], storage_data=_StoragePrefix(f"__{rank}_"))

    def copy_to_host(self) -> None:
        """Copy this rank's regions, so that they are written as they are now."""
        self.per_thread_copy_ahead = 0  # on CUDA, torch would copy them a second time
        self._planner.copy_to_host(self._plan)

    def write(self) -> list[WrittenRegion]:
        """Write this rank's regions, and return where they are. May be called again until `release_copies`."""
        results = super().write_data(self._plan, self._planner).value()
        return [_written_region(each.index, each.storage_data) for each in results]

    def write_file(self, name: str, content: bytes) -> None:
        """Write another file next to the regions."""
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            stream.write(content)

    def release_copies(self) -> None:
        """Free the copies of `copy_to_host`, once their files are on the disk."""
        self._planner.release_copies()

    def complete(self, written: Iterable[Iterable[WrittenRegion]]) -> None:
        """Write ``.metadata`` from the results of `write` of all ranks. For the first rank."""
        assert self._metadata is not None, "the first rank completes a checkpoint after planning"
        self.finish(self._metadata, [list(map(_write_result, regions)) for regions in written])


def _written_region(index: MetadataIndex, place: _StorageInfo) -> WrittenRegion:
    return WrittenRegion(index.fqn, tuple(index.offset or ()), place.relative_path, place.offset, place.length)


def _write_result(region: WrittenRegion) -> WriteResult:
    index = MetadataIndex(region.name, torch.Size(region.starts))
    return WriteResult(index, region.length, _StorageInfo(region.file, region.offset, region.length))


def files_of(folder: Path, rank: int) -> list[Path]:
    """Return the files that a rank wrote to a local folder."""
    return sorted(folder.glob(f"__{rank}_*{SHARD_SUFFIX}"))


def _torch_path(folder: AnyPath) -> Path:
    """Return the path for torch's constructors, which open nothing, and make a local path of any other."""
    return folder if isinstance(folder, Path) else Path(folder.name)


@contextmanager
def _name_failures(folder: AnyPath) -> Iterator[None]:
    """Convert an error of torch's writers and readers into a CheckpointError that names the folder."""
    try:
        yield
    except CheckpointException as failed:  # a BaseException, which `except Exception` does not catch
        error = next(iter(failed.failures.values()))[0]
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise error from failed
        raise CheckpointError(f"{folder} cannot be used: {type(error).__name__}: {error}") from failed
    except CheckpointError:
        raise
    except Exception as error:  # of a file system, or of torch's planner
        raise CheckpointError(f"{folder} cannot be used: {type(error).__name__}: {error}") from error


def load(state: State, folder: AnyPath) -> None:
    """Fill every local tensor from ``folder``.

    Every rank reads its regions by itself; torch's collectives would unpickle what they receive.

    Raises:
        CheckpointError: if a file cannot be read.
    """
    with _name_failures(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        load_state({}, storage_reader=_Reader(folder), planner=_LoadPlanner(state, folder), no_dist=True)


def read_whole(folder: AnyPath, names: Iterable[str]) -> dict[str, Tensor]:
    """Return full tensors by name, in this process alone, reading no others. Raises CheckpointError without one."""
    stored = stored_tensors(folder)
    state: dict[str, ShardedTensor] = {}
    for name in names:
        if name not in stored:
            raise CheckpointError(_MISSING.format(folder=folder, name=name))
        shape, dtype = stored[name]
        whole = Piece(Region.whole(shape), (0,) * len(shape))
        state[name] = ShardedTensor(shape, dtype, (whole,), torch.empty(shape, dtype=dtype))
    load(state, folder)
    return {name: tensor.local for name, tensor in state.items() if tensor.local is not None}
