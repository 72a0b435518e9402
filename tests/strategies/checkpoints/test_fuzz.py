"""Mutate the pickled files of a checkpoint at random, and check that nothing runs code or loads in silence.

``CHECKPOINT_MUTATIONS=2000 pytest tests/strategies/checkpoints/test_fuzz.py -s`` tries more of them and prints counts.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import shutil
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_realloc.errors import CheckpointError
from lightning_realloc.layout.region import Region
from lightning_realloc.layout.sharding import Piece
from lightning_realloc.strategies.checkpoints.checkpoint import read_meta
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    FORMAT,
    check_files,
    file_records,
    read_description,
    write_description,
)
from lightning_realloc.strategies.checkpoints.sharded_tensors import (
    ShardedTensor,
    ShardWriter,
    read_whole,
)
from lightning_realloc.strategies.checkpoints.stored_metadata import stored_tensors

NUM_MUTATIONS = int(os.environ.get("CHECKPOINT_MUTATIONS", "200"))
ROOM_BYTES = 4 << 30
"""Memory that a mutated file may ask for, before it is refused for that."""


# ---- random damage
def _flip_bits(content: bytes, rng: random.Random) -> bytes:
    mutated = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
    return bytes(mutated)


def _overwrite(content: bytes, rng: random.Random) -> bytes:
    begin = rng.randrange(len(content))
    return content[:begin] + rng.randbytes(rng.choice((1, 4, 64))) + content[begin + 4 :]


def _cut(content: bytes, rng: random.Random) -> bytes:
    begin, end = sorted(rng.sample(range(len(content) + 1), 2))
    return content[:begin] + content[end:]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    begin, end = sorted(rng.sample(range(len(content) + 1), 2))
    return content[:end] + content[begin:]


def _move(content: bytes, rng: random.Random) -> bytes:
    first, second, third = sorted(rng.sample(range(len(content) + 1), 3))
    return content[:first] + content[second:third] + content[first:second] + content[third:]


# ---- files that were made to run code
class _Call:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def _payloads(marker: Path) -> list[Any]:
    """Return objects that write a file when they are unpickled, and streams of opcodes that do so."""
    shell, code = f"touch {marker}", f"open({str(marker)!r}, 'w')"
    return [
        _Call(os.system, shell),
        _Call(exec, code),
        _Call(eval, code),
        _Call(open, str(marker), "w"),
        _Call(Path.touch, marker),
        _Call(os.popen, shell),
        _Call(torch.load, str(marker)),
        f"cos\nsystem\n(S'{shell}'\ntR.".encode(),
        f"(S'{shell}'\nios\nsystem\n.".encode(),
        f"(cos\nsystem\nS'{shell}'\no.".encode(),
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(shell)]) + shell.encode() + b"\x85R.",
        b"\x80\x02cbuiltins\ngetattr\nctorch\nserialization\nX\x02\x00\x00\x00os\x86R.",
        b"\x80\x04\x8c\x05torch\x8c\x18serialization.os.system\x93\x8c"
        + bytes([len(shell)]) + shell.encode() + b"\x85R.",
        b"\x82\x01.", b"\x83\x01\x01.", b"\x84\x01\x00\x00\x00.",  # the extension registry
    ]  # fmt: skip


def _craft(content: bytes, rng: random.Random, marker: Path) -> bytes:
    """Return a file with a payload: alone, before or inside the true content."""
    payload = rng.choice(_payloads(marker))
    pickled = payload if isinstance(payload, bytes) else pickle.dumps(payload, protocol=rng.randrange(2, 6))
    kind = rng.randrange(4)
    if zipfile.is_zipfile(io.BytesIO(content)):
        return _with_pickle(content, pickled) if kind else pickled
    if kind == 0 or isinstance(payload, bytes):
        return pickled[:-1] + b"0" + content if kind else pickled
    metadata = pickle.loads(content)
    if kind == 1:
        metadata.planner_data = payload
    elif kind == 2:
        metadata.state_dict_metadata["payload"] = payload
    else:
        metadata.storage_data[MetadataIndex("payload", (0,))] = payload
    return pickle.dumps(metadata)


def _with_pickle(content: bytes, pickled: bytes) -> bytes:
    """Return a zip archive of torch whose pickle is another one."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(made, "w") as changed:
        for entry in archive.infolist():
            changed.writestr(entry.filename, pickled if entry.filename.endswith(".pkl") else archive.read(entry))
    return made.getvalue()


MUTATIONS = (_flip_bits, _overwrite, _cut, _repeat, _move)


# ---- the test
@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Let an allocation of more than `ROOM_BYTES` fail inside, as far as the system can limit it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _outcome(read: Callable[[], object]) -> str:
    """Return how reading ended; any error but a CheckpointError is one of the reader's."""
    try:
        read()
    except CheckpointError:
        return "refused"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return "read"


def _read(folder: Path) -> None:
    """Read everything that a resumed run reads."""
    read_meta(folder, weights_only=True)
    read_whole(folder, stored_tensors(folder))


def _verify(folder: Path) -> None:
    check_files(folder, read_description(folder))


def _make_whole(folder: Path) -> None:
    """Write a checkpoint of three tensors, with the kinds of values that Lightning stores."""
    shapes = {"model/actor/a": (3, 4), "model/actor/b": (5,), "optimizer/actor/a//exp_avg": (3, 4)}
    pieces = {name: (Piece(Region.whole(shape), (0,) * len(shape)),) for name, shape in shapes.items()}
    writer = ShardWriter(
        {name: ShardedTensor(shape, torch.float32, pieces[name], torch.rand(shape)) for name, shape in shapes.items()},
        folder,
    )
    writer.plan_on_all_ranks()
    writer.complete([writer.write()])
    meta = {
        "global_step": 7, "loops": {"fit_loop": {"state_dict": {}, "progress": [1, 2.5, None, True]}},
        "callbacks": {"ModelCheckpoint": {"best_model_path": "runs/x"}}, "random": (3, torch.arange(7), "MT19937"),
    }  # fmt: skip
    torch.save(meta, folder / "meta.pt")
    description = {"format": FORMAT, "algorithm": "SFT", "roles": {}}
    write_description(folder, description, file_records(folder, sorted(folder.iterdir())))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_mutated_pickles_run_no_code_and_are_never_read_in_silence(tmp_path: Path) -> None:
    whole, folder, marker = tmp_path / "whole.ckpt", tmp_path / "mutated.ckpt", tmp_path / "marker"
    _make_whole(whole)
    shutil.copytree(whole, folder)
    description = read_description(whole)
    files = description.pop("files")
    rng, counts = random.Random(20), Counter[str]()
    for number in range(NUM_MUTATIONS):
        name = (".metadata", "meta.pt")[number % 2]
        content = (whole / name).read_bytes()
        is_crafted = number % 4 >= 2
        mutated = _craft(content, rng, marker) if is_crafted else rng.choice(MUTATIONS)(content, rng)
        if mutated == content:
            continue
        (folder / name).write_bytes(mutated)
        write_description(folder, description, files)
        counts[f"with the old checksums: {_outcome(lambda: _verify(folder))}"] += 1
        # As someone changes a checkpoint who also changes its checksums: the readers are alone.
        write_description(folder, description, file_records(folder, (folder / file for file in files)))
        with _bounded_memory():
            outcome = _outcome(lambda: _read(folder))
        counts[f"{'crafted' if is_crafted else 'damaged'}, with new checksums: {outcome}"] += 1
        assert not marker.exists(), f"mutation {number} of {name} ran code"
        (folder / name).write_bytes(content)
    print(*(f"{count} {outcome}" for outcome, count in sorted(counts.items())), sep="\n")

    assert not [outcome for outcome in counts if "raised" in outcome], counts
    assert counts["with the old checksums: read"] == 0
    assert counts["crafted, with new checksums: read"] == 0
    assert _outcome(lambda: _read(whole)) == "read" and FileSystemReader(whole).read_metadata() is not None
