"""Bars for the loading of weights are drawn by one rank on a terminal; in a file it logs a line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lightning.pytorch.utilities import rank_zero_only
from transformers.utils.logging import is_progress_bar_enabled

from lightning_realloc.algorithms.base.role import Role
from tests.models import tiny_model


@pytest.mark.parametrize(("rank", "is_terminal"), [(0, True), (1, True), (0, False), (1, False)])
def test_the_first_rank_alone_draws_a_bar_on_a_terminal_and_logs_a_line_elsewhere(
    rank: int,
    is_terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)

    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        Role(name="actor", source=str(tmp_path), task="causal_lm", trained=True).build(seed=0)

    assert ("Loading weights" in capsys.readouterr().err) == (rank == 0 and is_terminal)
    assert any(line.endswith(": loading weights") for line in caplog.messages) == (rank == 0 and not is_terminal)
    assert is_progress_bar_enabled(), "other code's bars are drawn as before"
