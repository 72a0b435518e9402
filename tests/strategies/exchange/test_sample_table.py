"""Groups, trained positions and totals of a sample table."""

from __future__ import annotations

import pytest
import torch

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import DataError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.strategies.exchange.routing import CallPlacement, Routes
from lightning_realloc.strategies.exchange.sample_table import SampleTable

TRAIN = ModelFunctionCall("actor.train", "train", "actor", "actor_loss", ("batch",), ())
COMPUTE = ModelFunctionCall("measure", "compute", None, "measure", ("batch",), ("loss",))


def table(**columns: torch.Tensor) -> SampleTable:
    """Return six samples with responses of 1 to 6 tokens."""
    rows = [[7] * length for length in range(1, 7)]
    known = {"prompt_ids": Ragged.from_list([[1]] * 6), "response_ids": Ragged.from_list(rows), **columns}
    return SampleTable(Samples(torch.arange(6) + 10, known))


def routes(group_size: int, **options: int) -> Routes:
    """Return the routes of a training call on two ranks and of a computation."""
    place = CallPlacement(
        layout=Layout.parse("dp2@0-1"), micro_batch_tokens=64, train_options=TrainOptions(**options), order_seeds=(3,)
    )
    return Routes([TRAIN, COMPUTE], {"actor.train": place}, 2, group_size=group_size)


def test_samples_that_are_not_trained_are_left_out_of_training() -> None:
    some = table(trained=torch.tensor([True, True, False, False, True, True]))
    steps = routes(2, num_minibatches=2).train_steps(TRAIN, some)
    assert sorted(position for step in steps for position in step.positions) == [0, 1, 4, 5]
    assert {micro.positions for step in steps for share in step.shares for micro in share} == {(0, 1), (4, 5)}
    with pytest.raises(DataError, match="come in groups of 2, and there are 5"):
        routes(2).train_steps(TRAIN, table(trained=torch.tensor([True] * 5 + [False])))


def test_computations_get_whole_groups() -> None:
    for group_size in (2, 3):
        work = routes(group_size).work(COMPUTE, table())
        assert sorted(work.positions.tolist()) == list(range(6))
        for rows in (work.by(rank).tolist() for rank in set(work.shares.tolist())):
            assert all(rows[i] + place in rows for i in range(0, len(rows), group_size) for place in range(group_size))
            assert all(first % group_size == 0 for first in rows[::group_size])


def test_totals_count_groups_tokens_and_named_columns() -> None:
    totals = table(weight=torch.arange(6.0)).totals([0, 1, 4, 5], group_size=2, sums_of=("weight",))
    # 1 + 2 + 5 + 6 response tokens, 0 + 1 + 4 + 5
    assert (totals.num_sequences, totals.num_groups, totals.num_tokens, dict(totals.sums)) == (4, 2, 14, {"weight": 10})
    expected = r"totals_of=\('steps',\) sums .* generating call \(weight\); 'steps' is none .* @compute calls .* have a"
    with pytest.raises(DataError, match=expected):
        table(weight=torch.arange(6.0)).totals([0], group_size=1, sums_of=("steps",))
    with pytest.raises(DataError, match=r"'response_ids' is none of them"):
        table().totals([0], group_size=1, sums_of=("response_ids",))
