"""Calls that wait for the next iteration when generation runs ahead, and the ranks that compute them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.layout import Layout
from lightning_realloc.strategies.exchange.routing import CallPlacement, Routes
from lightning_realloc.strategies.exchange.sample_table import Holders
from tests.strategies.exchange.test_call_fusion import _routes, _table
from tests.strategies.exchange.test_iteration_data import CALLS, ESTIMATE, GENERATE, JUDGE

MADE_BY = Holders(np.array([0, 0, 1, 1]), {0: (0,), 1: (1,)})


def ahead(*calls: object) -> Routes:
    """Return the same routes with generation an iteration ahead."""
    return replace(_routes({}, num_chunks=1), calls=calls or CALLS, generates_ahead=True)


def test_results_of_a_share_are_on_the_tensor_parallel_ranks_of_its_last_stage() -> None:
    # pp2.dp2.fsdp2.tp2 in order: the last stage begins at the ninth rank, and a share has two ranks.
    layout = Layout.parse("pp2.dp2.fsdp2.tp2@0-9,11,10,15,14,13,12")
    place = CallPlacement(layout=layout, micro_batch_tokens=1, train_options=TrainOptions())
    assert list(place.holders.values()) == [(8, 9), (11, 10), (15, 14), (13, 12)]
    assert place.senders == (8, 11, 15, 13)
    assert [layout.data_parallel_index(rank) for rank in place.senders] == [0, 1, 2, 3]


def test_rewards_that_generating_ranks_compute_do_not_wait() -> None:
    assert ahead().calls_at_once() == (GENERATE, JUDGE)
    assert ahead().calls_later() == tuple(call for call in CALLS if call not in (GENERATE, JUDGE))
    on_time = _routes({}, num_chunks=1)
    assert (on_time.calls_at_once(), on_time.calls_later()) == (tuple(CALLS), ())


def test_a_computation_over_the_whole_batch_waits() -> None:
    whole = replace(JUDGE, whole_batch=True)
    assert ahead(*(whole if call is JUDGE else call for call in CALLS)).calls_at_once() == (GENERATE,)


def test_computations_that_wait_run_on_the_ranks_that_use_them() -> None:
    table = _table([1, 2, 3, 4], [0, 0, 1, 1], 2, MADE_BY)
    assert ESTIMATE in ahead().calls_later()
    assert set(ahead().work(JUDGE, table).shares.tolist()) == {0, 1}  # the ranks that generated
    elsewhere = _table([1, 2, 3, 4], [0, 0, 1, 1], 2, Holders(np.zeros(4, dtype=np.int64), {0: (1,)}))
    estimate = replace(ESTIMATE, whole_batch=False)
    routes = ahead(*(estimate if call is ESTIMATE else call for call in CALLS))
    assert routes.work(estimate, elsewhere).shares.tolist() == [0] * 4  # the actor trains on rank 0
    assert _routes({}, num_chunks=1).work(estimate, elsewhere).shares.tolist() == [1] * 4
