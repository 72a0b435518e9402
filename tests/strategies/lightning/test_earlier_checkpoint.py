"""A run that starts from nothing names a complete checkpoint in the folder that it writes to."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.lightning.test_plain_module import Regression, rows


def _fit(folder: Path, steps: int, ckpt_path: str | None = None, *, plain: bool = False) -> list[str]:
    """Return the warnings about an earlier checkpoint of an algorithm's run, or of a plain LightningModule's."""
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, filename="{step}", save_last=True, save_top_k=-1)
    trainer = runs.trainer(
        ReallocStrategy("static"), 1, max_steps=steps, callbacks=[checkpoint], enable_checkpointing=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if plain:
            trainer.fit(Regression(), rows(4), ckpt_path=ckpt_path)
        else:
            trainer.fit(runs.sft(), runs.Batches(3, responses=True), ckpt_path=ckpt_path)
    assert trainer.global_step == steps
    return [str(one.message) for one in caught if "training starts from step 0" in str(one.message)]


@pytest.mark.parametrize("ckpt_path", matrix(["last", None], "last"))
def test_a_complete_checkpoint_is_named_that_the_run_does_not_continue(tmp_path: Path, ckpt_path: str | None) -> None:
    assert _fit(tmp_path, 1, "last") == []  # the first start of a job that is repeated
    assert _fit(tmp_path, 2, "last") == []  # continues
    (tmp_path / "last.ckpt").unlink()
    shutil.copytree(tmp_path / "step=2.ckpt", tmp_path / "last.ckpt.partial")  # as a kill in its first save leaves it
    (tmp_path / "last.ckpt.partial" / "realloc.json").unlink()
    (warning,) = _fit(tmp_path, 3, ckpt_path)
    newest = tmp_path / "step=2.ckpt"
    assert warning.startswith(f"training starts from step 0, although {newest} is a complete checkpoint; to continue")
    assert warning.endswith(f"or --ckpt_path={newest}")


@pytest.mark.parametrize("ckpt_path", matrix(["last", None], "last"))
def test_a_plain_module_is_told_of_whole_files_that_it_could_continue(tmp_path: Path, ckpt_path: str | None) -> None:
    assert _fit(tmp_path, 1, "last", plain=True) == []
    assert _fit(tmp_path, 2, "last", plain=True) == []
    (tmp_path / "last.ckpt").unlink()
    newest = tmp_path / "step=2.ckpt"
    content = newest.read_bytes()
    (tmp_path / "step=3.ckpt").write_bytes(content[: len(content) // 2])  # as an interrupted copy leaves it
    (tmp_path / "step=4.ckpt").mkdir()  # of an algorithm, which a plain module cannot read
    (tmp_path / "step=4.ckpt" / "realloc.json").touch()
    (warning,) = _fit(tmp_path, 1, ckpt_path, plain=True)
    assert warning.startswith(f"training starts from step 0, although {newest} is a complete checkpoint; to continue")
    assert _fit(tmp_path, 3, str(newest), plain=True) == []
