"""Table of the README with the largest models that fit."""

from __future__ import annotations

import pytest

from benchmarks.what_fits import MEMORY, NUM_DEVICES, README, ROWS, SIZES, fits, read_table
from tests.matrices import matrix

SHOWN = read_table(README.read_text())
SMALL = [("GRPO", "80", 1), ("GRPO", "80", 8), ("PPO", "24", 2), ("PPO", "141", 8), ("DPO, LoRA", "24", 1)]
"""Cells whose searches take a second or two."""


def test_every_row_and_column_is_shown() -> None:
    assert sorted(SHOWN) == sorted((row, memory, number) for row in ROWS for memory in MEMORY for number in NUM_DEVICES)
    assert set(SHOWN.values()) <= {*SIZES, "–"}


@pytest.mark.parametrize(("row", "memory", "number"), matrix(SMALL, SMALL[0]))
def test_the_shown_model_fits_and_the_next_larger_one_does_not(row: str, memory: str, number: int) -> None:
    size = SHOWN[row, memory, number]
    assert fits(row, memory, number, size)
    if size != SIZES[0]:
        assert not fits(row, memory, number, SIZES[SIZES.index(size) - 1])


@pytest.mark.parametrize("row", ROWS)
def test_more_devices_never_fit_a_smaller_model(row: str) -> None:
    for memory in MEMORY:
        sizes = [SIZES.index(SHOWN[row, memory, number]) for number in NUM_DEVICES]
        assert sizes == sorted(sizes, reverse=True)
