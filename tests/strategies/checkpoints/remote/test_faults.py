"""Runs whose store fails: at each call once, at one in ten, for a minute, for ever. Nothing half-written is read."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM

from lightning_realloc import Timeline
from lightning_realloc.errors import CheckpointError, UnwrittenCheckpoint
from lightning_realloc.recording.events import SaveFailed
from lightning_realloc.recording.reader import read_run
from lightning_realloc.remote_path import as_path
from lightning_realloc.retries import attempts
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints.checkpoint_files import is_checkpoint, is_complete
from lightning_realloc.strategies.checkpoints.export import export_checkpoint
from lightning_realloc.strategies.checkpoints.safety.last_pointer import pointed_checkpoint
from lightning_realloc.strategies.checkpoints.safety.verification import verify_checkpoint
from lightning_realloc.strategies.lightning.last_checkpoint import resolve_last
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.checkpoints.remote.object_stores import (
    Faults,
    ObjectStore,
    address,
    between,
    each_once,
    objects,
    one_in_ten,
)

STEPS = 6
SECONDS_PER_STEP = 20.0
AFTER_TWO_STEPS_S = 2.5 * SECONDS_PER_STEP
FAULTS: dict[str, Callable[[], Faults]] = {
    "each call once": each_once,
    "one in ten": lambda: one_in_ten(0),
    "one in ten, again": lambda: one_in_ten(2),  # of 1, three attempts in a row fail
    "for a minute": lambda: between(AFTER_TWO_STEPS_S, AFTER_TWO_STEPS_S + 60.0),
    "for ever": lambda: between(AFTER_TWO_STEPS_S, float("inf")),
}


@pytest.fixture(autouse=True)
def a_store_that_works_again() -> Iterator[None]:
    """Undo what a test did to the store."""
    yield
    ObjectStore.faults = None


def _let_fail(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Let the store fail, and give waits between attempts to its clock."""
    monkeypatch.setattr(attempts, "sleep", faults.wait)
    monkeypatch.setattr(attempts, "FIRST_WAIT_S", 1.0)
    ObjectStore.faults = faults
    return faults


class _Clock(L.Callback):
    """Lets the store's time pass, and reads the steps before the first one."""

    def __init__(self) -> None:
        self.began = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began = trainer.global_step

    def on_train_batch_start(self, *args: Any) -> None:
        if ObjectStore.faults is not None:
            ObjectStore.faults.now_s += SECONDS_PER_STEP * (self.began >= 0)


def _fit(folder: Path, *, max_steps: int = STEPS, resume: str | None = None, **options: Any) -> tuple[Any, int]:
    """Fit with a checkpoint after each step, of which two stay, and a record; return the Trainer and its first step."""
    clock = _Clock()
    saves = ModelCheckpoint(
        f"{address(folder)}/saved", "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1,
        save_last=True, enable_version_counter=False, save_on_train_epoch_end=False,
    )  # fmt: skip
    fitted = runs.trainer(
        ReallocStrategy("static", **options), 1, max_steps=max_steps, max_epochs=STEPS + 1, enable_checkpointing=True,
        callbacks=[saves, clock, Timeline(f"{address(folder)}/record")],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted.fit(runs.sft(), runs.Batches(1, responses=True), ckpt_path=resume)
    return fitted, clock.began


def _checkpoints(folder: Path) -> dict[str, str]:
    """Return the name of each checkpoint -> a line about it; damaged ones fail the test."""
    place = as_path(address(folder / "saved"))
    return {path.name: verify_checkpoint(path) for path in place.iterdir() if is_checkpoint(path)}


@pytest.mark.parametrize("in_background", matrix([False, True], False))
@pytest.mark.parametrize("kind", matrix(list(FAULTS), "each call once", "for a minute"))
def test_a_run_goes_on_and_its_last_checkpoint_is_whole(
    tmp_path: Path, kind: str, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = _let_fail(FAULTS[kind](), monkeypatch)
    fitted, _ = _fit(tmp_path, on_save_error="warn", async_checkpoints=in_background)
    ObjectStore.faults = None
    failed = fitted.strategy.failed_saves.saves
    print(f"{kind}: {faults.num_failed} of {faults.num_calls} calls failed, waits of {sum(faults.waits_s):.1f} s "
          f"({len(faults.waits_s)}), {len(failed)} saves are missing")  # fmt: skip

    assert fitted.global_step == STEPS, "training went on"
    assert faults.num_failed and faults.waits_s
    whole = _checkpoints(tmp_path)
    newest = pointed_checkpoint(as_path(address(tmp_path / "saved" / "last.ckpt")))
    numbered = {int(name.removesuffix(".ckpt").rpartition("=")[2]) for name in whole if name != "last.ckpt"}
    if kind == "each call once" or (kind.startswith("one in ten") and not in_background):  # else threads share draws
        assert not failed and numbered == {STEPS - 1, STEPS}, "three attempts are enough, and two checkpoints stay"
    if kind == "for a minute":
        assert failed and max(numbered) == STEPS, "saves are written again once the store answers"
    if kind == "for ever":
        assert {one.step for one in failed} >= set(range(3, STEPS + 1)), "all of them are named"
        assert numbered == ({1} if in_background else {1, 2}), "removals wait for a save that is complete"
    assert newest.name == f"step={max(numbered)}.ckpt"
    # Nothing but whole checkpoints is left, and `last` holds no second copy.
    if kind in ("each call once", "for a minute"):
        assert set(objects(tmp_path / "saved" / "last.ckpt")) == {"realloc.json"}
        for name in set(whole) - {"last.ckpt"}:
            description = json.loads((tmp_path / "saved" / name / "realloc.json").read_text())
            assert set(objects(tmp_path / "saved" / name)) == {"realloc.json", *description["files"]}
    # The record names what is missing, unless the store was gone until the end.
    if kind == "for a minute":
        events = [one for one in read_run(tmp_path / "record").last.events if isinstance(one, SaveFailed)]
        assert [one.path for one in events] == [one.path for one in failed]
    resumed, began = _fit(tmp_path, max_steps=STEPS + 1, resume="last")
    assert (began, resumed.global_step) == (max(numbered), STEPS + 1)


def test_resumes_and_exports_read_through_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fit(tmp_path, max_steps=2)
    straight, _ = _fit(tmp_path / "straight", max_steps=3)
    last = address(tmp_path / "saved" / "last.ckpt")
    export_checkpoint(last, tmp_path / "wanted")
    _let_fail(each_once(), monkeypatch)
    export_checkpoint(last, address(tmp_path / "exported"))
    assert verify_checkpoint(as_path(last)).startswith("SFT, ")
    resumed, began = _fit(tmp_path, max_steps=3, resume="last")
    ObjectStore.faults = None
    assert began == 2
    ours, theirs = (one.strategy.full_weights("actor") for one in (resumed, straight))
    assert all((ours[name] == weight).all() for name, weight in theirs.items())
    for name in set(objects(tmp_path / "wanted")) - {"README.md"}:  # which names the folder
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes(), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


def test_a_run_ends_by_default_and_names_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = _let_fail(FAULTS["for ever"](), monkeypatch)
    with pytest.raises(UnwrittenCheckpoint, match=r"step=3.ckpt cannot be written: ConnectionResetError: the store"):
        _fit(tmp_path)
    assert len(faults.waits_s) < 40, "attempts do not multiply"
    ObjectStore.faults = None
    assert set(_checkpoints(tmp_path)) == {"step=1.ckpt", "step=2.ckpt", "last.ckpt"}


def test_last_is_never_taken_for_missing_because_the_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted, _ = _fit(tmp_path, max_steps=1)
    _let_fail(Faults(lambda name, path, now_s: True), monkeypatch)
    with pytest.raises(CheckpointError, match=r"^ckpt_path='last' is not known, since the store cannot be read: Conn"):
        resolve_last(fitted, "last")
    ObjectStore.faults = None
    assert resolve_last(fitted, "last") == address(tmp_path / "saved" / "last.ckpt")
    with pytest.raises(CheckpointError) as refused:
        _fit(tmp_path, resume=address(tmp_path / "saved" / "none.ckpt"))
    told = str(refused.value)
    assert "none.ckpt cannot be read, it is missing" in told and "\n" not in told
    assert "step=1.ckpt is the newest" in told


def test_a_pointer_whose_checkpoint_was_removed_leads_to_the_newest_whole_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _fit(tmp_path, max_steps=3)
    saved = tmp_path / "saved"
    (saved / "step=3.ckpt" / "realloc.json").unlink()  # as a kill during its removal leaves it
    with caplog.at_level(logging.WARNING):
        found = pointed_checkpoint(as_path(address(saved / "last.ckpt")))
    assert found == as_path(address(saved / "step=2.ckpt")) and is_complete(found)
    assert "points to step=3.ckpt, which is missing" in caplog.text
    (saved / "step=2.ckpt" / "realloc.json").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint lies next to it"):
        pointed_checkpoint(as_path(address(saved / "last.ckpt")))
