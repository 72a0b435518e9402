"""Bars for the loading of weights are drawn by one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.utilities import rank_zero_only
from transformers.utils.logging import is_progress_bar_enabled

from lightning_realloc.algorithms.base.role import Role
from tests.models import tiny_model


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_are_loaded_with_a_bar_on_the_first_rank_alone(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    capsys.readouterr()

    Role(name="actor", source=str(tmp_path), task="causal_lm", trained=True).build(seed=0)

    assert ("Loading weights" in capsys.readouterr().err) == (rank == 0)
    assert is_progress_bar_enabled(), "other code's bars are drawn as before"
