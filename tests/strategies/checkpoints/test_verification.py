"""Check ``lightning-realloc verify``: one line for each checkpoint, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_realloc.cli import run
from lightning_realloc.strategies.checkpoints.checkpoint_files import read_description, write_description
from tests.strategies import runs
from tests.strategies.checkpoints.checkpoint_runs import Part, forget_checksums, run_parts
from tests.strategies.checkpoints.stored_folders import make_checkpoint
from tests.workers import WorkerPool


def test_checkpoints_of_a_run_are_verified_one_by_one(
    workers: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = Part(runs.calls(actor_train="fsdp2"), 2, save=tmp_path / "run", save_at=(1, 2))
    workers.run(run_parts, [part], 2, world_size=2, init_process_group=False)
    whole, torn, last = tmp_path / "run", tmp_path / "run-1", tmp_path / "run-2"

    assert run(["verify", str(whole), str(last)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", ")[0] for line in lines] == [f"{whole}: intact", f"{last}: intact"]
    assert "SFT, 9 files, " in lines[0] and lines[0].endswith("MB")

    (torn / "__1_0.distcp").write_bytes(b"")
    assert run(["verify", str(tmp_path)]) == 2  # a folder with checkpoints
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and sum(": intact, SFT" in line for line in lines) == 2
    assert f"{torn}: damaged: {torn / '__1_0.distcp'} has 0 bytes, but" in lines[1]
    (tmp_path / "of a command").mkdir()
    (tmp_path / "of a command" / "checkpoints").symlink_to(tmp_path)
    assert run(["verify", str(tmp_path / "of a command")]) == 2  # the folder of a run
    assert len(capsys.readouterr().out.splitlines()) == 3

    description = read_description(last)
    files = description.pop("files")
    write_description(last, description, {name: files[name] for name in files if name != "__1_0.distcp"})
    assert run(["verify", str(last)]) == 2
    assert "names __1_0.distcp, which is not in the checkpoint's list of files" in capsys.readouterr().out
    description["roles"]["actor"]["parameters"]["more"] = [2]
    write_description(last, description, files)
    forget_checksums(whole)
    assert run(["verify", str(last), str(whole), str(tmp_path / "none")]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert f"{last}: damaged: {last} lacks the weight more of actor" in lines[0]
    assert f"{whole}: not verified: {whole} has no checksums" in lines[1]
    assert lines[2].startswith(f"{tmp_path / 'none'}: not verified: ") and "it is missing" in lines[2]


def test_a_file_of_a_plain_module_is_verified_by_its_own_checksums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plain.ckpt"
    torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": {"weight": torch.arange(100.0)}}, file)
    assert run(["verify", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: intact, a single file of a module without calls\n"

    content = bytearray(file.read_bytes())
    content[content.index(torch.arange(100.0).numpy().tobytes()) + 40] ^= 1
    file.write_bytes(content)
    make_checkpoint(tmp_path / "good.ckpt", "").joinpath("meta.pt").unlink()
    assert run(["verify", str(tmp_path)]) == 2
    good, plain = capsys.readouterr().out.splitlines()
    assert good == f"{tmp_path / 'good.ckpt'}: damaged: {tmp_path / 'good.ckpt' / 'meta.pt'} is missing"
    assert plain.startswith(f"{file}: damaged: {file} has a wrong checksum at plain/data/0")
    file.write_bytes(b"no zip archive")
    assert run(["verify", str(file)]) == 2
    assert f"{file} cannot be read: BadZipFile" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ({"weight": torch.ones(2)}, "was not written by Lightning: it holds a dict without the keys"),
        (torch.ones(2), "was not written by Lightning: it holds a Tensor"),
        ({"state_dict": {}, "settings": Path("x")}, "which is not plain data and could run code"),
    ],
)
def test_a_file_written_by_others_is_not_called_a_checkpoint(
    content: object, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "foreign.pt"
    torch.save(content, file)
    assert run(["verify", str(file)]) == 2
    line = capsys.readouterr().out
    assert line.startswith(f"{file}: not verified: {file} ") and cause in line


def test_what_a_killed_save_left_is_no_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = make_checkpoint(tmp_path / "last.ckpt.partial", "")
    (left / "realloc.json").unlink()
    assert run(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{left}: not a checkpoint: a save that was killed left it")
    assert run(["verify", str(left)]) == 2
