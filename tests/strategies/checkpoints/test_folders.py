"""Check that a kill, a full disk or a removal never costs the last complete checkpoint."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc.errors import CheckpointError
from lightning_realloc.strategies.checkpoints import folders
from lightning_realloc.strategies.checkpoints.checkpoint_files import is_complete, newest_intact
from lightning_realloc.strategies.checkpoints.folders import (
    finish_replacement,
    make_partial,
    partial_path,
    previous_path,
    remove,
    remove_checkpoint,
    replace_folder,
    writer_name,
)
from lightning_realloc.strategies.checkpoints.safety.write_errors import name_write_errors
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.checkpoints.checkpoint_runs import Part, contents, differences, run_parts, save_without_room
from tests.strategies.checkpoints.stored_folders import content_of, make_checkpoint
from tests.workers import WorkerPool


class Killed(BaseException):
    """The end of a process, which no handler of errors sees."""


class KillAt:
    """Replaces every function that changes the file system, and ends the run instead of its ``count``-th change."""

    def __init__(self, count: int) -> None:
        self.left = count

    def wrap(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which may end the run before it changes anything."""

        def changed(*args: Any, **options: Any) -> Any:
            if self.left == 0:
                raise Killed
            self.left -= 1
            return change(*args, **options)

        return changed


def _run_until(count: int, action: Callable[[], object], *, can_exchange: bool) -> bool:
    """Run an action until its ``count``-th change, and return whether it was killed."""
    kill = KillAt(count)
    with ExitStack() as patches:
        for name in ("rename", "unlink", "rmdir"):
            patches.enter_context(patch.object(os, name, kill.wrap(getattr(os, name))))
        exchange = kill.wrap(folders._exchange) if can_exchange else lambda one, other: False
        patches.enter_context(patch.object(folders, "_exchange", exchange))
        try:
            action()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("name", ["last.ckpt", "last"])
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_is_found(tmp_path: Path, can_exchange: bool, name: str) -> None:
    was_killed, count = True, 0
    while was_killed:
        parent = tmp_path / str(count)
        parent.mkdir()
        folder = make_checkpoint(parent / name, "old")
        make_checkpoint(partial_path(folder), "new")
        replace = partial(replace_folder, partial_path(folder), folder)
        was_killed = _run_until(count, replace, can_exchange=can_exchange)

        if name == "last.ckpt":
            found = Path(Trainer(logger=False, callbacks=[ModelCheckpoint(parent)])._checkpoint_connector
                         ._parse_ckpt_path(_Fitting, "last", True, True))  # fmt: skip
        else:
            found = folder
        read = finish_replacement(found)

        assert read == folder and is_complete(read)
        assert content_of(read) == "old" if was_killed and count == 0 else content_of(read) in ("old", "new")
        # The next save completes, whatever the kill left.
        make_partial(folder).rmdir()
        replace_folder(make_checkpoint(partial_path(folder), "newer"), folder)
        assert content_of(folder) == "newer"
        assert [path.name for path in parent.iterdir()] == [name]
        count += 1
    assert count > 3


def ended_writer(number: int = 1) -> str:
    """Return the name of a process that has ended on this host: its number is higher than any process's can be."""
    return f"{writer_name().rsplit('-', 2)[0]}-{2**22 + number}-aa"


class _Fitting:
    """The state that Lightning asks for its name."""

    value = "fit"


def test_a_run_resumes_from_either_side_of_an_interrupted_replacement(workers: WorkerPool, tmp_path: Path) -> None:
    first, last = Part(runs.calls(actor_train="fsdp2"), 1, save=tmp_path / "last.ckpt"), tmp_path / "last.ckpt"
    workers.run(run_parts, [first], 2, world_size=2, init_process_group=False)
    for left, given in ((partial_path(last, ended_writer()), last), (previous_path(last), previous_path(last))):
        os.rename(last, left)
        resumed = replace(first, max_steps=2, resume=given, save=None)
        workers.run(run_parts, [resumed], 2, world_size=2, init_process_group=False)
        assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_another_path_is_read_as_it_is(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "last.ckpt", "kept")
    made = make_checkpoint(previous_path(folder), "older")
    assert finish_replacement(folder) == folder
    assert finish_replacement(made) == made  # named on purpose, since the other one exists
    assert finish_replacement(tmp_path / "none.ckpt") == tmp_path / "none.ckpt"
    make_checkpoint(partial_path(tmp_path / "torn.ckpt"), "half")
    (partial_path(tmp_path / "torn.ckpt") / "meta.pt").unlink()
    assert not finish_replacement(tmp_path / "torn.ckpt").exists()


def test_the_newest_checkpoint_that_nobody_is_about_to_move_is_found(tmp_path: Path) -> None:
    folder, other = tmp_path / "last", tmp_path / "last.ckpt"
    made = {
        make_checkpoint(partial_path(folder, ended_writer(1)), "older"): 3000,
        make_checkpoint(partial_path(folder, ended_writer(2)), "newer"): 2000,
        make_checkpoint(partial_path(folder, "otherhost-1-aa"), "restarted elsewhere"): 1000,
        make_checkpoint(partial_path(folder, "otherhost-2-aa"), "about to be moved"): 1,
        make_checkpoint(partial_path(other, ended_writer()), "of another path"): 1,
    }
    for left, age_s in made.items():
        for path in (*left.rglob("*"), left):
            os.utime(path, (time.time() - age_s,) * 2)
    for expected in ("restarted elsewhere", "newer", "older"):
        assert content_of(finish_replacement(folder)) == expected
        remove(folder)
    assert finish_replacement(folder) == folder and not folder.exists()
    assert content_of(finish_replacement(other)) == "of another path"


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "step=1.ckpt", "old")
    for can_exchange in (True, False):
        link = tmp_path / f"last-{can_exchange}.ckpt"
        link.symlink_to(target)
        with patch.object(folders, "_exchange", folders._exchange if can_exchange else lambda one, other: False):
            replace_folder(make_checkpoint(partial_path(link), "new"), link)
        assert content_of(link) == "new" and not link.is_symlink()
    assert content_of(target) == "old"


def test_two_runs_that_save_to_one_path_mix_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    own, other = partial_path(folder), partial_path(folder, "otherhost-1-aa")
    assert own != other
    make_checkpoint(other, "other")
    (tmp_path / "last.ckpt.partial").mkdir()  # of an earlier version
    partial_path(folder, ended_writer()).mkdir()
    # Another container with the same host name: its processes have numbers that are not in use here.
    host, _, number, token = ended_writer().rsplit("-", 3)
    elsewhere = partial_path(folder, f"{host}-00000000-{number}-{token}")
    elsewhere.mkdir()
    make_partial(folder).rmdir()
    elsewhere.rmdir()
    make_checkpoint(own, "own")
    assert {path.name for path in tmp_path.iterdir()} == {own.name, other.name}, "what kills left is removed"
    replace_folder(own, folder)
    replace_folder(other, folder)
    assert content_of(folder) == "other" and is_complete(folder)
    # Nobody has written there for hours: the other run's host has lost it.
    other.mkdir()
    os.utime(other, (1e9, 1e9))
    make_partial(folder).rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


# ---- removing
def test_a_link_to_a_removed_checkpoint_leads_to_the_newest_other_one(tmp_path: Path) -> None:
    first, second, third = (make_checkpoint(tmp_path / f"step={step}.ckpt", f"{step}") for step in (1, 2, 3))
    for age, folder in enumerate((third, second, first)):
        os.utime(folder / "realloc.json", (1e9 - age, 1e9 - age))
    link = tmp_path / "last.ckpt"
    link.symlink_to(first.name)
    remove_checkpoint(first)
    assert link.is_symlink() and content_of(link) == "3"
    (third / "meta.pt").unlink()
    remove_checkpoint(second)
    assert second.exists(), "a link to the incomplete one is no newer checkpoint"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]


def test_nothing_is_removed_that_is_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, middle, new = (make_checkpoint(tmp_path / f"{number}.ckpt", "") for number in range(3))
    for age, folder in enumerate((new, middle, old)):
        os.utime(folder / "realloc.json", (1e9 - age, 1e9 - age))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("ten years")
    (tmp_path / "link.ckpt").symlink_to(middle)

    for name in ("notes", "nothing.ckpt", "link.ckpt", "0.ckpt"):
        remove_checkpoint(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"1.ckpt", "2.ckpt", "notes"}
    (new / "meta.pt").unlink()
    remove_checkpoint(middle)
    assert middle.exists()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'notes'} is not a checkpoint of several models, and is not removed",
        f"{middle} is not removed, since {new} is newer but incomplete",
    ]
    remove_checkpoint(new)  # damaged
    remove_checkpoint(middle)  # as the learning-rate finder removes its own, the only one
    assert {path.name for path in tmp_path.iterdir()} == {"notes"}


def test_a_kill_while_removing_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    was_killed, count = True, 0
    while was_killed:
        old, new = (make_checkpoint(tmp_path / f"{count}-{name}.ckpt", name) for name in ("old", "new"))
        os.utime(new / "realloc.json", (2e9 + count, 2e9 + count))
        was_killed = _run_until(count, partial(remove_checkpoint, old), can_exchange=True)
        assert not old.exists() or is_complete(old)
        assert newest_intact(old.with_name("any")) == new
        count += 1
    assert count > 3


# ---- disks
@pytest.mark.parametrize("limits", matrix([{0: 20_000, 1: 20_000}, {1: 20_000}, {0: 100}], {1: 20_000}), ids=str)
def test_a_write_error_names_the_disk_and_leaves_earlier_checkpoints(
    workers: WorkerPool, tmp_path: Path, limits: dict[int, int]
) -> None:
    folder = tmp_path / "run.ckpt"
    answers = workers.run(save_without_room, folder, 2, limits, world_size=2, init_process_group=False)

    assert answers[0] == answers[1] and len(answers[0]) == 2
    for refusal, path in zip(answers[0], (folder, folder.with_name("new.ckpt")), strict=True):
        assert refusal.startswith(f"{path} cannot be written: File too large; its tensors need "), refusal
        assert "and the disk at /" in refusal and "save_top_k" in refusal
    assert [path.name for path in folder.parent.iterdir()] == ["run.ckpt"]
    assert differences(contents(folder), contents(folder)) == {}


@pytest.mark.parametrize(("error", "cause", "names_disk"), [
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device", True),
    (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), os.strerror(errno.EDQUOT), True),
    (OSError(errno.EROFS, os.strerror(errno.EROFS)), "Read-only file system", True),
    (OSError(errno.EACCES, os.strerror(errno.EACCES)), "Permission denied", False),
    (TypeError("cannot pickle a lambda\nat all"), "TypeError: cannot pickle a lambda", False),
])  # fmt: skip
def test_the_cause_of_a_write_error_is_found_below_those_that_follow_it(
    tmp_path: Path, error: Exception, cause: str, names_disk: bool
) -> None:
    with pytest.raises(CheckpointError) as caught, name_write_errors(tmp_path / "a" / "b", needed_bytes=0):
        try:
            raise error
        finally:
            if isinstance(error, OSError):
                raise RuntimeError("unexpected pos 704 vs 598")
    assert f"{tmp_path / 'a' / 'b'} cannot be written: {cause}" in str(caught.value)
    assert ("the disk at /" in str(caught.value)) == names_disk
    assert str(caught.value).endswith("; earlier checkpoints are unchanged")


def test_without_a_known_cause_a_disk_with_too_little_room_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"RuntimeError: unexpected pos; its tensors need 1000000\.00 TB, and"),
        name_write_errors(tmp_path, needed_bytes=10**18),
    ):
        raise RuntimeError("unexpected pos")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTEMPTY])
def test_files_that_vanish_during_a_save_point_to_another_run(number: int, tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="another run seems to write"),
        name_write_errors(tmp_path, needed_bytes=0),
    ):
        raise OSError(number, os.strerror(number))
