"""Check that checkpoints written in the background are those of their step, and are never half-written."""

from __future__ import annotations

import os
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_realloc.errors import CheckpointError, ConfigError
from lightning_realloc.runtime.messages.failure_store import group_store, publish_loss
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints import background
from lightning_realloc.strategies.checkpoints.background import BackgroundSave
from lightning_realloc.strategies.checkpoints.checkpoint_files import is_complete, newest_intact
from lightning_realloc.strategies.checkpoints.sharded_tensors import ShardWriter
from tests.strategies import runs
from tests.strategies.checkpoints.checkpoint_runs import Part, contents, differences, run_parts
from tests.workers import WorkerPool


@pytest.mark.exhaustive  # a save that waits: test_checkpoint.py
def test_a_run_resumed_from_a_background_save_is_the_straight_run(workers: WorkerPool, tmp_path: Path) -> None:
    plan = runs.calls(
        actor_generate="dp2", reference_infer="dp2", critic_infer="dp2", actor_train="fsdp2", critic_train="dp2"
    )
    silent = Part(plan, 4, save=tmp_path / "silent", save_at=(2,), algorithm="ppo")
    straight = replace(silent, save=tmp_path / "straight", in_background=True, save_at=(1, 2, 3))
    resumed = replace(straight, resume=tmp_path / "straight-2", save=tmp_path / "resumed", save_at=(), seed=99)

    logged = workers.run(run_parts, [silent, straight, resumed], 2, world_size=2, init_process_group=False)[0]

    assert logged[0] == logged[1] and logged[2] == logged[1][2:]
    assert differences(contents(tmp_path / "straight-2"), contents(tmp_path / "silent-2")) == {}
    assert differences(contents(tmp_path / "resumed"), contents(tmp_path / "straight")) == {}


class _SlowDisk(Callback):
    """Saves after each step; the file of the first save cannot be written before the third step has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_free = threading.Event()
        self.seen: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Save after the first step, and look for the checkpoint after each."""
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.folder / "last.ckpt")
        self.seen.append(is_complete(self.folder / "last.ckpt"))
        if trainer.global_step == 3:
            self.is_free.set()


def _train_on_a_slow_disk(folder: Path) -> tuple[list[bool], bool, list[str]]:
    disk = _SlowDisk(folder)
    write, waited = ShardWriter.write, []

    def slow_write(self: ShardWriter) -> Any:
        waited.append(disk.is_free.wait(timeout=30.0))
        return write(self)

    ShardWriter.write = slow_write  # type: ignore[method-assign]
    try:
        strategy = ReallocStrategy("static", async_checkpoints=True)
        fitted = runs.trainer(strategy, runs.world_size(), max_steps=4, max_epochs=-1, callbacks=[disk])
        fitted.fit(runs.sft(), runs.Batches(4, responses=True))
    finally:
        ShardWriter.write = write  # type: ignore[method-assign]
    return disk.seen[:3], all(waited), sorted(path.name for path in folder.iterdir())


def test_training_goes_on_while_a_slow_disk_writes(workers: WorkerPool, tmp_path: Path) -> None:
    for seen, was_free, names in workers.run(_train_on_a_slow_disk, tmp_path, world_size=2, init_process_group=False):
        assert seen == [False, False, False]
        assert was_free, "three steps ended while the first save was under way"
        assert names == ["last.ckpt"]  # the end of fit waits
    assert newest_intact(tmp_path / "any") == tmp_path / "last.ckpt"
    assert torch.load(tmp_path / "last.ckpt" / "meta.pt", weights_only=True)["global_step"] == 1


class _BrokenDisk(Callback):
    """Lets writing fail on the last rank from a step on, and saves after every step."""

    def __init__(self, folder: Path, broken_at: int) -> None:
        self.folder = folder
        self.broken_at = broken_at
        self.steps = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Save, to another path in each step."""
        self.steps = trainer.global_step
        if self.steps >= self.broken_at and trainer.global_rank == trainer.world_size - 1:
            ShardWriter.write = _no_room  # type: ignore[method-assign]
        trainer.save_checkpoint(self.folder / f"{self.steps}.ckpt")
        if self.steps > 1:
            trainer.strategy.remove_checkpoint(self.folder / f"{self.steps - 1}.ckpt")


def _no_room(writer: ShardWriter) -> Any:
    raise OSError(28, "No space left on device")


def _train_on_a_broken_disk(folder: Path, broken_at: int) -> tuple[str, int, list[str]]:
    write, disk, refusal = ShardWriter.write, _BrokenDisk(folder, broken_at), ""
    try:
        strategy = ReallocStrategy("static", async_checkpoints=True)
        fitted = runs.trainer(strategy, runs.world_size(), max_steps=4, max_epochs=-1, callbacks=[disk])
        fitted.fit(runs.sft(), runs.Batches(4, responses=True))
    except CheckpointError as error:
        refusal = str(error)
    finally:
        ShardWriter.write = write  # type: ignore[method-assign]
    return refusal, disk.steps, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("broken_at", "ends_after"), [(2, 3), (4, 4)])  # at the next save; at the end of fit
def test_a_failed_write_ends_the_run_and_keeps_the_checkpoint_before(
    workers: WorkerPool, tmp_path: Path, broken_at: int, ends_after: int
) -> None:
    everyone = workers.run(_train_on_a_broken_disk, tmp_path, broken_at, world_size=2, init_process_group=False)

    for refusal, steps, names in everyone:
        assert f"{tmp_path / f'{broken_at}.ckpt'} cannot be written: No space left on device" in refusal
        assert steps == ends_after
        assert names == [f"{broken_at - 1}.ckpt"]


def _refuse_links(folder: Path) -> str:
    checkpoint = ModelCheckpoint(folder, save_last="link")
    strategy = ReallocStrategy("static", async_checkpoints=True)
    fitted = runs.trainer(strategy, runs.world_size(), max_steps=1, enable_checkpointing=True, callbacks=[checkpoint])
    try:
        fitted.fit(runs.sft(), runs.Batches(1, responses=True))
    except ConfigError as error:
        return str(error)
    return ""


def test_links_to_unfinished_checkpoints_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    (refusal,) = workers.run(_refuse_links, tmp_path, world_size=1, init_process_group=False)
    assert "use save_last=True" in refusal


# ---- without a run
class _Parts:
    """A save whose parts are the numbers of the ranks."""

    def __init__(self, rank: int, *, fails: bool = False, is_silent: bool = False) -> None:
        self.rank = rank
        self.fails = fails
        self.completed: list[Any] = []
        self.may_write = threading.Event()

    def write(self) -> int:
        """Return the rank, once it may."""
        self.may_write.wait(timeout=30.0)
        if self.fails:
            raise CheckpointError("disk full")
        return self.rank

    def complete(self, parts: list[Any]) -> None:
        """Keep the parts."""
        self.completed = parts

    def discard(self) -> None:
        """Forget the parts."""
        self.completed = ["discarded"]


def _save_twice() -> tuple[list[Any], list[str], str]:
    rank, done = torch.distributed.get_rank(), list[str]()
    saving = BackgroundSave()
    parts: list[Any] = []
    for number, fails in enumerate((False, rank == 1)):
        save = _Parts(rank, fails=fails)
        saving.start(save, token=f"test-{number}", rank=rank, world_size=2)
        saving.after_completion(lambda: done.append("removed"))
        assert done == ["removed"] * number
        save.may_write.set()
        try:
            saving.finish()
        except CheckpointError as error:
            return parts, done, str(error)
        parts = save.completed
    raise AssertionError("the second save fails")


def test_all_parts_are_collected_and_a_failure_is_that_of_all_ranks(workers: WorkerPool) -> None:
    first, second = workers.run(_save_twice, world_size=2)

    assert first == ([0, 1], ["removed"], "disk full")
    assert second[2] == "disk full" and second[0] == []


def _close_without_a_peer() -> tuple[list[Any], bool]:
    rank, saving = torch.distributed.get_rank(), BackgroundSave()
    save = _Parts(rank)
    if rank == 0:
        grace_s, background.GRACE_S = background.GRACE_S, 0.2
        saving.start(save, token="lost", rank=rank, world_size=2)
        save.may_write.set()
        saving.close()
        background.GRACE_S = grace_s
    return save.completed, saving._thread is None


def test_a_failed_run_does_not_wait_for_ranks_that_have_ended(workers: WorkerPool) -> None:
    first, _ = workers.run(_close_without_a_peer, world_size=2)
    assert first == ([], True)


def _finish_after_a_loss() -> tuple[str, float]:
    saving, save, began = BackgroundSave(), _Parts(0), time.monotonic()
    publish_loss(1)
    saving.start(save, token="loss", rank=0, world_size=2)
    save.may_write.set()
    try:
        saving.finish()
    except CheckpointError as error:
        return str(error), time.monotonic() - began
    return "completed", 0.0


def test_a_part_of_a_rank_that_is_known_to_be_lost_is_not_waited_for(workers: WorkerPool) -> None:
    ((refusal, seconds),) = workers.run(_finish_after_a_loss, world_size=1)
    assert "no checkpoint was completed, since rank 1 was lost; resume from the one before" in refusal
    assert seconds < background.GRACE_S / 2


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("code-ran"),)


def _complete_with_a_forged_part(folder: Path) -> str:
    os.chdir(folder)
    store, saving = group_store(), BackgroundSave()
    store.set("checkpoint/forged/1", pickle.dumps(_Bomb()))
    save = _Parts(0)
    saving.start(save, token="forged", rank=0, world_size=2)
    save.may_write.set()
    try:
        saving.finish()
    except CheckpointError as error:
        return str(error)
    return "completed"


def test_a_part_that_another_program_writes_to_the_store_runs_no_code(workers: WorkerPool, tmp_path: Path) -> None:
    (refusal,) = workers.run(_complete_with_a_forged_part, tmp_path, world_size=1)
    assert "no checkpoint was completed: DataError: a message between ranks holds no plain data" in refusal
    assert not (tmp_path / "code-ran").exists()
