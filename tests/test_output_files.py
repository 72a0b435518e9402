"""Output folders that cannot be written to are named, and text files are written as a whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.output_files import added_files, append_text, write_problem, write_text
from lightning_realloc.retries import attempts


def test_a_folder_that_can_be_written_to_is_not_made(tmp_path: Path) -> None:
    assert write_problem(tmp_path) is None
    assert write_problem(tmp_path / "new" / "folder") is None
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    problem = f"cannot be written: Not a directory at {tmp_path / 'file'}; give another folder"
    assert write_problem(tmp_path / "file") == f"{tmp_path / 'file'} {problem}"
    assert write_problem(tmp_path / "file" / "model") == f"{tmp_path / 'file' / 'model'} {problem}"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux' /proc, in which no user can make files")
def test_a_folder_without_write_access_is_named() -> None:
    problem = write_problem("/proc/self/model")
    assert problem is not None and "/proc/self; give another folder" in problem


def test_a_full_disk_keeps_the_earlier_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, content: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    plan = ExecutionPlan.from_mapping({"calls": {"actor.train": "fsdp2@0-1"}})
    plan.save(tmp_path / "plan.yaml")
    before = (tmp_path / "plan.yaml").read_text()
    monkeypatch.setattr(Path, "write_bytes", fail)
    for name in ("plan.yaml", "new.yaml"):
        with pytest.raises(OSError, match="No space left"):
            plan.save(tmp_path / name, comment="another")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]
    assert (tmp_path / "plan.yaml").read_text() == before


def test_links_and_devices_stay(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "one")
    write_text(tmp_path / "link", "two")
    write_text(os.devnull, "three")
    assert (tmp_path / "file").read_text() == "two"
    assert (tmp_path / "link").is_symlink()
    assert Path(os.devnull).is_char_device()


def _contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_added_files_replace_earlier_ones_and_leave_others(tmp_path: Path) -> None:
    for name in ("model-1.x", "model-2.x", "mine", "step-2/model-9.x", ".partial/of-a-killed-run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    with added_files(tmp_path, last=("config",), replaces="model*") as partial:
        for name in ("config", "model-1.x"):
            (partial / name).write_text("new")
    assert _contents(tmp_path) == {"config": "new", "model-1.x": "new", "mine": "old", "step-2/model-9.x": "old"}


def test_added_files_are_as_readable_as_the_umask_allows(tmp_path: Path) -> None:
    for umask, expected in ((0o022, 0o644), (0o002, 0o664), (0o077, 0o600)):
        earlier = os.umask(umask)
        try:
            with added_files(tmp_path / "model") as partial:
                save_file({"weight": torch.ones(1)}, partial / "model.safetensors")  # private, whatever the umask
                (partial / "config.json").touch()
        finally:
            os.umask(earlier)
        assert [path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()] == [expected] * 2


def test_files_are_added_where_modes_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)  # as on CIFS
    with added_files(tmp_path / "model") as partial:
        (partial / "config.json").write_text("new")
    assert _contents(tmp_path) == {"model/config.json": "new"}


@pytest.mark.parametrize("is_new", [True, False])
def test_files_that_cannot_all_be_written_change_nothing(tmp_path: Path, is_new: bool) -> None:
    folder = tmp_path / "model"
    if not is_new:
        folder.mkdir()
        (folder / "config").write_text("old")
    with pytest.raises(OSError, match="full"), added_files(folder, last=("config",)) as partial:
        (partial / "config").write_text("new")
        raise OSError("full")
    assert folder.exists() == (not is_new)
    assert _contents(tmp_path) == ({} if is_new else {"model/config": "old"})


def test_text_is_appended_once_also_if_an_attempt_failed_midway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "sleep", lambda seconds: None)
    path, opened = tmp_path / "new" / "table.csv", Path.open
    append_text(path, "a\r\n")

    def fail_midway(self: Path, mode: str = "r", **options: Any) -> Any:
        if mode in ("ab", "wb") and failures:
            with opened(self, mode) as file:
                file.write(b"half a li")
            raise failures.pop()
        return opened(self, mode, **options)

    failures = [OSError(errno.ESTALE, "Stale file handle")] * 2
    monkeypatch.setattr(Path, "open", fail_midway)
    append_text(path, "ü\n")
    assert path.read_bytes() == "a\r\nü\n".encode() and not failures
    failures = [OSError(errno.ENOSPC, "No space left on device")] * 2
    with pytest.raises(OSError, match="No space left"):
        append_text(path, "lost\n")
    assert len(failures) == 1 and path.read_bytes() == "a\r\nü\n".encode()
    failures = [OSError(errno.EIO, "Input/output error")]
    append_text(path, "new\n", replaces=True)
    assert path.read_text() == "new\n" and [file.name for file in path.parent.iterdir()] == ["table.csv"]
