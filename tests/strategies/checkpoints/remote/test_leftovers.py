"""Leftovers of failed and killed saves under other names are removed; those of saves that may be under way stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc.remote_path import as_path
from lightning_realloc.retries import attempts
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints import folders
from lightning_realloc.strategies.checkpoints.folders import ABANDONED_AFTER_S, partial_path, writer_name
from lightning_realloc.strategies.checkpoints.safety.leftovers import ABANDONED_IN_STORE_AFTER_S
from lightning_realloc.strategies.checkpoints.safety.verification import verify_checkpoint
from tests.strategies import runs
from tests.strategies.checkpoints.remote.object_stores import Faults, ObjectStore, address, objects
from tests.strategies.lightning.test_plain_module import Regression, rows


@pytest.fixture(autouse=True)
def a_store_that_works_again() -> Iterator[None]:
    """Undo what a test did to the store."""
    yield
    ObjectStore.faults = None


def _fit(folder: str | Path, steps: int, **options: Any) -> Any:
    """Fit with a checkpoint after each step, of which the newest stays."""
    saves = ModelCheckpoint(
        folder, "{step}", monitor="step", mode="max", save_top_k=1, every_n_train_steps=1,
        enable_version_counter=False, save_on_train_epoch_end=False,
    )  # fmt: skip
    fitted = runs.trainer(
        ReallocStrategy("static", **options), 1, max_steps=steps, max_epochs=steps, enable_checkpointing=True,
        callbacks=[saves],
    )  # fmt: skip
    fitted.fit(runs.sft(), runs.Batches(1, responses=True))
    return fitted


def _dead_writer() -> str:
    """Return the name as a writer of a process of this host that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    space = writer_name().rpartition(f"-{os.getpid()}-")[0]
    return f"{space}-{process.pid}-0123abcd"


def _age(path: Path, seconds: float) -> None:
    for one in (path, *path.rglob("*")):
        os.utime(one, (time.time() - seconds,) * 2, follow_symlinks=False)


def _partial(folder: Path, name: str, writer: str, *, age_s: float = 0.0) -> Path:
    path = partial_path(folder / name, writer)
    path.mkdir()
    (path / "meta.pt").write_bytes(b"half")
    _age(path, age_s)
    return path


# ---- disks
def test_the_next_save_removes_folders_that_dead_saves_left_under_other_names(tmp_path: Path) -> None:
    other_host = "elsewhere-0123abcd-77-0123abcd"
    dead = _partial(tmp_path, "loss=0.53.ckpt", _dead_writer())
    forgotten = _partial(tmp_path, "loss=0.52.ckpt", other_host, age_s=2 * ABANDONED_AFTER_S)
    own = _partial(tmp_path, "loss=0.51.ckpt", writer_name())
    living = _partial(tmp_path, "loss=0.50.ckpt", f"{writer_name().rsplit('-', 2)[0]}-{os.getppid()}-0123abcd")
    recent = _partial(tmp_path, "loss=0.49.ckpt", other_host, age_s=ABANDONED_AFTER_S / 2)
    foreign = tmp_path / "thesis.partial"
    foreign.mkdir()
    pointer = partial_path(tmp_path / "last.ckpt", _dead_writer())
    pointer.symlink_to("loss=0.53.ckpt")
    _fit(tmp_path, 1)
    assert not any(os.path.lexists(path) for path in (dead, forgotten, own, pointer))
    assert living.is_dir() and recent.is_dir() and foreign.is_dir(), "they may be in use"
    assert verify_checkpoint(tmp_path / "step=1.ckpt").startswith("SFT")


def test_a_complete_folder_that_was_not_moved_yet_stays_until_its_path_is_taken(tmp_path: Path) -> None:
    _fit(tmp_path, 1)
    complete = partial_path(tmp_path / "loss=0.5.ckpt", _dead_writer())
    os.rename(tmp_path / "step=1.ckpt", complete)
    assert folders.abandoned_partials(tmp_path) == []
    (tmp_path / "loss=0.5.ckpt").mkdir()
    assert folders.abandoned_partials(tmp_path) == [complete]


def test_a_plain_modules_save_removes_what_a_dead_one_left(tmp_path: Path) -> None:
    left = partial_path(tmp_path / "loss=0.53.ckpt", _dead_writer())
    left.write_bytes(b"half")
    fitted = runs.trainer(ReallocStrategy(), 1, max_steps=1)
    fitted.fit(Regression(), rows(4))
    fitted.save_checkpoint(tmp_path / "loss=0.5.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["loss=0.5.ckpt"]


# ---- stores
def _unfinished(folder: Path, name: str, *, age_s: float) -> Path:
    save = folder / name / "save-0123456789ab"
    save.mkdir(parents=True)
    (save / "meta.pt").write_bytes(b"half")
    _age(save, age_s)
    return save


def test_a_store_is_searched_once_for_saves_that_were_killed_long_ago(tmp_path: Path) -> None:
    old, day = 2 * ABANDONED_IN_STORE_AFTER_S, ABANDONED_IN_STORE_AFTER_S
    killed, recent = (_unfinished(tmp_path, f"loss={age}.ckpt", age_s=age) for age in (old, day / 2))
    active = _unfinished(tmp_path, "active.ckpt", age_s=old)
    (active / "__0_0.distcp").write_bytes(b"new")
    (tmp_path / "notes" / "save-me").mkdir(parents=True)
    (tmp_path / "notes" / "save-me" / "thesis.txt").write_text("")
    _age(tmp_path / "notes", old)
    _fit(address(tmp_path), 1)
    assert not list(objects(killed)) and list(objects(recent)) == ["meta.pt"] and len(list(objects(active))) == 2
    assert list(objects(tmp_path / "notes")) == ["save-me/thesis.txt"]
    # A save that was killed while it replaced a checkpoint is removed, too, and the checkpoint stays.
    stale = _unfinished(tmp_path, "step=1.ckpt", age_s=old)
    _fit(address(tmp_path), 2)
    assert not list(objects(stale))


@pytest.mark.parametrize("in_background", [False, True])
def test_a_failed_saves_files_are_removed_once_the_store_answers(
    tmp_path: Path, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The store fails from the first shard of a checkpoint on, also when its files are to be removed.
    is_down = False

    def fails(name: str, path: str, now_s: float) -> bool:
        nonlocal is_down
        is_down |= "step=2.ckpt" in path and name == "close" and path.endswith(".distcp")
        is_down &= "step=2.ckpt" in path  # it answers again at the next checkpoint
        return is_down

    ObjectStore.faults = faults = Faults(fails)
    monkeypatch.setattr(attempts, "sleep", faults.wait)
    left: list[str] = []

    def collect(original: Callable[..., Any] = ObjectStore.pipe_file) -> None:
        def pipe(self: ObjectStore, path: str, value: bytes, **options: Any) -> None:
            if "step=3.ckpt" in path and path.endswith("meta.pt"):
                left.extend(objects(tmp_path / "step=2.ckpt"))
            original(self, path, value, **options)

        monkeypatch.setattr(ObjectStore, "pipe_file", pipe)

    collect()
    with pytest.warns(UserWarning, match="step 2 is missing"):
        fitted = _fit(address(tmp_path), 4, on_save_error="warn", async_checkpoints=in_background)
    assert [one.step for one in fitted.strategy.failed_saves.saves] == [2]
    assert left and not any(name == "realloc.json" for name in left), "the failed save could not remove its files"
    assert {name.partition("/")[0] for name in objects(tmp_path)} == {"step=4.ckpt"}
    assert verify_checkpoint(as_path(address(tmp_path / "step=4.ckpt"))).startswith("SFT")
