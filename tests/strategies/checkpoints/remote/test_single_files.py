"""Checkpoints of a module without calls, in a store or on a disk that fails: whole files, pointers, and errors."""

from __future__ import annotations

import errno
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc.errors import CheckpointError, UnwrittenCheckpoint
from lightning_realloc.remote_path import as_path
from lightning_realloc.retries import attempts
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints.checkpoint_files import is_complete
from lightning_realloc.strategies.checkpoints.safety.single_file import SingleFile
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.checkpoints.remote.object_stores import (
    Faults,
    ObjectStore,
    address,
    each_once,
    objects,
    one_in_ten,
)
from tests.strategies.lightning.test_plain_module import Regression, rows
from tests.workers import WorkerPool

STEPS = 6
NO_LINKS = OSError(errno.EOPNOTSUPP, "Operation not supported")


@pytest.fixture(autouse=True)
def a_store_that_works_again() -> Iterator[None]:
    """Undo what a test did to the store."""
    yield
    ObjectStore.faults, ObjectStore.copies = None, True


def _let_fail(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Faults:
    monkeypatch.setattr(attempts, "sleep", faults.wait)
    ObjectStore.faults = faults
    return faults


class _Beginning(L.Callback):
    def __init__(self) -> None:
        self.step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.step = trainer.global_step


def _fit(folder: Path | str, *, steps: int = STEPS, resume: str | None = None, ranks: int = 1, **options: Any) -> Any:
    """Fit with a checkpoint after each step, of which two stay; return the Trainer and the step it began with."""
    saves = ModelCheckpoint(
        folder, "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1, save_last=True,
        enable_version_counter=False, save_on_train_epoch_end=False,
    )  # fmt: skip
    begin = _Beginning()
    fitted = runs.trainer(
        ReallocStrategy(**options), ranks, max_steps=steps, max_epochs=-1, enable_checkpointing=True,
        callbacks=[saves, begin],
    )  # fmt: skip
    fitted.fit(Regression(), rows(4), ckpt_path=resume)
    return fitted, begin.step


def _content(path: Path) -> Any:
    return torch.load(path, weights_only=True)


# ---- stores
@pytest.mark.parametrize("copies", [True, False])
def test_last_is_a_copy_that_the_store_makes_or_a_second_file(tmp_path: Path, copies: bool) -> None:
    ObjectStore.copies = copies
    _fit(address(tmp_path), steps=3)
    assert set(objects(tmp_path)) == {"step=2.ckpt", "step=3.ckpt", "last.ckpt"}
    ours, theirs = (_content(tmp_path / name) for name in ("last.ckpt", "step=3.ckpt"))
    assert ours["global_step"] == theirs["global_step"] == 3
    resumed, began = _fit(address(tmp_path), steps=4, resume="last")
    assert (began, resumed.global_step) == (3, 4)


@pytest.mark.parametrize("seed", matrix([None, 1, 2], None, 1))
def test_a_store_that_fails_now_and_then_loses_no_file(
    tmp_path: Path, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fit(tmp_path / "disk")
    faults = _let_fail(each_once() if seed is None else one_in_ten(seed), monkeypatch)
    fitted, _ = _fit(address(tmp_path / "store"), on_save_error="warn")
    last = SingleFile(as_path(address(tmp_path / "store" / "last.ckpt")), TorchCheckpointIO())
    _let_fail(each_once(), monkeypatch)
    assert last.read(weights_only=True)["global_step"] == STEPS
    ObjectStore.faults = None
    resumed, began = _fit(address(tmp_path / "store"), steps=STEPS + 1, resume="last")
    print(f"{faults.num_failed} of {faults.num_calls} calls failed, {len(faults.waits_s)} waits")
    assert faults.num_failed and not fitted.strategy.failed_saves.saves
    assert (began, resumed.global_step) == (STEPS, STEPS + 1)
    assert set(objects(tmp_path / "store")) == {f"step={STEPS}.ckpt", f"step={STEPS + 1}.ckpt", "last.ckpt"}
    ours, theirs = (_content(tmp_path / kind / f"step={STEPS}.ckpt")["state_dict"] for kind in ("store", "disk"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def fit_while_the_store_fails(folder: Path, world_size: int) -> tuple[int, int, list[str]]:
    """Fit while two checkpoints cannot be written; return the steps, failed saves and warnings of this rank."""
    ObjectStore.faults = faults = Faults(lambda name, path, now_s: "step=3" in path or "step=4" in path)
    attempts.sleep = faults.wait
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted, _ = _fit(address(folder), ranks=world_size, on_save_error="warn")
    ObjectStore.faults = None
    told = [str(one.message) for one in caught if "training goes on" in str(one.message)]
    return fitted.global_step, len(fitted.strategy.failed_saves.saves), told


def test_two_ranks_train_on_without_a_file_that_cannot_be_written(workers: WorkerPool, tmp_path: Path) -> None:
    ends = workers.run(fit_while_the_store_fails, tmp_path, 2, world_size=2, init_process_group=False)
    assert [steps for steps, *_ in ends] == [STEPS, STEPS]
    assert [len(told) for *_, told in ends] == [2, 0], "one warning for each missing file, on one rank"
    assert "step=3.ckpt cannot be written: ConnectionResetError: " in ends[0][2][0]
    assert set(objects(tmp_path)) == {"step=5.ckpt", "step=6.ckpt", "last.ckpt"}, "replaced ones are removed later"
    assert all(is_complete(as_path(address(tmp_path / name))) for name in objects(tmp_path))


def test_a_file_that_cannot_be_removed_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _let_fail(Faults(lambda name, path, now_s: name == "rm_file" and "step=2" in path), monkeypatch)
    with caplog.at_level(logging.WARNING):
        fitted, _ = _fit(address(tmp_path))
    assert fitted.global_step == STEPS and "step=2.ckpt was not removed: ConnectionResetError" in caplog.text
    assert set(objects(tmp_path)) == {"step=2.ckpt", "step=5.ckpt", "step=6.ckpt", "last.ckpt"}


def test_the_store_is_named_when_no_file_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _let_fail(Faults(lambda name, path, now_s: "step=3" in path), monkeypatch)
    with pytest.raises(UnwrittenCheckpoint, match=r"step=3\.ckpt cannot be written: ConnectionResetError: the store"):
        _fit(address(tmp_path))
    assert set(objects(tmp_path)) == {"step=1.ckpt", "step=2.ckpt", "last.ckpt"}
    assert _content(tmp_path / "last.ckpt")["global_step"] == 2


# ---- reading
@pytest.mark.parametrize("in_store", [False, True])
def test_a_checkpoint_that_is_missing_or_damaged_is_an_error_that_names_another(tmp_path: Path, in_store: bool) -> None:
    place = address(tmp_path) if in_store else str(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        _fit(place, resume=f"{place}/none.ckpt")
    way_out = "correct ckpt_path, or leave it out to start from the beginning"
    nothing = f"there is no checkpoint {place}/none.ckpt; there is no complete checkpoint next to it: {way_out}"
    assert str(refused.value) == nothing
    _fit(place, steps=2)
    content = (tmp_path / "step=2.ckpt").read_bytes()
    (tmp_path / "last.ckpt").unlink()
    (tmp_path / "half.ckpt").write_bytes(content[: len(content) // 2])
    for name, told in (("none", "there is no checkpoint"), ("half", "half.ckpt cannot be read: ")):
        with pytest.raises(
            CheckpointError, match=rf"step=2\.ckpt is the newest complete one .*: {way_out}$"
        ) as refused:
            _fit(place, resume=f"{place}/{name}.ckpt")
        assert told in str(refused.value) and "\n" not in str(refused.value)


# ---- disks
def test_a_kill_while_a_file_is_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, _ = _fit(tmp_path, steps=2)
    earlier = (tmp_path / "step=2.ckpt").read_bytes()

    def killed(self: Path, content: Any) -> int:
        with self.open("wb") as file:
            file.write(bytes(content)[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            fitted.save_checkpoint(tmp_path / "step=2.ckpt")
    assert (tmp_path / "step=2.ckpt").read_bytes() == earlier
    fitted.save_checkpoint(tmp_path / "step=2.ckpt")
    assert is_complete(tmp_path / "step=2.ckpt") and not list(tmp_path.glob("*.partial"))


def test_a_disk_without_links_gets_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise NO_LINKS

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(os, "link", refuse)
    _fit(tmp_path, steps=3)
    assert {path.name for path in tmp_path.iterdir()} == {"step=2.ckpt", "step=3.ckpt", "last.ckpt"}
    assert not (tmp_path / "last.ckpt").is_symlink() and _content(tmp_path / "last.ckpt")["global_step"] == 3
    _, began = _fit(tmp_path, steps=4, resume="last")
    assert began == 3
