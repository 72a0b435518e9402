"""Outputs of a run in an object store: the same as on a disk, whole or not there, and a line where the store fails."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoModelForCausalLM

from lightning_realloc import RolloutTable, SaveHuggingFace, Timeline
from lightning_realloc.callbacks.loggers.logged_table import Table
from lightning_realloc.commands.dashboard_command import run_dashboard
from lightning_realloc.commands.report_command import run_report
from lightning_realloc.errors import CheckpointError, ConfigError
from lightning_realloc.output_files import added_files
from lightning_realloc.recording.rank_recorder import JsonLines
from lightning_realloc.recording.reader import read_run
from lightning_realloc.remote_output import UPLOAD_EVERY_S, UploadedText, local_copy, uploaded_folder
from lightning_realloc.remote_path import AnyPath, RemotePath, as_path
from lightning_realloc.strategies.checkpoints.export import export_checkpoint
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.checkpoints.remote.object_stores import Faults, ObjectStore, address, objects


@pytest.fixture(autouse=True)
def a_store_that_works() -> Iterator[None]:
    """Undo what a test did to the store."""
    yield
    ObjectStore.bytes_left = ObjectStore.reads_left = None


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a store with the outputs of a run of GRPO, all of which went to addresses."""
    folder = tmp_path_factory.mktemp("store")
    place = address(folder)
    outputs = [Timeline(), RolloutTable(every_n_steps=1, path=f"{place}/own.csv"), SaveHuggingFace(f"{place}/model")]
    logger = CSVLogger(place, name="logs", version="x")
    fitted = runs.trainer("realloc", 1, max_steps=3, callbacks=outputs, logger=logger, log_every_n_steps=1)
    fitted.fit(runs.grpo(), runs.Batches(3))
    fitted.save_checkpoint(f"{place}/run.ckpt")
    return folder


# ---- outputs of a run
def test_a_record_in_a_store_is_read_back_whole(store: Path) -> None:
    record = read_run(store / "logs/x/record")
    assert not record.problems
    assert [iteration.step for iteration in record.last.ranks[0]] == [1, 2, 3]
    assert [row.step for row in record.last.metrics] == [1, 2, 3]
    trace = json.loads((store / "logs/x/record/trace.json").read_text())
    assert any(event.get("ph") == "X" for event in trace["traceEvents"])


@pytest.mark.parametrize("is_remote", [False, True])
def test_conversations_are_appended_next_to_a_table_and_a_new_run_replaces_them(
    tmp_path: Path, is_remote: bool
) -> None:
    path = as_path(f"{address(tmp_path)}/own.csv") if is_remote else tmp_path / "own.csv"

    def lines(step: int, *, begins_run: bool, has_talk: bool = True) -> list[str]:
        talks = ({"step": step, "failure": "ü"},) if has_talk else ()
        Table("rollouts", ({"step": step},), step, begins_run, talks).append_to(path)
        return (tmp_path / "own.jsonl").read_text("utf-8").splitlines()

    assert lines(0, begins_run=False) == ['{"step": 0, "failure": "ü"}']
    assert lines(1, begins_run=False) == ['{"step": 0, "failure": "ü"}', '{"step": 1, "failure": "ü"}']
    assert lines(5, begins_run=True) == ['{"step": 5, "failure": "ü"}']
    assert lines(6, begins_run=True, has_talk=False) == []


def test_a_table_of_rollouts_in_a_store_has_the_rows_of_all_iterations(store: Path) -> None:
    for file in ("own.csv", "logs/x/rollouts.csv"):
        lines = (store / file).read_text().splitlines()
        assert lines[0].startswith("step,") and sum(line.startswith("step,") for line in lines) == 1
        assert {line.split(",")[0] for line in lines[1:]} >= {"0", "1", "2"}


def test_a_report_is_made_from_an_address(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written: list[str] = []
    assert run_report([address(store / "logs"), "--format", "md"], written.append) == 0
    assert written == [f"{tmp_path}/report.md\n"]
    text = (tmp_path / "report.md").read_text()
    assert address(store / "logs") in text and "/tmp" not in text.replace(str(store), "")
    local: list[str] = []
    run_report([str(store / "logs"), "--format", "md", "--output", "-"], local.append)
    assert text.replace(address(store / "logs"), str(store / "logs")) == local[0]
    with pytest.raises(ConfigError, match=r"^shelf://.* is an address, and the dashboard follows files on a disk"):
        run_dashboard([address(store / "logs")], written.append)


def test_a_model_in_a_store_is_the_one_of_an_export(store: Path, tmp_path: Path) -> None:
    ours = export_checkpoint(address(store / "run.ckpt"), address(store / "exported"))
    theirs = export_checkpoint(address(store / "run.ckpt"), tmp_path / "exported")
    assert ours == as_path(address(store / "exported"))
    assert set(objects(store / "exported")) == set(objects(store / "model")) == set(objects(tmp_path / "exported"))
    for name in objects(tmp_path / "exported"):
        assert (store / "exported" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes(), name
    for folder in (store / "exported", store / "model"):
        read = AutoModelForCausalLM.from_pretrained(folder)
        wanted = AutoModelForCausalLM.from_pretrained(theirs).state_dict()
        assert all((read.state_dict()[name] == weight).all() for name, weight in wanted.items())
    # It replaces an earlier export, with its shards, and nothing else.
    (store / "exported/model-00002-of-00002.safetensors").write_bytes(b"")
    (store / "exported/notes.txt").write_text("mine")
    (store / "exported/step-1").mkdir()
    (store / "exported/step-1/model-00001-of-00002.safetensors").write_bytes(b"")  # of a model of its own
    export_checkpoint(address(store / "run.ckpt"), address(store / "exported"))
    assert set(objects(store / "exported")) == {
        *objects(tmp_path / "exported"), "notes.txt", "step-1/model-00001-of-00002.safetensors",
    }  # fmt: skip
    (store / "other").mkdir()
    (store / "other/thesis.txt").write_text("")
    with pytest.raises(CheckpointError, match="holds files but no earlier export that could be overwritten"):
        export_checkpoint(address(store / "run.ckpt"), address(store / "other"))


def test_a_model_for_the_hub_is_written_to_a_disk() -> None:
    with pytest.raises(ConfigError, match=r"uploads files from a disk, and 's3://bucket/x' is an address; give"):
        SaveHuggingFace("s3://bucket/x", push_to_hub="user/model")


# ---- a store that fails
@pytest.mark.parametrize("room", matrix([0, 2_000, 100_000], 2_000))
def test_an_export_that_fails_midway_leaves_no_model_or_the_earlier_one(store: Path, tmp_path: Path, room: int) -> None:
    target, folder = address(tmp_path / "model"), tmp_path / "model"
    for has_earlier in (False, True):
        before = {name: (folder / name).read_bytes() for name in objects(folder)}
        ObjectStore.bytes_left = room
        with pytest.raises(CheckpointError) as error:
            export_checkpoint(address(store / "run.ckpt"), target, dtype="bfloat16")
        ObjectStore.bytes_left = None
        told = "cannot be written: ConnectionError: the store has closed the connection; "
        assert str(error.value).startswith(f"{target} {told}") and "\n" not in str(error.value)
        assert {name: (folder / name).read_bytes() for name in objects(folder)} == before
        if not has_earlier:
            export_checkpoint(address(store / "run.ckpt"), target)
    export_checkpoint(address(store / "run.ckpt"), target)
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


class Killed(BaseException):
    """Ends a process at once: nothing is cleaned up."""


def _model_files(folder: Path) -> dict[str, bytes] | None:
    """Return the files that ``from_pretrained`` may read; None without a config, as it then reads none."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if folder.is_dir() else {}
    return found if "config.json" in found else None


@pytest.mark.parametrize("copies", [True, False])
def test_a_kill_at_any_call_of_the_store_mixes_no_two_models(
    tmp_path: Path, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = {"model.safetensors": b"new", "config.json": b"{new}", "tokenizer.json": b"new"}
    shards = {f"model-0000{number}-of-00002.safetensors": b"old" for number in (1, 2)}
    old = {**shards, "model.safetensors.index.json": b"old", "config.json": b"{old}", "tokenizer.json": b"old"}
    monkeypatch.setattr(ObjectStore, "copies", copies)
    seen = set()
    for case, (first, second) in enumerate([(old, new), (new, old), (None, new)]):
        for killed_at in itertools.count():
            folder, calls = tmp_path / f"{case}-{killed_at}", itertools.count()
            folder.mkdir()
            for name, content in (first or {}).items():
                (folder / name).write_bytes(content)

            def kill(name: str, path: str, now_s: float, calls: Any = calls, killed_at: int = killed_at) -> bool:
                if next(calls) == killed_at:
                    raise Killed
                return False

            monkeypatch.setattr(ObjectStore, "faults", Faults(kill))
            try:
                _upload_all(second, as_path(address(folder)))
                break
            except Killed:
                pass
            finally:
                monkeypatch.setattr(ObjectStore, "faults", None)
            left = _model_files(folder)
            assert left in (None, first, second), f"killed at call {killed_at}: {left}"
            seen.add("none" if left is None else "first" if left == first else "second")
            _upload_all(second, as_path(address(folder)))
            assert {name: (folder / name).read_bytes() for name in objects(folder)} == second, (
                "and nothing is left over"
            )
    assert seen >= {"none", "first", "second"}


def _upload_all(files: Mapping[str, bytes], target: AnyPath) -> None:
    with uploaded_folder(target, last="config.json", replaces="model*.safetensors*") as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)


def test_a_kill_while_files_move_on_a_disk_mixes_no_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = os.replace
    for killed_at in range(4):
        folder, moves = tmp_path / str(killed_at), itertools.count()
        folder.mkdir()
        old = {"config.json": b"old", "a.safetensors": b"old", "b.safetensors": b"old"}
        for name, content in old.items():
            (folder / name).write_bytes(content)

        def kill(source: Path, target: Path, moves: Any = moves, killed_at: int = killed_at) -> None:
            if next(moves) == killed_at:
                raise Killed
            replaced(source, target)

        monkeypatch.setattr(os, "replace", kill)
        new = {"config.json": b"new", "a.safetensors": b"new", "c.safetensors": b"new"}
        with suppress(Killed), added_files(folder, last=("config.json",), replaces="*.safetensors") as partial:
            for name, content in new.items():
                (partial / name).write_bytes(content)
        assert _model_files(folder) in (None, new)
    assert _model_files(folder) == new


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda place: Timeline(folder=place), "Timeline's folder"),
        (lambda place: RolloutTable(path=f"{place}/x.csv"), "RolloutTable's path"),
        (SaveHuggingFace, "SaveHuggingFace"),
    ],
)
def test_a_wrong_address_is_refused_before_the_first_step(make: Callable[[str], Any], setting: str) -> None:
    fitted = runs.trainer("realloc", 1, max_steps=1, callbacks=[make("nope://bucket/run")])
    told = rf"{setting}: nope://bucket/run.* cannot be written: CheckpointError: .*Protocol not known: nope"
    with pytest.raises((ConfigError, CheckpointError), match=told):
        fitted.fit(runs.grpo(), runs.Batches(1))
    assert fitted.global_step == 0


def test_a_run_goes_on_while_its_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_realloc.remote_output.UPLOAD_EVERY_S", 0.0)
    table = RolloutTable(every_n_steps=1, path=address(tmp_path / "x.csv"))
    callbacks = [Timeline(address(tmp_path / "record")), table, _FailsAfterStep(2)]
    fitted = runs.trainer("realloc", 1, max_steps=4, callbacks=callbacks)
    with caplog.at_level(logging.WARNING):
        fitted.fit(runs.grpo(), runs.Batches(4))
    assert fitted.global_step == 4
    lines = [record.getMessage() for record in caplog.records if "the store has closed" in record.getMessage()]
    assert lines and all("\n" not in line for line in lines)
    assert {line.partition(" ")[0] for line in lines} >= {
        address(tmp_path / name) for name in ("x.csv", "record/rank_0.jsonl", "record/metrics.jsonl")
    }
    assert [row.step for row in read_run(tmp_path / "record").last.metrics][:2] == [1, 2], "earlier lines are whole"
    assert (tmp_path / "x.csv").read_text().startswith("step,")


class _FailsAfterStep(runs.Record):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Let the store fail from here on."""
        if trainer.global_step == self.step:
            ObjectStore.bytes_left = 0


# ---- a file that grows
def test_a_growing_file_is_uploaded_once_a_minute_and_goes_on_in_a_resumed_run(tmp_path: Path) -> None:
    now = [0.0]
    file, path = tmp_path / "x.jsonl", as_path(address(tmp_path / "x.jsonl"))
    assert isinstance(path, RemotePath)
    text = UploadedText(path, clock=lambda: now[0])
    text.write("a\n")
    text.flush()
    assert not file.exists()
    now[0] = UPLOAD_EVERY_S
    text.flush()
    assert file.read_text() == "a\n"
    text.write("b\n")
    text.flush()
    assert file.read_text() == "a\n"
    text.close()
    assert file.read_text() == "a\nb\n"
    lines = JsonLines(path)
    lines.write({"c": 1})
    lines.close()
    assert file.read_text() == 'a\nb\n{"c":1}\n'
    ObjectStore.reads_left = 0
    with pytest.raises(ConfigError, match=r"x.jsonl cannot be read: ConnectionError: the store has closed the con"):
        UploadedText(path)
    with (
        pytest.raises(ConfigError, match=rf"{tmp_path.name} cannot be read: ConnectionError"),
        local_copy(as_path(address(tmp_path)), wanted=lambda name: True),
    ):
        pass
