"""Starts of vLLM's process: interpreters, lines about them, failures with their causes, and files that they leave."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import VLLMEngine, VLLMOptions
from lightning_realloc.generation.vllm.messages import StartFailed
from lightning_realloc.generation.vllm.owned_folder import OwnedFolder
from lightning_realloc.generation.vllm.start.interpreter import PROGRAM, vllm_version_of
from lightning_realloc.generation.vllm.start.process_log import ProcessLog
from tests.generation.vllm.stand_in import notes, stand_in
from tests.generation.vllm.test_vllm_engine import GREEDY, engine_with
from tests.models import tiny_model


def test_an_interpreter_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VLLMEngine(tiny_model("llama"), options=VLLMOptions(python=str(tmp_path / "none")))
    with pytest.raises(GenerationError, match=r"vLLM's interpreter .*none does not start: No such file"):
        engine.generate([[5]], GREEDY)
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "other"))
    with pytest.raises(GenerationError, match=r"vLLM's interpreter .*other does not start"):
        VLLMEngine(tiny_model("llama")).generate([[5]], GREEDY)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("/bin/ls", r"vLLM's interpreter /bin/ls runs no Python \(it ended with exit code 0\); name that of an env"),
        ("/bin/false", r"runs no Python \(it ended with exit code 1\)"),
        ("/bin/cat", "runs no Python"),
        ("/tmp", "vLLM's interpreter /tmp does not start: Permission denied; name"),
        ("old", r"has vLLM 0\.11\.2, and .*; install vllm==0\.32\.\*"),
        ("absent", r"the interpreter \S+python has no vLLM; make"),
    ],
)
def test_interpreters_without_a_tested_vllm_are_named_without_starting_it(
    program: str, message: str, tmp_path: Path
) -> None:
    python = program if program.startswith("/") else stand_in(tmp_path, program)
    with pytest.raises(GenerationError, match=message):
        vllm_version_of(python)
    assert not (tmp_path / "notes").exists()


def test_the_version_of_vllm_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm-0.32.7.dist-info").mkdir()
    (tmp_path / "vllm-0.32.7.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.7\n")
    (tmp_path / "vllm.py").write_text("raise ImportError('it must not be imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert vllm_version_of(sys.executable) == "0.32.7"
    with pytest.raises(GenerationError, match=r"said nothing for 0\.001 s; name"):
        vllm_version_of(sys.executable, timeout_s=0.001)


def test_a_first_request_that_fails_is_not_repeated(tmp_path: Path) -> None:
    program = Path(stand_in(tmp_path, "error"))
    program.write_text(program.read_text().replace('number == 1 and behaviour == "error"', 'behaviour == "error"'))
    engine = VLLMEngine(tiny_model("llama"), options=VLLMOptions(python=str(program), restarts=3))
    with pytest.raises(StartFailed, match=r"^ValueError: no such kernel \(vLLM for the model on rank 0 failed"):
        engine.generate([[5], [6]], GREEDY)
    assert len(notes(tmp_path, "started")) == 1


def test_a_start_is_tried_again_if_another_process_took_its_port(tmp_path: Path) -> None:
    program = Path(stand_in(tmp_path))
    line = 'is_first and child.send(connection, dict(error="DistNetworkError: port 5 failed (EADDRINUSE)"))\n'
    program.write_text(program.read_text().replace("label = ", line + "label = ", 1))
    engine = VLLMEngine(tiny_model("llama"), options=VLLMOptions(python=str(program)))
    assert [made.token_ids[0] for made in engine.generate([[5]], GREEDY)] == [6]
    assert len(notes(tmp_path, "started")) == 2


def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(
        GenerationError, match=r"^No such file or directory: files for vLLM cannot be written to .*TMPDIR"
    ):
        engine.generate([[5]], GREEDY)
    assert not (tmp_path / "notes").exists()


def test_a_start_that_fails_is_not_tried_again_and_its_cause_comes_first(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, "warns and does not start", restarts=3)
    cause = (
        r"^RuntimeError: no kernel for this device \(vLLM for the model on rank 0 does not start; its log is (\S+)\)"
    )
    with pytest.raises(StartFailed, match=cause) as caught:
        engine.generate([[5]], GREEDY)
    assert len(notes(tmp_path, "started")) == 1
    (log,) = re.findall(r"its log is (\S+)\)", str(caught.value))
    assert "no kernel for this device" in Path(log).read_text() and not Path(log).with_suffix("").exists()


def test_the_start_has_a_line_with_the_path_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        engine_with(tmp_path).generate([[5]], GREEDY)
    started, ready = caplog.messages
    assert re.fullmatch(rf"vLLM 0\.32\.0 of {tmp_path}/python starts for the model \(log: /\S+\.log\)", started)
    assert re.fullmatch(r"vLLM is ready after \d+ s", ready)


def test_folders_of_killed_owners_are_removed_by_the_next_one(tmp_path: Path) -> None:
    kept, killed = OwnedFolder(tmp_path), tmp_path / "lightning-realloc-vllm-killed"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"weights")
    (killed / "owner.lock").touch()
    made = OwnedFolder(tmp_path)
    assert killed.exists(), "it is young: its owner may be about to lock it"
    for folder in (killed, kept.path):
        os.utime(folder / "owner.lock", (0, 0))
    made.cleanup()
    OwnedFolder(tmp_path).cleanup()
    assert [path.name for path in tmp_path.iterdir()] == [kept.path.name]


STARTS = """
import socket, subprocess, sys, time
ours, theirs = socket.socketpair()
subprocess.Popen([sys.executable, *sys.argv[1:2], str(theirs.fileno()), *sys.argv[2:]], pass_fds=[theirs.fileno()])
print(ours.recv(1), flush=True)
time.sleep(60)
"""


def test_a_process_removes_the_files_of_a_rank_that_is_killed(tmp_path: Path) -> None:
    name = f"vllm_dist_{uuid.uuid4().hex}"
    folder, log, memory = tmp_path / "folder", tmp_path / "folder.log", Path(f"/dev/shm/{name}-tp:0-[0-1]-cpushm_0")
    folder.mkdir()
    for file in (folder / name, log, memory):
        file.touch()
    rank = subprocess.Popen([sys.executable, "-c", STARTS, str(PROGRAM), str(folder), str(log)], stdout=subprocess.PIPE)
    assert rank.stdout is not None and rank.stdout.readline(), "vLLM's process has said its version"
    assert folder.exists() and log.exists() and memory.exists()
    rank.kill()
    rank.communicate()
    deadline = time.monotonic() + 20
    while any(file.exists() for file in (folder, log, memory)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_logs_of_failures_are_removed_after_a_week(tmp_path: Path) -> None:
    prefix = f"{tmp_path}/lightning-realloc-vllm-"
    old, young, other = Path(f"{prefix}old.log"), Path(f"{prefix}young.log"), tmp_path / "other.log"
    for file in (old, young, other):
        file.touch()
    for file in (old, other):
        os.utime(file, (0, 0))
    ProcessLog(Path(f"{prefix}new"))
    assert not old.exists() and young.exists() and other.exists()


def test_the_root_cause_is_the_last_error_that_points_to_no_other_one(tmp_path: Path) -> None:
    log = ProcessLog(tmp_path / "lightning-realloc-vllm-x")
    log.path.write_text(
        "WARNING went on after ValueError: no tokenizer\n"
        "(Worker pid=7) ERROR 12-03 [multiproc_executor.py:800] ValueError: No memory for this. Try another.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
        "Exception: WorkerProc initialization failed. See stack trace for root cause.\n"
    )
    assert log.root_cause() == "ValueError: No memory for this. Try another"
    log.path.write_text("Triton is installed\n")
    assert log.root_cause() is None


def test_folders_are_kept_where_files_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    with monkeypatch.context() as patches:
        patches.setattr(fcntl, "flock", refuse)
        unlocked = OwnedFolder(tmp_path)
    for lock in unlocked.path.iterdir():  # an old lock that nobody holds would be an abandoned folder's
        os.utime(lock, (0, 0))
    OwnedFolder(tmp_path).cleanup()
    assert [path.name for path in tmp_path.iterdir()] == [unlocked.path.name]
    unlocked.cleanup()
