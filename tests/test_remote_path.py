"""Files that grow need a folder on a disk; other paths may be addresses."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import lightning_realloc
from lightning_realloc import remote_path
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.callbacks import AutoTuner, PredictionWriter, RolloutTable, SaveHuggingFace, Timeline
from lightning_realloc.commands.chat_session import model_folder
from lightning_realloc.commands.short_run import data_setting
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.vllm.owned_folder import OwnedFolder
from lightning_realloc.output_files import write_problem
from lightning_realloc.remote_path import as_path as path_of
from lightning_realloc.remote_path import files_below, is_path, local_folder, local_path, require_files
from lightning_realloc.retries import attempts


def test_a_file_that_is_written_row_by_row_needs_a_disk() -> None:
    told = "PredictionWriter: 's3://bucket/x' is an address, but .*; give a folder on a disk"
    with pytest.raises(ConfigError, match=told):
        PredictionWriter("s3://bucket/x")


@pytest.mark.parametrize("name", ["./x", "~/x", "a/b/c", "runs/grpo", "runs/here", Path("org/name")])
def test_a_path_is_told_from_a_name_on_the_hub(
    name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "here").mkdir(parents=True)
    assert is_path(name)
    with pytest.raises(FileNotFoundError, match=r"no such folder|has no config\.json"):
        require_files(name, "config.json")
    require_files("org/name", "config.json")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert is_path("org/name")


class _Answering(BaseHTTPRequestHandler):
    """A hub that knows no repository."""

    def do_HEAD(self) -> None:
        """Answer that there is none."""
        self.send_error(404)


def test_a_name_is_refused_at_once_only_where_neither_the_cache_nor_the_hub_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HTTPServer(("127.0.0.1", 0), _Answering) as hub:
        address = f"http://127.0.0.1:{hub.server_port}"
        pages = address + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {"HF_HUB_CACHE": str(tmp_path), "ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": pages}
        for name, value in {"HF_HUB_OFFLINE": False, **settings}.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        Thread(target=hub.serve_forever, args=(0.05,), daemon=True).start()
        require_files("known/to-the-hub")
        require_files("x" * 300)  # too long for a name of a file; the loader says so
        hub.shutdown()
    monkeypatch.setattr("time.sleep", lambda _: None)
    begun_at = time.monotonic()
    for kind in ("model", "dataset"):
        with pytest.raises(FileNotFoundError, match=f"no such folder in .*the hub cannot be reached at {address}"):
            require_files("outputs/actor", kind=kind)
    with pytest.raises(ConfigError, match=r"actor='outputs/actor': there is no such folder in .*, and the hub cannot"):
        Role(name="actor", source="outputs/actor", trained=True)
    assert time.monotonic() - begun_at < 5.0
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "60")  # huggingface_hub reads it when it is imported
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 60)
    with pytest.raises(FileNotFoundError, match="within 60 s, which HF_HUB_ETAG_TIMEOUT sets"):
        require_files("outputs/critic")
    (tmp_path / "models--outputs--actor" / "snapshots").mkdir(parents=True)
    require_files("outputs/actor")


def test_paths_begin_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in (path_of("~/x"), path_of(Path("~/x")), local_path("~/x", "path"), local_folder("~/x")):
        assert place == tmp_path / "x"
    assert PredictionWriter("~/x.jsonl").path == RolloutTable(path="~/x.jsonl").path == tmp_path / "x.jsonl"
    assert Timeline("~/x").folder == SaveHuggingFace("~/x").dirpath == tmp_path / "x"
    (tmp_path / "x.jsonl").touch()
    assert Path(data_setting("~/x.jsonl", None, None)) == tmp_path / "x.jsonl"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert model_folder("~/model") == str(tmp_path / "model")
    assert AutoTuner(profile_cache="~/x")._cache == tmp_path / "x"
    assert OwnedFolder("~").path.parent == tmp_path
    assert path_of("~no-such-user/x") == Path("~no-such-user/x") and path_of("a/~/x") == Path("a/~/x")
    plan = ExecutionPlan.from_mapping({"calls": {"actor.generate": "dp1@0", "actor.train": "dp1@0"}})
    plan.save("~/plan.yaml")
    assert ExecutionPlan.load("~/plan.yaml") == ExecutionPlan.load(tmp_path / "plan.yaml") == plan
    assert write_problem("~/plan.yaml/x") is not None


def test_one_function_expands_the_home_folder() -> None:
    package = Path(lightning_realloc.__file__).parent
    assert [file.name for file in package.rglob("*.py") if "expanduser" in file.read_text()] == ["remote_path.py"]


def test_small_files_of_a_run_go_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_folder("s3://bucket/x") == tmp_path and local_folder("runs/x") == Path("runs/x")


def test_files_below_a_folder_have_the_same_names_on_a_disk_and_in_a_store(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for name in ("a/b.txt", "c.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
        store.pipe_file(f"/{tmp_path.name}/{name}", name.encode())
    remote, local = files_below(path_of(f"memory://{tmp_path.name}")), files_below(tmp_path)
    assert remote.keys() == local.keys() == {"a/b.txt", "a.txt", "c.txt"}
    assert all(path.read_text("utf-8") == name for name, path in {**remote, **local}.items())
    assert files_below(path_of("memory://nothing")) == {}


class ShakyStore(MemoryFileSystem):
    """Store whose next operations fail with the given errors."""

    protocol = "shaky"
    failures: ClassVar[list[Exception]] = []

    def __getattribute__(self, name: str) -> Any:
        """Fail instead of giving an operation that is used on a path."""
        operations = {"info", "ls", "find", "modified", "open", "cat_file", "pipe_file", "put_file", "rm_file", "rm"}
        if name in operations and ShakyStore.failures:
            raise ShakyStore.failures.pop(0)
        return super().__getattribute__(name)


def test_operations_of_a_store_are_tried_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("shaky", ShakyStore, clobber=True)
    monkeypatch.setattr(attempts, "sleep", lambda seconds: None)
    file, local = path_of("shaky://run/file"), tmp_path / "local"
    local.write_text("sent")
    assert isinstance(file, remote_path.RemotePath)
    operations = [
        lambda: file.write_bytes(b"new"), file.exists, file.num_bytes, file.modified_s, file.parent.files,
        lambda: list(file.parent.iterdir()), file.read_bytes, lambda: file.open("rb").close(),
        lambda: file.upload(local), lambda: file.parent.remove_below([file]), lambda: file.write_bytes(b""),
        file.unlink,
    ]  # fmt: skip
    for operation in operations:
        ShakyStore.failures = [ConnectionResetError("reset"), RuntimeError("503: slow down")]
        operation()
        assert not ShakyStore.failures
    # Lasting errors are raised at once, others after the third attempt.
    for error, tries in ((PermissionError("no key"), 1), (ConnectionResetError("reset"), 3)):
        ShakyStore.failures = [error] * 5
        with pytest.raises(type(error)):
            file.write_bytes(b"")
        assert len(ShakyStore.failures) == 5 - tries
    # Attempts of an action and of the operations inside do not multiply.
    ShakyStore.failures = [ConnectionResetError("reset")] * 9
    with pytest.raises(ConnectionResetError):
        attempts.retried(lambda: file.write_bytes(b""), file)
    assert len(ShakyStore.failures) == 9 - 3
    ShakyStore.failures = [ConnectionResetError("reset")] * 2
    file.write_bytes(b"")
    ShakyStore.failures = []
