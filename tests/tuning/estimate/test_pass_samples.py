"""Measured seconds split into blocks and the rest, and combined again by adding costs."""

from __future__ import annotations

import pytest

from lightning_realloc.layout.dims import ParallelDims
from lightning_realloc.tuning.estimate.pass_samples import (
    TINY,
    Grid,
    Point,
    Size,
    add_sharding_seconds,
    split_block_from_rest,
    surfaces,
)
from lightning_realloc.tuning.estimate.profile import Curve

CROWDING = {1: Curve(((1.0, 1.0), (2.0, 1.0), (4.0, 2.0))), 2: Curve(((2.0, 1.0), (4.0, 3.0)))}
LARGE = Size(4, 8, 8)


def test_seconds_are_split_into_blocks_and_the_rest() -> None:
    # 2 s a block and 3 s for the rest: one block takes 5 s, three take 9.
    assert split_block_from_rest(1, 5.0, 3, 9.0) == (2.0, 3.0)
    assert split_block_from_rest(1, 5.0, 3, 4.0) == (0.0, 5.0), "noise does not make blocks faster than nothing"


def test_sharding_seconds_are_added_to_computation_under_contention() -> None:
    base = {Point("train", LARGE): (1.0, 2.0), Point("infer", LARGE): (0.5, 0.25)}
    added = {Point("train", TINY): (0.1, 0.1), Point("train_last", TINY): (0.3, 0.3)}
    both = add_sharding_seconds(base, ParallelDims(dp=2, fsdp=2), added, CROWDING, 1.0)
    # Four ranks take twice as long as one rank, which the base is for; additions were measured with four ranks.
    assert both[Point("train", LARGE)] == pytest.approx((2 * 1.0 + 0.1, 2 * 2.0 + 0.1))
    assert both[Point("train_last", LARGE)] == pytest.approx((2 * 1.0 + 0.3, 2 * 2.0 + 0.3))
    assert Point("infer", LARGE) not in both, "inference of a replica is measured without the other"


def test_tensor_parallelism_divides_the_weights_that_fsdp_gathers() -> None:
    base, added = {Point("infer", LARGE): (0.5, 0.25)}, {Point("infer", TINY): (0.1, 0.1)}
    cut = add_sharding_seconds(base, ParallelDims(fsdp=2, tp=2), added, CROWDING, 3.0)
    # Groups of two take three times as long next to each other. Additions were measured with two ranks: half of them
    # under tp2, on four ranks that take twice as long; three times as much outside of blocks.
    assert cut[Point("infer", LARGE)] == pytest.approx((3 * 0.5 + 0.1, 3 * 0.25 + 3 * 0.1))


def test_only_sizes_of_the_grid_are_in_surfaces() -> None:
    readings = {Point("infer", TINY): (9.0, 9.0), Point("infer", LARGE): (1.0, 2.0)}
    found = surfaces(readings, Grid(micro_batches=(LARGE,)))
    assert set(found) == {"infer"}
    assert found["infer"].block(64.0, 16.0) == 1.0 and found["infer"].rest(64.0, 16.0) == 2.0
