"""Bars for the loading of weights are drawn by one rank on a terminal; in a file it logs a line. Tables are rare."""

from __future__ import annotations

import logging
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


@pytest.mark.parametrize(("rank", "allow_missing", "tables"), [(0, False, 0), (0, True, 1), (1, True, 0)])
def test_a_new_head_is_listed_in_a_table_by_the_first_rank_and_only_where_weights_may_be_missing(
    rank: int, allow_missing: bool, tables: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    loader = logging.getLogger("transformers.modeling_utils")
    loader.addHandler(handler)
    try:
        role = Role(name="critic", source=str(tmp_path), task="token_classification", trained=True)
        role.build(seed=0, allow_missing=allow_missing)
    finally:
        loader.removeHandler(handler)

    assert sum("LOAD REPORT" in line for line in logged) == tables
