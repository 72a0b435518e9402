"""Table of the README with the largest models that fit."""

from __future__ import annotations

import pytest

from benchmarks.what_fits import MEMORY, NUM_DEVICES, README, ROWS, SIZES, fits, read_table

SHOWN = read_table(README.read_text())
SMALL = [("GRPO", "80", 1), ("GRPO", "80", 8), ("PPO", "24", 2), ("PPO", "141", 8), ("DPO, LoRA", "24", 1)]
"""Cells whose searches take a second or two."""


def test_every_row_and_column_is_shown() -> None:
    assert sorted(SHOWN) == sorted((row, memory, number) for row in ROWS for memory in MEMORY for number in NUM_DEVICES)
    assert set(SHOWN.values()) <= {*SIZES, "–"}


@pytest.mark.parametrize("cell", SMALL)
def test_the_shown_model_fits_and_the_next_larger_one_does_not(cell: tuple[str, str, int]) -> None:
    size = SHOWN[cell]
    assert fits(*cell, size)
    if size != SIZES[0]:
        assert not fits(*cell, SIZES[SIZES.index(size) - 1])


@pytest.mark.parametrize("row", ROWS)
def test_more_devices_never_fit_a_smaller_model(row: str) -> None:
    for memory in MEMORY:
        sizes = [SIZES.index(SHOWN[row, memory, number]) for number in NUM_DEVICES]
        assert sizes == sorted(sizes, reverse=True)
