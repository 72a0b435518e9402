"""Damage to a checkpoint is found and named, and no file of a checkpoint runs code."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from lightning_realloc.errors import CheckpointError
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    check_files,
    file_records,
    newest_intact,
    raise_on_all_ranks,
    read_description,
    run_on_first_rank,
    write_description,
)
from lightning_realloc.strategies.checkpoints.export import export_checkpoint
from lightning_realloc.strategies.checkpoints.hf_folder import import_model_class
from lightning_realloc.strategies.checkpoints.stored_metadata import read_metadata
from tests.strategies import runs
from tests.strategies.checkpoints.checkpoint_runs import (
    Part,
    contents,
    differences,
    forget_checksums,
    refusals,
    run_parts,
    save_not_finite,
)
from tests.workers import WorkerPool

WRITTEN = {
    "__0_0.distcp", ".metadata", "meta.pt", "realloc.json",
    *(f"huggingface/actor/{name}.json" for name in ("config", "generation_config", "tokenizer", "tokenizer_config")),
}  # fmt: skip


class Poison:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def _saved(workers: WorkerPool, folder: Path, world_size: int = 1) -> Path:
    layout = f"fsdp{world_size}" if world_size > 1 else "dp1"
    part = Part(runs.calls(actor_train=layout), 1, save=folder)
    workers.run(run_parts, [part], world_size, world_size=world_size, init_process_group=False)
    return folder


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _copy(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder, folder.parent / name))


def _record_anew(folder: Path) -> None:
    """Update the checksums to the current files, as an attacker would."""
    description = read_description(folder)
    write_description(folder, description, file_records(folder, (folder / name for name in description.pop("files"))))


def _resume(workers: WorkerPool, folders: list[Path], world_size: int = 1) -> list[str | None]:
    """Return the error of resuming from each checkpoint, the same on every rank; None without an error."""
    parts = [Part("static", 2, resume=folder) for folder in folders]
    answers = workers.run(refusals, parts, world_size, world_size=world_size, init_process_group=False)
    assert all(answer == answers[0] for answer in answers)
    return list(answers[0])


def _export(folder: Path) -> str | None:
    """Return the CheckpointError of an export; raise other errors."""
    target = folder.parent / "exported"
    shutil.rmtree(target, ignore_errors=True)
    try:
        export_checkpoint(folder, target)
    except CheckpointError as error:
        return str(error)
    return None


# ---- code in a checkpoint
def test_no_file_of_a_checkpoint_runs_code(workers: WorkerPool, tmp_path: Path) -> None:
    whole, marker, poisoned = _saved(workers, tmp_path / "whole.ckpt"), tmp_path / "marker", {}
    assert _names(whole) == WRITTEN
    for name in sorted(WRITTEN):
        poisoned[name] = _copy(whole, f"{len(poisoned)}.ckpt")
        (poisoned[name] / name).write_bytes(pickle.dumps(Poison(marker)))
        if name != "realloc.json":  # with correct checksums the readers refuse the files
            poisoned[f"recorded {name}"] = _copy(poisoned[name], f"{len(poisoned)}.ckpt")
            _record_anew(poisoned[f"recorded {name}"])
    poisoned["zipped meta.pt"] = _copy(whole, "meta.ckpt")
    torch.save(Poison(marker), poisoned["zipped meta.pt"] / "meta.pt")
    poisoned["zipped __0_0.distcp"] = _copy(whole, "shards.ckpt")
    _poison_shards(poisoned["zipped __0_0.distcp"], marker)
    for name in ("zipped meta.pt", "zipped __0_0.distcp"):
        _record_anew(poisoned[name])

    resumed = dict(zip(poisoned, _resume(workers, list(poisoned.values())), strict=True))
    exported = {name: _export(folder) for name, folder in poisoned.items()}

    assert not marker.exists()
    for name in WRITTEN:
        for refusals_ in (resumed, exported):
            assert str(poisoned[name] / name) in (refusals_[name] or ""), name
    assert "names posix.system, which no checkpoint needs" in (resumed["recorded .metadata"] or "")
    assert "names posix.system, which no checkpoint needs" in (exported["recorded .metadata"] or "")
    for refusal in (resumed["zipped __0_0.distcp"], exported["zipped __0_0.distcp"], resumed["zipped meta.pt"]):
        assert "holds posix.system, which is not plain data and could run code" in (refusal or "")
    assert "load_weights_only=False" in (resumed["zipped meta.pt"] or "")
    assert "load_weights_only" not in (resumed["zipped __0_0.distcp"] or "")


def _poison_shards(folder: Path, marker: Path) -> None:
    """Replace every stored tensor with the same malicious bytes."""
    torch.save(Poison(marker), folder / "__0_0.distcp")
    metadata = FileSystemReader(folder).read_metadata()
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = 0, (folder / "__0_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_an_export_imports_no_module_but_those_of_transformers_unless_it_may(
    workers: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap, marker = _saved(workers, tmp_path / "trap"), tmp_path / "marker"
    source = f"open({str(marker)!r}, 'w')\nfrom transformers import LlamaForCausalLM as Model"
    (tmp_path / "custom_code.py").write_text(source)
    (trap / "code.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)  # as if Python started in the folder that contains the checkpoint
    for module in ("trap.code", "custom_code"):
        description = read_description(trap)
        description["roles"]["actor"]["class"] = f"{module}:Model"
        write_description(trap, description, description.pop("files"))
        assert f"if you trust {module}, set trust_model_class=True" in (_export(trap) or "")
    with pytest.raises(CheckpointError, match="if you trust custom_code"):
        import_model_class("custom_code:Model", "actor")
    assert not marker.exists()
    export_checkpoint(trap, tmp_path / "model", trust_model_class=True)
    assert marker.exists()


def test_metadata_of_earlier_python_versions_is_read(workers: WorkerPool, tmp_path: Path) -> None:
    folder = _saved(workers, tmp_path / "run.ckpt")
    metadata = FileSystemReader(folder).read_metadata()

    class EarlyPickler(pickle.Pickler):
        """Pickles an Enum by its name, like Python before 3.11.4."""

        def reducer_override(self, value: Any) -> Any:
            return (getattr, (type(value), value.name)) if isinstance(value, _MEM_FORMAT_ENCODING) else NotImplemented

    with (folder / ".metadata").open("wb") as stream:
        EarlyPickler(stream).dump(metadata)

    read = read_metadata(folder)
    assert read.state_dict_metadata == metadata.state_dict_metadata
    assert read.storage_data == metadata.storage_data
    (folder / ".metadata").write_bytes(pickle.dumps((getattr, Path("x"))))
    with pytest.raises(CheckpointError, match="holds no description of tensors"):
        read_metadata(folder)
    for foreign in ("../elsewhere", "/elsewhere"):
        next(iter(metadata.storage_data.values())).relative_path = foreign
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=f"names '{foreign}', but the files of a checkpoint lie in its own"):
            read_metadata(folder)


# ---- damage
def _flip(path: Path, position: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[round(position * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def _zero_page(path: Path) -> None:
    content = path.read_bytes()
    begin = len(content) // 2
    path.write_bytes(content[:begin] + bytes(len(content[begin : begin + 4096])) + content[begin + 4096 :])


def _shift(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[1:] + content[:1])


def _swap(path: Path) -> None:
    """Exchange a file with another one of the checkpoint."""
    folder = next(parent for parent in path.parents if parent.suffix == ".ckpt")
    other = folder / next(name for name in sorted(WRITTEN) if folder / name != path)
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": _flip,
    "flipped at the beginning": lambda path: _flip(path, 0.0),
    "flipped at the end": lambda path: _flip(path, 1.0),
    "zeroed": _zero_page,
    "shifted": _shift,
    "swapped": _swap,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 10]),
    "shortened": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "extended": lambda path: path.write_bytes(path.read_bytes() + b"}"),
    "doubled": lambda path: path.write_bytes(path.read_bytes() * 2),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "noise": lambda path: path.write_bytes(random.Random(0).randbytes(path.stat().st_size)),
    "garbage": lambda path: path.write_bytes(b"\x80garbage" * 50),
    "null": lambda path: path.write_text("null"),
    "a list": lambda path: path.write_text("[]"),
    "a number": lambda path: path.write_text("9" * 5000),
    "infinity": lambda path: path.write_text('{"format": 1e999}'),
    "no JSON": lambda path: path.write_text('{"format": 1'),
    "nested": lambda path: path.write_text("[" * 100_000),
    "another encoding": lambda path: path.write_bytes("é".encode("utf-16") + path.read_bytes()),
    "duplicate keys": lambda path: path.write_bytes(b'{"format": 1, ' + path.read_bytes().lstrip(b"{ \n")),
    "missing": Path.unlink,
    "a folder": lambda path: _replace(path, Path.mkdir),
    "a pipe": lambda path: _replace(path, os.mkfifo),
    "a link to nothing": lambda path: _replace(path, lambda here: here.symlink_to("nothing")),
    "a link to itself": lambda path: _replace(path, lambda here: here.symlink_to(here.name)),
}
if os.geteuid() != 0:  # root reads everything
    DAMAGE["unreadable"] = lambda path: path.chmod(0)


def test_every_kind_of_damage_to_every_file_is_named(workers: WorkerPool, tmp_path: Path) -> None:
    whole = _saved(workers, tmp_path / "whole.ckpt")
    found = {}
    for name in sorted(WRITTEN):
        for kind, damage in DAMAGE.items():
            folder = _copy(whole, "damaged.ckpt")
            damage(folder / name)
            refusal = found[name, kind] = _export(folder) or ""
            shutil.rmtree(folder)
            named = [str(folder / name)] if kind != "swapped" else [str(folder / other) for other in WRITTEN]
            assert any(place in refusal for place in named), f"{name} {kind}: {refusal}"
            assert refusal.endswith(f"; {whole} is the newest intact checkpoint next to it"), (
                f"{name} {kind}: {refusal}"
            )
    assert len(DAMAGE) >= 25 and _export(whole) is None

    resumed = [(name, kind) for name, kind in found if kind in ("flipped", "missing") and "huggingface" not in name]
    for name, kind in resumed:
        folder = _copy(whole, "damaged.ckpt")
        DAMAGE[kind](folder / name)
        assert _resume(workers, [folder]) == [found[name, kind]]
        shutil.rmtree(folder)


def test_a_description_that_was_edited_is_checked_entry_by_entry(workers: WorkerPool, tmp_path: Path) -> None:
    whole = _saved(workers, tmp_path / "whole.ckpt")
    text = (whole / "realloc.json").read_text()
    edits: list[Callable[[dict[str, Any]], object]] = [
        *(lambda content, value=value: content.update(format=value) for value in (0, 2, 10**30, "1", None, [])),
        *(lambda content, value=value: content.update(roles=value) for value in (None, [], "actor", {"actor": []})),
        *(lambda content, value=value: content.update(files=value) for value in ([], {"meta.pt": 3}, {"../x": RECORD})),
        lambda content: content.pop("algorithm"),
        lambda content: content.update(algorithm=1),
        *(
            lambda content, key=key, value=value: content["roles"]["actor"].update({key: value})
            for key, value in (("saved", 1), ("class", None), ("tied", []), ("parameters", []),
                               ("parameters", {"x": 3}), ("parameters", {"x": [-1]}), ("parameters", {"x": ["1"]}))
        ),
        *(
            lambda content, value=value: content["files"]["meta.pt"].update(bytes=value)
            for value in (-1, 10**30, "many", None)
        ),
        lambda content: content["files"].update({"/etc/passwd": RECORD}),
        lambda content: content["files"].update(lost=RECORD),
    ]  # fmt: skip
    folder = _copy(whole, "edited.ckpt")
    for edit in edits:
        content = json.loads(text)
        del content["checksum"]
        edit(content)
        (folder / "realloc.json").write_text(json.dumps(content))
        refusal = _export(folder) or ""
        assert str(folder) in refusal and refusal.endswith(f"{whole} is the newest intact checkpoint next to it"), (
            content
        )


RECORD = {"bytes": 0, "crc32": "00000000"}


def test_files_that_were_added_are_ignored_or_refused(
    workers: WorkerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _saved(workers, tmp_path / "run.ckpt")
    for name in ("notes.txt", ".DS_Store", "huggingface/.DS_Store", "__7_0.distcp"):
        (folder / name).write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        assert _export(folder) is None
    assert [record.message for record in caplog.records] == [
        f"{folder} holds files that were not written with it, and are ignored: __7_0.distcp, notes.txt"
    ]
    added = folder / "huggingface" / "actor" / "adapter_config.json"
    added.write_text("{}")
    assert f"{added} was not written with the checkpoint; remove it" in (_export(folder) or "")


def test_each_file_is_verified_by_one_rank(workers: WorkerPool, tmp_path: Path) -> None:
    folder = _saved(workers, tmp_path / "run.ckpt", 2)
    description = read_description(folder)
    assert list(description["files"])[:2] == ["__0_0.distcp", "__1_0.distcp"]  # ranks that read the files they wrote

    for name in description["files"]:
        before = (folder / name).read_bytes()
        _flip(folder / name)
        found = []
        for rank in range(3):
            try:
                check_files(folder, description, rank=rank, world_size=3)
            except CheckpointError as error:
                assert f"{folder / name} is not as it was written: its checksum is" in str(error)
                found.append(rank)
        assert found == [list(description["files"]).index(name) % 3]
        (folder / name).write_bytes(before)


def test_damage_is_reported_on_every_rank_with_the_newest_intact_checkpoint(
    workers: WorkerPool, tmp_path: Path
) -> None:
    older = _saved(workers, tmp_path / "older.ckpt", 2)
    last, unverified, newer = (_copy(older, f"{name}.ckpt") for name in ("last", "unverified", "newer"))
    for age, folder in enumerate((newer, unverified, older)):
        os.utime(folder / "realloc.json", (1e9 - age, 1e9 - age))
    _flip(newer / "__0_0.distcp")
    forget_checksums(unverified)
    _flip(last / "__1_0.distcp")

    refusal = _resume(workers, [last], 2)[0] or ""

    assert refusal.startswith(f"{last / '__1_0.distcp'} is not as it was written: its checksum is")
    assert refusal.endswith(f"; {older} is the newest intact checkpoint next to it")
    shutil.rmtree(older)
    assert newest_intact(last) is None
    with pytest.raises(CheckpointError, match="there is no intact checkpoint next to it"), raise_on_all_ranks(last):
        check_files(last, read_description(last))


def _fail_on_the_first_rank(own: bool) -> tuple[bool, str]:
    """Return whether this rank ran a failing action, and the error that it raised."""
    ran: list[int] = []

    def fail() -> None:
        ran.append(dist.get_rank())
        raise CheckpointError("no room") if own else OSError("disk")

    with pytest.raises(CheckpointError) as caught:
        run_on_first_rank(fail, problem="no card")
    return bool(ran), str(caught.value)


@pytest.mark.parametrize(("own", "text"), [(True, "no room"), (False, "no card (OSError: disk)")])
def test_an_action_runs_on_the_first_rank_and_fails_on_all(workers: WorkerPool, own: bool, text: str) -> None:
    assert workers.run(_fail_on_the_first_rank, own, world_size=2) == [(True, text), (False, text)]


@pytest.mark.exhaustive  # with them: above
def test_a_checkpoint_without_checksums_is_read_and_its_damage_is_named(
    workers: WorkerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier, damaged = _saved(workers, tmp_path / "earlier.ckpt"), {}
    forget_checksums(earlier)
    for name in ("__0_0.distcp", ".metadata", "meta.pt", "realloc.json", "huggingface/actor/config.json"):
        for kind in ("truncated", "empty", "garbage", "missing"):
            damaged[name, kind] = _copy(earlier, f"{len(damaged)}.ckpt")
            DAMAGE[kind](damaged[name, kind] / name)

    with caplog.at_level(logging.WARNING):
        assert _export(earlier) is None
    assert [record.message.partition(" has no checksums")[0] for record in caplog.records] == [str(earlier)]
    resumed = _resume(workers, [earlier, *damaged.values()])
    assert resumed[0] is None
    for ((name, kind), folder), refusal in zip(damaged.items(), resumed[1:], strict=True):
        if not name.startswith("huggingface"):
            assert str(folder / name) in (refusal or ""), f"{name} {kind}: {refusal}"
        if name != "meta.pt":
            exported = _export(folder) or ""
            assert str(folder / name) in exported, f"{name} {kind}: {exported}"


# ---- weights that are not finite
def test_weights_that_are_not_finite_never_replace_a_checkpoint(workers: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    first, second = workers.run(save_not_finite, folder, 2, world_size=2, init_process_group=False)

    assert first == second
    for refusal, target in zip(first, (folder, tmp_path / "model"), strict=True):
        assert refusal.startswith(f"the weights of actor are not finite, and {target} is not written: ")
        assert "model.layers.0.mlp.up_proj.weight holds NaN or infinity (2 of 21 parameters do)" in refusal
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert differences(contents(folder), contents(folder)) == {}  # no NaN, which differs from itself
    assert newest_intact(tmp_path / "another") == folder
