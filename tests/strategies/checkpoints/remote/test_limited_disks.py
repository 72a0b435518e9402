"""Network disks that lack links, fsync or the exchange of two folders, and files of a run that they fail to write."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc import PredictionWriter
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import UnwrittenCheckpoint
from lightning_realloc.retries import attempts
from lightning_realloc.runtime.messages.flight_record import FlightRecord
from lightning_realloc.runtime.messages.watchdog import write_flight_record
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.calls.weight_updates import BatchVersions, VersionLog
from lightning_realloc.strategies.checkpoints import folders
from lightning_realloc.strategies.checkpoints.safety.last_pointer import pointed_checkpoint
from lightning_realloc.strategies.checkpoints.safety.verification import verify_checkpoint
from tests.strategies import runs

CANNOT = OSError(errno.EOPNOTSUPP, "Operation not supported")


def _refuse(*arguments: Any, **options: Any) -> None:
    raise CANNOT


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without links, fsync and the exchange of two paths."""
    for name in ("link", "symlink", "fsync"):
        monkeypatch.setattr(os, name, _refuse)
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)


def _fit(folder: Path, steps: int, resume: str | None = None) -> Any:
    saves = ModelCheckpoint(
        folder, "{step}", monitor="step", mode="max", save_top_k=1, every_n_train_steps=1, save_last=True,
        enable_version_counter=False, save_on_train_epoch_end=False,
    )  # fmt: skip
    fitted = runs.trainer(
        ReallocStrategy("static"), 1, max_steps=steps, max_epochs=steps, enable_checkpointing=True, callbacks=[saves]
    )
    fitted.fit(runs.sft(), runs.Batches(1, responses=True), ckpt_path=resume)
    return fitted


@pytest.mark.usefixtures("limited")
def test_last_is_a_small_file_that_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fit(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step=2.ckpt", "last.ckpt"}
    assert [path.name for path in (tmp_path / "last.ckpt").iterdir()] == ["realloc.json"]
    assert json.loads((tmp_path / "last.ckpt" / "realloc.json").read_text())["checkpoint"] == "step=2.ckpt"
    assert verify_checkpoint(pointed_checkpoint(tmp_path / "last.ckpt")).startswith("SFT")
    moved: list[str] = []
    renamed = os.rename

    def rename(source: Path, target: Path) -> None:
        moved.append(Path(target).name)
        renamed(source, target)

    monkeypatch.setattr(os, "rename", rename)
    fitted = _fit(tmp_path, 3, "last")
    assert fitted.global_step == 3 and "last.ckpt" not in moved, "there was a `last` at every moment"
    assert pointed_checkpoint(tmp_path / "last.ckpt") == tmp_path / "step=3.ckpt"


@pytest.mark.usefixtures("limited")
def test_a_checkpoint_that_cannot_be_moved_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = _fit(tmp_path, 1)
    place = tmp_path / "mine.ckpt"
    fitted.save_checkpoint(place)
    before = (place / "realloc.json").read_bytes()
    renamed = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(target) == place and Path(source).suffix == ".partial":
            raise PermissionError(errno.EACCES, "Permission denied")
        renamed(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(UnwrittenCheckpoint, match=r"mine\.ckpt cannot be written: Permission denied; check"):
        fitted.save_checkpoint(place)
    assert (place / "realloc.json").read_bytes() == before and verify_checkpoint(place).startswith("SFT")
    assert {path.name for path in tmp_path.iterdir()} == {"step=1.ckpt", "last.ckpt", "mine.ckpt"}


# ---- files of a run
class _Disk:
    """Lets files be opened for writing only some times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: OSError) -> None:
        self.errors, self.waits_s = list(errors), list[float]()
        opened = Path.open

        def open_file(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if self.errors and mode != "r":
                raise self.errors.pop(0)
            return opened(path, mode, *arguments, **options)

        monkeypatch.setattr(Path, "open", open_file)
        monkeypatch.setattr(attempts, "sleep", self.waits_s.append)


def _stale() -> OSError:
    return OSError(errno.ESTALE, "Stale file handle")


def _full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_a_log_of_versions_is_tried_again_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = VersionLog(0, None)
    log.write_to(tmp_path)
    log.write(BatchVersions(0, "actor.generate", 0))
    disk = _Disk(monkeypatch, _stale(), _stale())
    log.write(BatchVersions(1, "actor.generate", 1))
    assert len(disk.waits_s) == 2
    disk.errors = [_full()]
    with caplog.at_level(logging.WARNING):
        for iteration in (2, 3):
            log.write(BatchVersions(iteration, "actor.generate", iteration))
    lines = [json.loads(line)["iteration"] for line in (tmp_path / "rank_0.jsonl").read_text().splitlines()]
    assert lines == [0, 1] and caplog.text.count("the log of versions ends here") == 1


def test_a_flight_record_is_tried_again_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = _Disk(monkeypatch, _stale())
    assert "Stacks:" in write_flight_record(FlightRecord(), tmp_path, 0).read_text()
    assert len(disk.waits_s) == 1
    disk.errors = [_full()]
    with caplog.at_level(logging.WARNING):
        write_flight_record(FlightRecord(), tmp_path, 1)
    assert "rank1.txt cannot be written (No space left on device)" in caplog.text


class _Rows:
    """Gives a batch's rows, as algorithms do."""

    def sample_rows(self, samples: Samples) -> list[dict[str, int]]:
        """Return a row for each sample."""
        return [{"row": int(one)} for one in samples.ids]


def test_predictions_are_there_once_after_failed_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, module = cast(Any, SimpleNamespace(is_global_zero=True)), cast(Any, _Rows())
    writer = PredictionWriter(tmp_path / "predictions.jsonl")
    writer.on_predict_start(trainer, module)
    batches = list(runs.Batches(2, responses=True))
    for batch in batches:
        disk = _Disk(monkeypatch, _stale(), _stale())
        writer.on_predict_batch_end(trainer, module, batch)
        assert len(disk.waits_s) == 2
    assert not (tmp_path / "predictions.jsonl").exists()
    writer.on_predict_end(trainer, module)
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert rows == [row for batch in batches for row in _Rows().sample_rows(batch)]
