from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_realloc.errors import CheckpointError
from lightning_realloc.layout import ModelLayout
from lightning_realloc.remote_path import as_path
from lightning_realloc.retries import attempts
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.strategies.checkpoints.remote.remote_files import RemoteFiles
from lightning_realloc.strategies.checkpoints.sharded_tensors import (
    ShardedTensor,
    ShardWriter,
    load,
    read_whole,
)
from lightning_realloc.strategies.checkpoints.stored_metadata import stored_tensors
from tests.runtime.transfer.reallocation_cases import full_tensors, lay_out, local_reference, odd_model
from tests.strategies.checkpoints.remote.object_stores import ObjectStore, address
from tests.workers import WorkerPool

LAYOUTS = ("fsdp4", "tp4", "fsdp2.tp2", "dp2.tp2@3,1,0,2", "tp2@2-3", "dp4", "fsdp3@0,1,3", "dp1@1")


def save(state: dict[str, ShardedTensor], folder: Path, *, copied: bool = False) -> None:
    """Write a checkpoint's tensors; ``copied`` writes copies after the tensors themselves have changed."""
    writer = ShardWriter(state, folder)
    writer.plan_on_all_ranks()
    if copied:
        writer.copy_to_host()
        for tensor in state.values():
            if tensor.local is not None:
                tensor.local.zero_()
    written = gather_objects(writer.write())
    if not dist.is_initialized() or dist.get_rank() == 0:
        writer.complete(written)


def _held(layout: ModelLayout, full: dict[str, torch.Tensor], rank: int, *, empty: bool) -> dict[str, ShardedTensor]:
    """Return the shards that a rank writes, or empty ones to read into."""
    held = local_reference(full, layout, rank)
    state = {}
    for param in layout.model.params:
        local = held.get(param.name)
        if local is not None and empty:
            local = torch.full_like(local, float("nan"))
        pieces = layout.pieces(param.name, rank) if local is not None else ()
        state[param.name] = ShardedTensor(param.shape, full[param.name].dtype, pieces, local)
    return state


def _save_in_every_layout(folder: Path, dtype: torch.dtype) -> None:
    full = {name: tensor.to(dtype) for name, tensor in full_tensors(odd_model()).items()}
    for text in LAYOUTS:
        save(_held(lay_out(text), full, dist.get_rank(), empty=False), folder / text)


def _wrong_after_reading(folder: Path, pairs: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    full, rank = full_tensors(odd_model()), dist.get_rank()
    wrong = []
    for source, target in pairs:
        layout = lay_out(target)
        state = _held(layout, full, rank, empty=True)
        load(state, folder / source)
        for name, expected in local_reference(full, layout, rank).items():
            local = state[name].local
            if local is None or not torch.equal(local, expected):
                wrong.append((source, target, name))
    return wrong


def test_tensors_written_in_one_layout_are_read_in_any_other(workers: WorkerPool, tmp_path: Path) -> None:
    # Every layout is a source and a target at least once, of itself and of other layouts in the list.
    pairs = [(LAYOUTS[i], LAYOUTS[(i + step) % len(LAYOUTS)]) for i in range(len(LAYOUTS)) for step in (0, 1, 3)]
    workers.run(_save_in_every_layout, tmp_path, torch.float32)

    assert workers.run(_wrong_after_reading, tmp_path, pairs) == [[], [], [], []]


def test_every_element_is_stored_once_and_read_back(workers: WorkerPool, tmp_path: Path) -> None:
    full = {name: tensor.bfloat16() for name, tensor in full_tensors(odd_model()).items()}
    workers.run(_save_in_every_layout, tmp_path, torch.bfloat16)

    for text in LAYOUTS:
        metadata = FileSystemReader(tmp_path / text).read_metadata()
        for name, tensor in full.items():
            chunks = metadata.state_dict_metadata[name].chunks
            assert sum(prod(chunk.sizes) for chunk in chunks) == tensor.numel(), f"{text}: {name} is stored twice"
        read = read_whole(tmp_path / text, full)
        assert all(torch.equal(read[name], tensor) for name, tensor in full.items())
        assert {name: stored.shape for name, stored in stored_tensors(tmp_path / text).items()} == {
            name: tuple(tensor.shape) for name, tensor in full.items()
        }


def test_copies_are_written_as_they_were(tmp_path: Path) -> None:
    full = full_tensors(odd_model())
    state = _held(lay_out("dp1"), full_tensors(odd_model()), 0, empty=False)

    save(state, tmp_path, copied=True)

    assert all(torch.equal(tensor, full[name]) for name, tensor in read_whole(tmp_path, full).items())
    assert all(not tensor.local.any() for tensor in state.values() if tensor.local is not None)


def test_copies_are_written_again_after_a_lost_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "sleep", lambda seconds: None)
    full, folder = full_tensors(odd_model()), as_path(address(tmp_path))
    writer = ShardWriter(_held(lay_out("dp1"), full, 0, empty=False), folder, files=RemoteFiles())
    writer.plan_on_all_ranks()
    writer.copy_to_host()
    monkeypatch.setattr(ObjectStore, "resets_left", 2)
    writer.complete([attempts.retried(writer.write, folder)])
    assert all(torch.equal(tensor, full[name]) for name, tensor in read_whole(folder, full).items())


def test_one_process_saves_and_reads_without_a_process_group(tmp_path: Path) -> None:
    full = full_tensors(odd_model())
    state = _held(lay_out("dp1"), full, 0, empty=False)

    save(state, tmp_path)

    assert all(torch.equal(tensor, full[name]) for name, tensor in read_whole(tmp_path, full).items())
    with pytest.raises(CheckpointError, match="holds no tensor 'nonsense'"):
        read_whole(tmp_path, ["nonsense"])
