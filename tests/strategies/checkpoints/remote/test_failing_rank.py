"""One of two ranks cannot write some checkpoints, and the run trains on: all ranks agree which ones are missing."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc.remote_path import as_path
from lightning_realloc.retries import attempts
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints.checkpoint_files import is_checkpoint, is_complete
from lightning_realloc.strategies.checkpoints.safety.last_pointer import pointed_checkpoint
from lightning_realloc.strategies.checkpoints.safety.verification import verify_checkpoint
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.checkpoints.remote.object_stores import Faults, ObjectStore, address, objects
from tests.workers import WorkerPool

STEPS = 6
MISSING_STEPS = (3, 4)
"""Steps whose checkpoints one rank cannot write."""


class Fitted(NamedTuple):
    """End of a run on one rank."""

    step: int
    missing: list[tuple[int, str]]
    """Step and name of the checkpoints that this rank knows to be missing."""
    warned: list[str]
    """Warnings about them."""
    num_failed: int
    """Calls of the store that failed on this rank."""
    num_waits: int
    """Waits between attempts on this rank."""
    pointed: list[str]
    """Complete checkpoint that ``last`` led to before each step."""
    weights: float
    """Sum of the weights on the first rank."""


class _LastCheckpoints(L.Callback):
    """Follows ``last`` before each step after the first."""

    def __init__(self, folder: str) -> None:
        self.last, self.pointed = as_path(f"{folder}/last.ckpt"), list[str]()

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.is_global_zero and is_checkpoint(self.last):
            found = pointed_checkpoint(self.last)
            assert is_complete(found), f"{self.last} leads to half a checkpoint"
            self.pointed.append(found.name)


def fit_with_missing_checkpoints(
    folder: Path, world_size: int, failing: int, writes_only: bool, in_background: bool
) -> Fitted:
    """Fit with a checkpoint after each step, some of which one rank cannot write."""
    # `last` would be written as a whole after a failed save, as it holds no other checkpoint's state then.
    unwritable = (*(f"step={step}.ckpt/" for step in MISSING_STEPS), "last.ckpt/save-")

    def fails(name: str, path: str, now_s: float) -> bool:
        is_shard_write = name == "close" and path.endswith(".distcp")
        return any(part in path for part in unwritable) and (is_shard_write or not writes_only)

    faults = Faults(fails)
    attempts.sleep = faults.wait
    ObjectStore.faults = faults if int(os.environ["RANK"]) == failing else None
    place = f"{address(folder)}/saved"
    saves = ModelCheckpoint(
        place, "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1, save_last=True,
        enable_version_counter=False, save_on_train_epoch_end=False,
    )  # fmt: skip
    plan, lasts = runs.calls(actor_train="fsdp2"), _LastCheckpoints(place)
    strategy = ReallocStrategy(plan, on_save_error="warn", async_checkpoints=in_background)
    fitted = runs.trainer(
        strategy, world_size, max_steps=STEPS, max_epochs=STEPS, enable_checkpointing=True, callbacks=[saves, lasts]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted.fit(runs.sft(), runs.Batches(1, responses=True))
    ObjectStore.faults, attempts.sleep = None, time.sleep
    return Fitted(
        fitted.global_step,
        [(one.step, one.path.rpartition("/")[2]) for one in strategy.failed_saves.saves],
        [str(one.message) for one in caught if "training goes on" in str(one.message)],
        faults.num_failed,
        len(faults.waits_s),
        lasts.pointed,
        strategy.broadcast(sum(float(one.double().sum()) for one in strategy.full_weights("actor").values())),
    )


@pytest.mark.parametrize(
    ("failing", "writes_only", "in_background"),
    matrix(
        [(rank, writes, thread) for rank in (0, 1) for writes in (False, True) for thread in (False, True)],
        (1, False, False),
        (1, True, True),
    ),
)
def test_all_ranks_train_on_without_the_checkpoints_that_one_cannot_write(
    workers: WorkerPool, tmp_path: Path, failing: int, writes_only: bool, in_background: bool
) -> None:
    ends: list[Fitted] = workers.run(
        fit_with_missing_checkpoints, tmp_path, 2, failing, writes_only, in_background, world_size=2,
        init_process_group=False,
    )  # fmt: skip
    print(f"calls that failed: {[end.num_failed for end in ends]}, waits: {[end.num_waits for end in ends]}")

    assert [end.step for end in ends] == [STEPS, STEPS] and ends[0].weights == ends[1].weights
    assert ends[0].missing == ends[1].missing, "ranks agree"
    assert {step for step, _ in ends[0].missing} == set(MISSING_STEPS)
    assert {name for _, name in ends[0].missing} >= {f"step={step}.ckpt" for step in MISSING_STEPS}
    assert len(ends[0].warned) == len(ends[0].missing) and not ends[1].warned, "one warning for each, on one rank"
    assert ends[1 - failing].num_failed == 0 and ends[failing].num_waits >= 2 * len(MISSING_STEPS)
    # `last` led to the checkpoint before the missing ones until a later one was whole.
    assert ends[0].pointed[-1] in ("step=5.ckpt", "step=2.ckpt")
    assert set(ends[0].pointed) <= {"step=1.ckpt", "step=2.ckpt", "step=5.ckpt"}
    saved = tmp_path / "saved"
    assert {name.partition("/")[0] for name in objects(saved)} == {"step=5.ckpt", "step=6.ckpt", "last.ckpt"}
    for step in (5, 6):
        assert verify_checkpoint(as_path(address(saved / f"step={step}.ckpt"))).startswith("SFT, ")
    assert pointed_checkpoint(as_path(address(saved / "last.ckpt"))).name == "step=6.ckpt"
    assert set(objects(saved / "last.ckpt")) == {"realloc.json"}
