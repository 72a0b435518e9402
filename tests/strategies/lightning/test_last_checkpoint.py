"""``ckpt_path="last"`` of a Trainer whose checkpoints lie in an object store."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import fsspec
import lightning as L
import pytest
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint

from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.lightning.last_checkpoint import resolve_last
from tests.strategies import runs
from tests.strategies.lightning.test_plain_module import Regression, rows


def _trainer(*callbacks: Checkpoint, root: str | Path = ".") -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), default_root_dir=root, **quiet)


def test_the_last_checkpoint_of_a_store_is_found_by_its_address(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    folder = f"memory://{tmp_path.name}/x"
    trainer = _trainer(ModelCheckpoint(folder))
    assert resolve_last(trainer, "last") == "last", "there is none yet"
    for name in ("last.ckpt", "last-v1.ckpt", "step=9.ckpt"):
        store.pipe_file(f"/{tmp_path.name}/x/{name}/realloc.json", b"{}")
    store.pipe_file(f"/{tmp_path.name}/x/last-v2.ckpt/save-0123456789ab/meta.pt", b"")  # an unfinished save
    assert resolve_last(trainer, "last") == f"{folder}/last-v1.ckpt"
    assert resolve_last(trainer, "runs/last.ckpt") == "runs/last.ckpt"
    assert resolve_last(_trainer(ModelCheckpoint(tmp_path)), "last") == "last"
    store.pipe_file(f"/{tmp_path.name}/x/on_exception.ckpt/realloc.json", b"{}")
    assert resolve_last(_trainer(OnExceptionCheckpoint(folder)), "last") == f"{folder}/on_exception.ckpt"
    store.pipe_file(f"/{tmp_path.name}/checkpoints/last.ckpt/realloc.json", b"{}")
    unnamed = _trainer(ModelCheckpoint(), root=f"memory://{tmp_path.name}")
    assert resolve_last(unnamed, "last") == f"memory://{tmp_path.name}/checkpoints/last.ckpt"


@pytest.mark.parametrize("plain", [False, True], ids=["algorithm", "plain module"])
def test_fit_validate_and_a_second_fit_go_on_from_the_last_checkpoint_of_a_store(tmp_path: Path, plain: bool) -> None:
    steps = []
    for max_steps in (2, 4):
        checkpoint = ModelCheckpoint(
            f"memory://{tmp_path.name}/run", every_n_train_steps=2, save_last=True, enable_version_counter=False
        )
        began: list[int] = []
        fitted = runs.trainer(
            ReallocStrategy("static"), 1, max_epochs=2, max_steps=max_steps, enable_checkpointing=True,
            callbacks=[checkpoint, _StepsBefore(began)],
        )  # fmt: skip
        new = Regression if plain else runs.sft
        batches = rows(8) if plain else runs.Batches(2, responses=True)
        with (
            pytest.warns(UserWarning, match="there is no last checkpoint available")
            if max_steps == 2
            else nullcontext()
        ):
            fitted.fit(new(), batches, ckpt_path="last")
        steps.append((began[0], fitted.global_step))
        fitted.validate(new(), batches, ckpt_path="last", verbose=False)
    assert steps == [(0, 2), (2, 4)]


class _StepsBefore(L.Callback):
    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.steps.append(trainer.global_step)
