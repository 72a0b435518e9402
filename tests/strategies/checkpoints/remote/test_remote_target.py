"""Checkpoints in object stores: the content of a folder, one valid checkpoint at every moment, one-line errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc.errors import CheckpointError
from lightning_realloc.remote_path import RemotePath, as_path
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints import checkpoint_writer
from lightning_realloc.strategies.checkpoints.checkpoint_files import content_folder, read_description
from lightning_realloc.strategies.checkpoints.export import export_checkpoint
from lightning_realloc.strategies.checkpoints.safety.verification import verify_checkpoints
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.checkpoints.checkpoint_runs import Part, contents, differences, refusals, run_parts
from tests.strategies.checkpoints.remote.object_stores import ObjectStore, address, objects
from tests.workers import WorkerPool

STRAIGHT = Part(runs.calls(actor_train="fsdp2"), 3, save_at=(1,))


def run_in_store(parts: list[Part], world_size: int) -> list[list[dict[str, float]]]:
    """Run parts in a process that has imported this module, and with it the store."""
    return run_parts(parts, world_size)


def refused_in_store(parts: list[Part], world_size: int) -> list[str | None]:
    """Return the errors of parts in a process that has imported the store."""
    return refusals(parts, world_size)


def tensors_at(text: str) -> dict[str, Any]:
    """Return all full tensors of a checkpoint at an address."""
    place = as_path(text)
    return contents(content_folder(place, read_description(place)))  # type: ignore[arg-type]


def attempt_to(action: Any, *arguments: Any, **options: Any) -> str | None:
    """Return the CheckpointError of an action; None if it succeeds."""
    try:
        action(*arguments, **options)
    except CheckpointError as error:
        return str(error)
    return None


def verdicts(*places: str) -> str:
    """Return the lines of ``verify``."""
    lines: list[str] = []
    verify_checkpoints([as_path(place) for place in places], lines.append)
    return "".join(lines)


@pytest.fixture(scope="module")
def stored(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run's checkpoints: ``local`` on the disk, ``remote`` in a store. Tests use copies of them."""
    folder = tmp_path_factory.mktemp("stored")
    parts = [replace(STRAIGHT, save=place, save_at=()) for place in (folder / "local", address(folder / "remote"))]
    workers.run(run_in_store, parts, 2, world_size=2, init_process_group=False)
    return folder


# ---- what a checkpoint holds
@pytest.mark.parametrize("in_background", matrix([False, True], True))
def test_a_checkpoint_in_a_store_is_the_one_of_a_folder(
    workers: WorkerPool, tmp_path: Path, in_background: bool
) -> None:
    store = address(tmp_path / "store")
    local = replace(STRAIGHT, save=tmp_path / "local", in_background=in_background)
    remote = replace(local, save=f"{store}/remote")
    resumed = replace(STRAIGHT, save_at=(), resume=f"{store}/remote-1", save=f"{store}/resumed", seed=99)
    elsewhere = replace(resumed, plan=runs.calls(actor_train="tp2"), save=f"{store}/elsewhere", max_steps=1)

    parts = [local, remote, resumed, elsewhere]
    logged = workers.run(run_in_store, parts, 2, world_size=2, init_process_group=False)[0]

    assert logged[0] == logged[1] and logged[2] == logged[0][1:]
    for step in ("", "-1"):
        assert differences(tensors_at(f"{store}/remote{step}"), contents(tmp_path / f"local{step}")) == {}
    assert differences(tensors_at(f"{store}/resumed"), contents(tmp_path / "local")) == {}
    assert differences(tensors_at(f"{store}/elsewhere"), contents(tmp_path / "local-1")) == {}
    assert verdicts(store).count(": intact, SFT, ") == 4
    names = {path.relative_to(tmp_path / "local").as_posix() for path in (tmp_path / "local").rglob("*.*")}
    assert {name.partition("/")[2] or name for name in objects(tmp_path / "store" / "remote")} == names
    # A copy on a disk is the same checkpoint.
    assert verdicts(str(tmp_path / "store" / "remote")).count("intact") == 1


def test_a_role_is_exported_from_a_store(stored: Path, tmp_path: Path) -> None:
    ours = export_checkpoint(address(stored / "remote"), tmp_path / "ours")
    theirs = export_checkpoint(stored / "local", tmp_path / "theirs")
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert {file.name for file in ours.iterdir()} == {file.name for file in theirs.iterdir()}


# ---- Lightning's callbacks
def fit_in_memory(world_size: int) -> tuple[list[str], list[str], list[str], int]:
    """Fit with ModelCheckpoint in fsspec's memory, and resume; return the checkpoints, the warnings and the steps."""
    caught: list[str] = []
    for max_epochs, resume in ((3, None), (3, None), (4, "last")):
        checkpoint = ModelCheckpoint(
            "memory://runs/x", "{step}", monitor="val/loss", save_top_k=2, save_last=True,
            enable_version_counter=False,
        )  # fmt: skip
        fitted = runs.trainer(
            ReallocStrategy("static"), world_size, max_epochs=max_epochs, enable_checkpointing=True,
            callbacks=[checkpoint], default_root_dir="memory://runs",
        )  # fmt: skip
        held_out = runs.Batches(1, responses=True, seed=7)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            fitted.fit(runs.sft(), runs.Batches(2, responses=True), held_out, ckpt_path=resume)
        caught += [str(one.message) for one in warned if "is a complete checkpoint" in str(one.message)]
        fitted.test(dataloaders=held_out, ckpt_path="best", verbose=False)
    store = fsspec.filesystem("memory")
    names = sorted({name.split("/")[3] for name in store.find("/runs")})
    saves = sorted({name.split("/")[4] for name in store.find("/runs/x/last.ckpt")})
    return names, saves, caught, fitted.global_step


def test_model_checkpoint_saves_resumes_and_removes_in_a_store(workers: WorkerPool, tmp_path: Path) -> None:
    names, saves, caught, steps = workers.run(fit_in_memory, 1, world_size=1, init_process_group=False)[0]
    assert len(names) == 3 and "last.ckpt" in names, "top-k removal leaves two and the last"
    assert len(saves) == 2 and saves[0] == "realloc.json", "earlier saves at the same path are removed"
    assert steps == 8
    assert len(caught) == 1 and "training starts from step 0, although memory://runs/x/" in caught[0]


# ---- a store that fails
def save_while_the_store_fails(place: str, world_size: int, failing: int) -> tuple[list[str | None], int]:
    """Save a checkpoint, then again while one rank's store fails, for a moment and for good; return the errors."""
    fitted = runs.trainer(ReallocStrategy(runs.calls(actor_train=f"fsdp{world_size}")), world_size, max_steps=1)
    fitted.fit(runs.sft(), runs.Batches(1, responses=True))
    fitted.save_checkpoint(place)
    ObjectStore.resets_left = 2 if fitted.global_rank == failing else 0  # the third attempt succeeds
    fitted.save_checkpoint(place)
    assert ObjectStore.resets_left == 0
    errors = []
    for room in (0, 2_000, 60_000):
        for path in (place, place + "-new"):
            ObjectStore.bytes_left = room if fitted.global_rank == failing else None
            errors.append(attempt_to(fitted.save_checkpoint, path))
            ObjectStore.bytes_left = None
    ObjectStore.reads_left = None
    return errors, fitted.global_step


@pytest.mark.parametrize("failing", matrix([0, 1], 1))
def test_a_store_that_fails_midway_ends_the_save_on_all_ranks_in_one_line(
    workers: WorkerPool, tmp_path: Path, failing: int
) -> None:
    place = address(tmp_path / "saved.ckpt")
    answers = workers.run(save_while_the_store_fails, place, 2, failing, world_size=2, init_process_group=False)
    assert answers[0] == answers[1], "every rank raises the same error"
    told = "cannot be written: ConnectionError: the store has closed the connection; earlier checkpoints are unchanged"
    assert answers[0][0] == [f"{path} {told}" for path in (place, f"{place}-new")] * 3
    assert "intact" in verdicts(place)
    # Nothing of the failed saves is left.
    description = json.loads((tmp_path / "saved.ckpt" / "realloc.json").read_text())
    assert set(objects(tmp_path / "saved.ckpt")) == {"realloc.json", *description["files"]}
    assert list(objects(tmp_path / "saved.ckpt-new")) == []


def load_while_the_store_fails(place: str, world_size: int, failing: int) -> list[str | None]:
    """Resume while one rank's store fails after some reads; return the errors."""
    answers = []
    for reads in range(3):
        ObjectStore.reads_left = reads if int(os.environ["RANK"]) == failing else None
        answers += refusals([Part(STRAIGHT.plan, 4, resume=place)], world_size)
    ObjectStore.reads_left = None
    return answers


@pytest.mark.parametrize("failing", matrix([0, 1], 1))
def test_a_store_that_fails_while_it_is_read_ends_the_load_on_all_ranks(
    workers: WorkerPool, stored: Path, tmp_path: Path, failing: int
) -> None:
    shutil.copytree(stored / "remote", tmp_path / "saved.ckpt")
    place = address(tmp_path / "saved.ckpt")
    answers = workers.run(load_while_the_store_fails, place, 2, failing, world_size=2, init_process_group=False)
    assert answers[0] == answers[1]
    for answer in answers[0]:
        assert "cannot be read: ConnectionError: the store has closed the connection; there is no intact" in answer
        assert "\n" not in answer


def test_an_unfinished_save_is_named_and_never_loaded(workers: WorkerPool, stored: Path, tmp_path: Path) -> None:
    whole, unfinished = (address(tmp_path / name) for name in ("whole.ckpt", "unfinished.ckpt"))
    for name in ("whole.ckpt", "unfinished.ckpt"):
        shutil.copytree(stored / "remote", tmp_path / name)
    (tmp_path / "unfinished.ckpt" / "realloc.json").unlink()

    resumed = Part(STRAIGHT.plan, 4, resume=unfinished)
    answers = workers.run(refused_in_store, [resumed], 2, world_size=2, init_process_group=False)
    told = f"{unfinished} is no checkpoint: it lacks realloc.json, which a save writes last"
    assert answers == [[f"{told}; {whole} is the newest intact checkpoint next to it"]] * 2
    assert told in verdicts(address(tmp_path)) and f"{whole}: intact" in verdicts(address(tmp_path))

    # The next save to this path removes it.
    workers.run(run_in_store, [Part(STRAIGHT.plan, 1, save=unfinished)], 2, world_size=2, init_process_group=False)
    assert len({name.partition("/")[0] for name in objects(tmp_path / "unfinished.ckpt")}) == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    saved = Part(STRAIGHT.plan, 1, save=address(tmp_path / "other"))
    told = f"{saved.save} holds thesis.txt but no checkpoint, and writing one would replace it; choose another path"
    assert workers.run(refused_in_store, [saved], 2, world_size=2, init_process_group=False) == [[told]] * 2


def test_damage_in_a_store_is_named(workers: WorkerPool, stored: Path, tmp_path: Path) -> None:
    shutil.copytree(stored / "remote", tmp_path / "saved")
    place = address(tmp_path / "saved")
    shard = next((tmp_path / "saved").rglob("__1_0.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    answers = workers.run(
        refused_in_store, [Part(STRAIGHT.plan, 4, resume=place)], 2, world_size=2, init_process_group=False
    )
    assert answers[0] == answers[1]
    assert f"{address(shard)} is not as it was written: its checksum is" in (answers[0][0] or "")


# ---- nodes and stores that do not see the same files
def use_memory_on_two_ranks(world_size: int) -> list[str | None]:
    """Save to a store that every process has for itself, and load what one rank alone has; return the errors."""
    checkpoint_writer.VISIBLE_WITHIN_S = 0.5
    fitted = runs.trainer(ReallocStrategy(runs.calls(actor_train="fsdp2")), world_size, max_steps=1)
    fitted.fit(runs.sft(), runs.Batches(1, responses=True))
    return [attempt_to(fitted.save_checkpoint, "memory://saved")]


def test_ranks_that_do_not_share_a_store_are_named_when_saving(workers: WorkerPool) -> None:
    answers = workers.run(use_memory_on_two_ranks, 2, world_size=2, init_process_group=False)
    assert answers[0] == answers[1]
    assert "rank 1 (" in (answers[0][0] or "") and "does not see memory://saved/save-" in (answers[0][0] or "")


def use_a_folder_of_one_node(folder: Path, world_size: int) -> list[str | None]:
    """Save to a relative path that is another folder for each rank, and resume from a path that only rank 0 has."""
    checkpoint_writer.VISIBLE_WITHIN_S = 0.5
    home = folder / f"node{os.environ['RANK']}"
    home.mkdir()
    os.chdir(home)
    L.seed_everything(0, verbose=False)
    fitted = runs.trainer(ReallocStrategy(runs.calls(actor_train="fsdp2")), world_size, max_steps=1)
    fitted.fit(runs.sft(), runs.Batches(1, responses=True))
    saving = attempt_to(fitted.save_checkpoint, "run.ckpt")
    fitted.save_checkpoint(folder / "shared.ckpt")
    if fitted.global_rank == 0:
        (home / "shared.ckpt").symlink_to(folder / "shared.ckpt")
    return [saving, *refusals([Part(STRAIGHT.plan, 2, resume="shared.ckpt")], world_size)]


def test_a_node_without_the_checkpoints_path_is_named_on_all_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    answers = workers.run(use_a_folder_of_one_node, tmp_path, 2, world_size=2, init_process_group=False)
    assert answers[0] == answers[1]
    saving, loading = answers[0]
    assert re.search(
        r"rank 1 \(.*does not see run\.ckpt\..*\.partial, to which the first rank writes; save to a", saving
    )
    assert loading.startswith("shared.ckpt is missing on rank 1 (")
    assert loading.endswith("so put it on a file system that all nodes share, or copy it to each node")
    assert [path.name for path in tmp_path.glob("node*/*")] == ["shared.ckpt"], "nothing half-written is left"


# ---- addresses
def test_an_address_that_cannot_be_opened_is_refused_in_one_line() -> None:
    for text, told in (("nope://bucket/x", "Protocol not known: nope"), ("s3://bucket/x", "Install s3fs")):
        if text.startswith("s3") and fsspec.utils.can_be_local("s3"):
            continue
        problem = RemotePath.parse(text).write_problem()
        assert problem is not None and told in problem and "\n" not in problem


def test_a_path_has_the_parts_of_its_address() -> None:
    place = as_path("s3://bucket/run/last.ckpt/")
    assert str(place) == "s3://bucket/run/last.ckpt" and place.name == "last.ckpt" and place.suffix == ".ckpt"
    assert str(place.parent) == "s3://bucket/run" and str(place / "x") == "s3://bucket/run/last.ckpt/x"
    assert place / "" == place and as_path("runs/x") == Path("runs/x")
