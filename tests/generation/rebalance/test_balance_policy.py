"""Planned moves for hand-worked loads, and their properties for any loads."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.rebalance.balance_policy import plan_balance
from lightning_realloc.generation.rebalance.load import LiveSample, MoveCost, RankLoad, SampleMove, StepCurve
from tests.generation.random_moves import makespan_seconds

PER_ROW = StepCurve(((1, 0.01), (8, 0.08)))
"""10 ms for each row of a step."""
FLAT = StepCurve(((1, 0.01), (8, 0.01)))
"""10 ms for any number of rows: below the knee."""
COST = MoveCost(1000, bytes_per_s=1e6, latency_s=0.0, prefill_tokens_per_s=100, stall_s=0.01)
"""A sample of 50 tokens of context: 50 ms to send, 10 ms of stall on both sides."""


def live(*remaining: float, first_id: int = 0, context: int = 50, moved: int | None = None) -> tuple[LiveSample, ...]:
    return tuple(LiveSample(first_id + index, context, tokens, moved) for index, tokens in enumerate(remaining))


def idle(rank: int, curve: StepCurve = PER_ROW, free_slots: int = 4) -> RankLoad:
    return RankLoad(rank, (), (), curve, free_slots)


def test_waiting_samples_move_at_any_cost_of_sending() -> None:
    loads = (RankLoad(0, live(10), live(10, 10, 10, first_id=1), FLAT, 0), idle(1, FLAT, free_slots=1))
    dear = MoveCost(1000, bytes_per_s=1, latency_s=9, prefill_tokens_per_s=1, stall_s=9)
    moves = plan_balance(loads, dear, current_round=0)
    # One slot each: 40 steps against none become 20 and 20.
    assert moves == (SampleMove(1, 0, 1, "recompute"), SampleMove(2, 0, 1, "recompute"))
    assert makespan_seconds(loads, dear) == pytest.approx(0.4)
    assert makespan_seconds(loads, dear, moves) == pytest.approx(0.2)


def test_running_samples_move_until_both_ranks_end_together() -> None:
    loads = (RankLoad(0, live(100, 100, 100, 100), (), PER_ROW, 0), idle(1))
    moves = plan_balance(loads, COST, current_round=0)
    assert moves == (SampleMove(0, 0, 1, "send"), SampleMove(1, 0, 1, "send"))
    # 100 steps of 4 rows: 4 s. Of 2 rows: 2 s, and for each of two samples 10 ms of stall and 50 ms to send it.
    assert makespan_seconds(loads, COST) == pytest.approx(4.0)
    assert makespan_seconds(loads, COST, moves) == pytest.approx(2.12)


def test_samples_with_the_most_work_per_byte_move_first() -> None:
    samples = (LiveSample(0, 400, 100), LiveSample(1, 50, 60), LiveSample(2, 50, 80), LiveSample(3, 400, 90))
    moves = plan_balance((RankLoad(0, samples, (), PER_ROW, 0), idle(1)), COST, current_round=0)
    assert [move.sample_id for move in moves] == [2, 1]


def test_no_sample_moves_if_fewer_rows_do_not_shorten_a_step() -> None:
    loads = (RankLoad(0, live(100, 100, 100, 100), (), FLAT, 0), RankLoad(1, live(10, first_id=9), (), FLAT, 3))
    assert plan_balance(loads, COST, current_round=0) == ()
    # A plateau from 2 rows to 4: one sample less does not shorten the steps of the first rank, although the second
    # would finish that sample sooner.
    plateau = StepCurve(((1, 0.01), (2, 0.04), (4, 0.04)))
    assert (
        plan_balance((RankLoad(0, live(200, 90, 90), (), plateau, 0), idle(1, plateau, 1)), COST, current_round=0) == ()
    )


def test_running_samples_move_below_the_knee_if_that_shortens_a_queue() -> None:
    # The waiting sample moved in this step, so a running one makes room for it.
    loads = (RankLoad(0, live(100, 100), live(100, first_id=2, moved=0), FLAT, 0), idle(1, FLAT))
    assert plan_balance(loads, COST, current_round=0) == (SampleMove(0, 0, 1, "send"),)


@pytest.mark.parametrize(("tokens", "num_moves"), [(86, 0), (84, 2)])
def test_ranks_that_end_close_together_move_no_samples(tokens: int, num_moves: int) -> None:
    # One slot each: 100 steps and 86 lie within 15 %, although 95 and 91 would be better. With 84: 90 and 94.
    loads = (
        RankLoad(0, live(80), live(5, 5, 5, 5, first_id=1), FLAT, 0),
        RankLoad(1, live(tokens, first_id=9), (), FLAT, 0),
    )
    assert len(plan_balance(loads, COST, current_round=0)) == num_moves


def test_a_move_must_cost_less_than_a_third_of_the_time_between_the_ends() -> None:
    def moves_at(stall_s: float) -> tuple[SampleMove, ...]:
        cost = MoveCost(1000, bytes_per_s=1e6, latency_s=0.0, prefill_tokens_per_s=100, stall_s=stall_s)
        return plan_balance((RankLoad(0, live(100, 100), (), PER_ROW, 0), idle(1)), cost, current_round=0)

    # The ends are 2 s apart; one sample costs the stall and 50 ms.
    assert moves_at(0.62) == ()
    assert len(moves_at(0.61)) == 1


def test_a_gain_of_less_than_two_percent_is_not_worth_a_move() -> None:
    # 1,000 steps of 2 rows: moving one sample away saves one percent.
    nearly_flat = StepCurve(((1, 0.0099), (2, 0.01)))
    loads = (RankLoad(0, live(1000, 1000), (), nearly_flat, 0), idle(1, nearly_flat))
    assert plan_balance(loads, COST, current_round=0) == ()


def test_a_sample_does_not_move_again_soon_after_a_move() -> None:
    samples = live(100, 100, moved=40) + live(100, 100, first_id=2)
    loads = (RankLoad(0, samples, (), PER_ROW, 0), idle(1))
    assert [move.sample_id for move in plan_balance(loads, COST, current_round=43)] == [2, 3]
    assert [move.sample_id for move in plan_balance(loads, COST, current_round=44)] == [0, 1]


def test_without_a_cost_only_queued_samples_move() -> None:
    loads = (RankLoad(0, live(100, 100, 100), live(100, 100, first_id=3), PER_ROW, 0), idle(1))
    assert {move.sample_id for move in plan_balance(loads, None, current_round=0)} <= {3, 4}
    assert len(plan_balance(loads, None, current_round=0)) == 2
    assert plan_balance((RankLoad(0, live(100, 100, 100), (), PER_ROW, 0), idle(1)), None, current_round=0) == ()


def test_a_rank_receives_no_more_samples_than_it_has_free_slots() -> None:
    donor = RankLoad(0, live(100, 100, 100, 100), (), PER_ROW, 0)
    assert len(plan_balance((donor, idle(1, free_slots=1)), COST, current_round=0)) == 1
    queue = RankLoad(1, (), live(1, first_id=8), PER_ROW, free_slots=1)  # its own waiting sample takes the slot
    assert plan_balance((donor, queue), COST, current_round=0) == ()


def test_a_rank_that_no_longer_generates_receives_no_samples() -> None:
    loads = (RankLoad(0, live(100), live(100, 100, first_id=1), FLAT, 0), idle(1, FLAT, free_slots=0))
    assert plan_balance(loads, COST, current_round=0) == ()
    assert plan_balance((*loads, idle(2, FLAT, 1)), COST, current_round=0) == (SampleMove(1, 0, 2, "recompute"),)


def test_both_or_none_of_two_ranks_that_end_last_send_samples() -> None:
    donors = (
        RankLoad(0, live(100, 100, 100, 100), (), PER_ROW, 0),
        RankLoad(1, live(100, 100, 100, 100, first_id=4), (), PER_ROW, 0),
    )
    moves = plan_balance((*donors, idle(2), idle(3)), COST, current_round=0)
    assert {(move.source, move.target) for move in moves} == {(0, 2), (1, 3)}
    assert plan_balance((idle(3), idle(2), *reversed(donors)), COST, current_round=0) == moves
    assert plan_balance((*donors, idle(2, free_slots=1)), COST, current_round=0) == ()


def test_a_sample_on_two_ranks_is_refused() -> None:
    with pytest.raises(GenerationError, match=r"ranks \[0, 1\] and samples \[5, 5\]"):
        plan_balance([RankLoad(rank, live(9, first_id=5), (), FLAT, 0) for rank in (0, 1)], COST, current_round=0)


@st.composite
def rank_loads(draw: st.DrawFn) -> list[RankLoad]:
    rising = st.sampled_from([FLAT, PER_ROW, StepCurve(((2, 0.01), (4, 0.011), (8, 0.03)))])
    loads, next_id = [], 0
    for rank in range(draw(st.integers(1, 5))):
        tokens = draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300), st.integers(0, 99)), max_size=8))
        samples = [
            LiveSample(next_id + index, context, float(remaining), moved or None)
            for index, (context, remaining, moved) in enumerate(tokens)
        ]
        next_id += len(samples)
        begun = draw(st.integers(0, len(samples)))
        free_slots = draw(st.integers(1, 6))
        loads.append(RankLoad(rank, tuple(samples[:begun]), tuple(samples[begun:]), draw(rising), free_slots))
    return loads


costs = st.builds(
    MoveCost, st.just(1000), st.floats(1e4, 1e8), st.floats(0, 0.1), st.floats(10, 1e5), st.floats(0, 0.1)
)


def carry_out(loads: Sequence[RankLoad], moves: Sequence[SampleMove]) -> None:
    """Carry out the moves one by one; check that each sample is on its source rank and gets a slot."""
    running = {load.rank: {sample.sample_id for sample in load.samples} for load in loads}
    waiting = {load.rank: {sample.sample_id for sample in load.waiting} for load in loads}
    slots = {load.rank: load.num_slots for load in loads}
    for move in moves:
        held = waiting if move.sample_id in waiting[move.source] else running
        assert move.source != move.target
        held[move.source].remove(move.sample_id)
        held[move.target].add(move.sample_id)
        assert len(running[move.target]) <= slots[move.target]
    assert len({move.sample_id for move in moves}) == len(moves)


@given(loads=rank_loads(), cost=costs)
def test_balance_keeps_every_sample_and_lowers_the_makespan_if_it_moves_any(
    loads: list[RankLoad], cost: MoveCost
) -> None:
    moves = plan_balance(loads, cost, current_round=100)
    carry_out(loads, moves)
    assert not moves or makespan_seconds(loads, cost, moves) < makespan_seconds(loads, cost)
    moved = {move.sample_id for move in moves}
    recent = [s for load in loads for s in load.live if s.last_moved_round is not None and 100 - s.last_moved_round < 4]
    assert not moved & {sample.sample_id for sample in recent}


@given(loads=rank_loads(), cost=st.none() | costs, rng=st.randoms(use_true_random=False))
@settings(deadline=None)
def test_every_rank_plans_the_same_moves_for_any_order_of_loads(
    loads: list[RankLoad], cost: MoveCost | None, rng: Random
) -> None:
    moves = plan_balance(loads, cost, current_round=100)
    assert plan_balance(rng.sample(loads, len(loads)), cost, current_round=100) == moves
    carry_out(loads, moves)
    queued = {sample.sample_id for load in loads for sample in load.waiting}
    assert cost is not None or {move.sample_id for move in moves} <= queued
