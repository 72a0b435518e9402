"""Calls that wait for the next iteration when generation runs ahead, and the ranks that compute them."""

from __future__ import annotations

from dataclasses import replace

from lightning_realloc.strategies.exchange.routing import Routes
from tests.strategies.exchange.test_call_fusion import _routes, _table
from tests.strategies.exchange.test_iteration_data import CALLS, ESTIMATE, GENERATE, JUDGE

MADE_BY = [(0,), (0,), (1,), (1,)]


def ahead(*calls: object) -> Routes:
    """Return the same routes with generation an iteration ahead."""
    return replace(_routes({}, num_chunks=1), calls=calls or CALLS, generates_ahead=True)


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
    assert ahead().computed(JUDGE, table).keys() == {0, 1}  # the ranks that generated
    elsewhere = _table([1, 2, 3, 4], [0, 0, 1, 1], 2, [(1,)] * 4)
    estimate = replace(ESTIMATE, whole_batch=False)
    routes = ahead(*(estimate if call is ESTIMATE else call for call in CALLS))
    assert routes.computed(estimate, elsewhere) == {0: (0, 1, 2, 3)}  # the actor trains on rank 0
    assert _routes({}, num_chunks=1).computed(estimate, elsewhere) == {1: (0, 1, 2, 3)}
