"""Is the depth the best one, and are costs learnt fast enough? Simulated batches and known curves are the judges."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_realloc.generation.speculative.acceptance import AcceptanceRates, DepthOutcome, DepthProfile
from lightning_realloc.generation.speculative.draft_planner import DraftPlanner, _fastest, remaining_s
from lightning_realloc.generation.speculative.slowness import Slowness
from lightning_realloc.generation.speculative.step_costs import SpeculationCosts, StepCosts
from lightning_realloc.generation.speculative.unevenness import Unevenness, tokens_behind

CURVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "flat": lambda size: np.full(np.shape(size), 1.0),
    "linear": lambda size: 0.1 + 0.05 * size,
    "steps": lambda size: 1.0 + np.ceil(np.asarray(size) / 8),
    "knee": lambda size: np.maximum(1.0, np.asarray(size) / 12),
}
MAX_DEPTH = 6
NEW_TOKENS = 96


def fixed_depth_s(depth: int, num_rows: int, chance: float, seconds_of: Callable[[np.ndarray], np.ndarray]) -> float:
    """Return the mean seconds until all samples have `NEW_TOKENS`, if each step drafts ``depth`` tokens of each."""
    rng, total, times = np.random.default_rng(0), 0.0, 16
    for _ in range(times):
        left = np.full(num_rows, NEW_TOKENS)
        while len(left := left[left > 0]):
            total += float(seconds_of(np.array(len(left) * (1 + depth))))
            stood = (rng.random((len(left), depth)) < chance).cumprod(axis=1).sum(axis=1)
            left = left - 1 - stood
    return total / times


def planner_that_knows(num_rows: int, chance: float, seconds_of: Callable[[np.ndarray], np.ndarray]) -> DraftPlanner:
    """Return a planner that has seen drafts of all lengths, steps of all sizes, and that samples are alike."""
    planner, rng = DraftPlanner(MAX_DEPTH, costs_a_forward=False), np.random.default_rng(1)
    planner.unevenness = Unevenness(0.0)
    for rows in sorted([*range(1, num_rows + 1)] * 2):
        planner.costs.plain.observe(rows, float(seconds_of(np.array(rows))))
    for size in rng.integers(num_rows, num_rows * (1 + MAX_DEPTH), 400, endpoint=True).tolist():
        planner.costs.verifying.observe(size, float(seconds_of(np.array(size))))
    for _ in range(4000):
        stood = int((rng.random(MAX_DEPTH) < chance).cumprod().sum())
        planner.profile.learn(MAX_DEPTH, stood, depth=MAX_DEPTH, room=stood + 1)
    return planner


def observe_twice(costs: StepCosts, size: float, seconds: float) -> None:
    """Show the seconds of two steps of a size: of one alone nothing is told."""
    for _ in range(2):
        costs.observe(size, seconds)


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("num_rows", [1, 6, 24])
@pytest.mark.parametrize("curve", sorted(CURVES))
def test_the_depth_is_the_best_of_all_or_about_as_good(curve: str, num_rows: int, chance: float) -> None:
    seconds_of = CURVES[curve]
    planner = planner_that_knows(num_rows, chance, seconds_of)
    chosen = planner.plan([NEW_TOKENS] * num_rows, is_tail=True).depth
    seconds = [fixed_depth_s(depth, num_rows, chance, seconds_of) for depth in range(MAX_DEPTH + 1)]
    assert seconds[chosen] < 1.05 * min(seconds), (chosen, seconds)


@pytest.mark.parametrize("costs_a_forward", [False, True])
def test_the_first_drafts_are_short_and_later_ones_as_long_as_pays(costs_a_forward: bool) -> None:
    planner = DraftPlanner(8, costs_a_forward=costs_a_forward)
    for _ in range(3):
        planner.costs.plain.observe(1, 1.0)
    for _ in range(200):
        planner.profile.learn(8, 8, depth=8, room=9)
    assert planner.plan([96.0], is_tail=True).depth == 4  # no step that verified anything has been seen
    for _ in range(3):
        planner.costs.verifying.observe(5, 1.01)
    assert planner.plan([96.0], is_tail=True).depth == 8


@pytest.mark.parametrize(("num_rows", "every"), [(1, 32), (4, 32), (16, 128), (32, 256)])
def test_many_samples_are_looked_at_more_seldom(num_rows: int, every: int) -> None:
    planner = DraftPlanner(8, costs_a_forward=True)
    for _ in range(3):
        planner.costs.plain.observe(num_rows, 1.0)
        for size in range(num_rows, 9 * num_rows + 1):
            planner.costs.verifying.observe(size, 1.0 + 4.0 * (size > 3 * num_rows))
    for _ in range(1000):
        planner.profile.learn(8, 2, depth=8, room=3)
    plan = planner.plan([96.0] * num_rows, is_tail=True)
    assert plan.depth and plan.look_every == every


@pytest.mark.parametrize(("num_drafts", "depth"), [(0, 3), (4, 3), (300, 2)])
def test_a_deeper_draft_that_promises_a_little_less_is_made_while_little_is_known_of_it(
    num_drafts: int, depth: int
) -> None:
    planner = DraftPlanner(4, costs_a_forward=False)
    for _ in range(num_drafts):
        planner.profile.learn(4, 4, depth=4, room=5)
    seconds = [2.0, 1.01, 1.0, 1.02, 1.04]  # of no draft, of one token, of two and so on
    assert planner._deepest_in_doubt(2, seconds) == depth


def test_a_plan_made_anew_for_other_samples_drafts_as_deep_and_tells_tokens_by_what_they_are_worth_now() -> None:
    planner = planner_that_knows(6, 0.6, CURVES["flat"])
    plan = planner.plan([NEW_TOKENS] * 6, is_tail=True)
    for left in ([96.0, 10.0, 96.0, 50.0], [96.0] * 6):
        renewed = planner.renew(plan, left, is_tail=True)
        assert renewed.depth == plan.depth > 0
        assert len(renewed.worths) == len(renewed.least_survivals) == len(left)
    assert renewed == plan
    behind = planner.renew(plan, [96.0, 10.0], is_tail=True).least_survivals
    assert behind[0] <= behind[1]


def test_steps_that_were_seen_while_all_was_new_count_for_little() -> None:
    def learnt(*, is_doubted: bool) -> float:
        costs = SpeculationCosts(costs_a_forward=False)
        for _ in range(40):
            costs.plain.observe(4, 1.0)
            costs.verifying.observe(20, 2.6)
        if is_doubted:
            costs.doubt()
        for _ in range(16):
            costs.plain.observe(4, 1.0)
            costs.verifying.observe(20, 2.0)
        return costs.verifying.seconds(20) / costs.plain.seconds(4)

    assert learnt(is_doubted=True) == pytest.approx(2.0, rel=0.06)
    assert learnt(is_doubted=False) > 2.15


def test_nothing_is_drafted_where_every_token_costs_what_it_may_bring() -> None:
    # A second per token: a drafted one brings at most its chance of 0.4 tokens for a second.
    planner = planner_that_knows(2, 0.4, lambda size: np.asarray(size, dtype=float))
    assert planner.plan([20.0, 20.0], is_tail=True).depth == 0


def test_a_step_that_only_tries_look_ups_saves_rows_in_the_tail() -> None:
    # One step with drafts takes the sample that is last of all hardly ever ahead: fewer steps come of many of them.
    planner = planner_that_knows(4, 0.1, lambda size: 1.0 + np.asarray(size, dtype=float))
    plan = planner.plan([20.0] * 4, is_tail=True)
    assert plan.depth == 0 and plan.best_draft
    assert plan.plain_s == pytest.approx(5.0, rel=0.1)
    assert plan.worths == pytest.approx([1.0] * 4, rel=0.1)
    assert planner.plan([20.0], is_tail=True).worths == pytest.approx([2.0], rel=0.1)
    assert sum(planner.plan([20.0] * 4, is_tail=False).worths) == pytest.approx(5.0, rel=0.1)


def test_look_ups_begin_only_where_they_promise_more_than_their_estimates_are_off_by() -> None:
    def chosen(seconds_of_one: float) -> int:
        planner = planner_that_knows(4, 0.5, lambda size: np.where(np.asarray(size) > 4, seconds_of_one, 1.0))
        return planner.plan([20.0] * 4, is_tail=False).depth

    tokens = 1.0 + sum(0.5**depth for depth in range(1, MAX_DEPTH + 1))
    assert chosen(0.985 * tokens) == 0 < chosen(0.95 * tokens)


def test_a_model_that_has_to_catch_up_is_tried_where_that_may_lose_enough() -> None:
    planner = planner_that_knows(2, 0.4, lambda size: np.asarray(size, dtype=float))

    def tried(**told: float) -> int:
        plan = planner.plan([20.0, 20.0], is_tail=True, **told)  # type: ignore[arg-type]
        assert plan.is_try == (plan.depth > 0)
        return plan.depth

    # Four steps of one token of each sample take two seconds more each, and 0.4 tokens in 2.8 plain seconds are gained.
    assert [tried(num_missed=9, may_lose_s=lost_s) for lost_s in (0.0, 4.5, 5.1)] == [0, 0, 1]
    assert not tried(may_lose_s=40.0)  # nothing to catch up with: some steps tell
    assert not tried()


def test_of_depths_with_the_same_tokens_per_second_many_samples_are_over_sooner_with_the_shallower() -> None:
    # The last of many takes longer than the mean, and the longer the further apart drafting lets them drift.
    shallow, deep = DepthOutcome(1.6, 0.24, 1.0), DepthOutcome(2.4, 2.5, 4.0)

    def seconds(outcome: DepthOutcome, num_last: float) -> float:
        tokens, variance, _ = outcome
        behind = tokens_behind(num_last, tokens, variance, 960.0 / tokens, unevenness=0.0)
        return remaining_s(tokens, tokens, 0.9 * tokens, [960.0] * 32) + 0.9 * behind

    one, many = ([seconds(outcome, num_last) for outcome in (shallow, deep)] for num_last in (1.0, 32.0))
    assert one == pytest.approx([960.0, 960.0], rel=1e-9)
    assert one[1] < many[0] < many[1]


@pytest.mark.parametrize("num_rows", [1, 4, 16, 32])
@pytest.mark.parametrize("depth", [0, 2, 8])
@pytest.mark.parametrize(("chance", "spread"), [(0.5, 0.0), (0.9, 0.0), (0.5, 0.05)])
def test_remaining_seconds_are_those_of_simulated_batches(
    num_rows: int, depth: int, chance: float, spread: float
) -> None:
    # Chances of samples differ by ``spread``. Further drafted tokens take 0.05 for all samples together, verified ones
    # 0.05 for each.
    length = 96
    rng = np.random.default_rng(num_rows)

    def step_s(limits: NDArray[np.int_]) -> float:
        return float(0.4 + 0.05 * limits.max() + 0.05 * (1 + limits).sum())

    def simulated() -> float:
        left, seconds = np.full(num_rows, length), 0.0
        chances = rng.normal(chance, spread, (num_rows, 1)).clip(0.0, 1.0)
        while (is_running := left > 0).any():
            limits = np.minimum(depth, left[is_running] - 1)  # drafts are cut off at the end
            seconds += step_s(limits)
            stood = np.cumprod(rng.random((limits.size, depth)) < chances[is_running], axis=1).sum(axis=1)
            left[is_running] -= 1 + np.minimum(stood, limits)
        return seconds

    survivals = chance ** np.arange(1, depth + 1)
    tokens = 1.0 + survivals.sum()
    variance = 1.0 + (survivals * (2 * np.arange(1, depth + 1) + 1)).sum() - tokens**2
    slope = (np.arange(1, depth + 1) * chance ** np.arange(depth)).sum()
    unevenness = spread * slope / max(tokens - 1.0, 1.0)
    behind = tokens_behind(num_rows, tokens, variance, length / tokens, unevenness)
    whole_s, alone_s = (step_s(np.full(rows, depth)) for rows in (num_rows, 1))
    predicted = remaining_s(tokens, whole_s, alone_s, [float(length)] * num_rows) + behind * alone_s / tokens
    assert predicted == pytest.approx(np.mean([simulated() for _ in range(200)]), rel=0.05)


def test_a_size_of_two_slow_steps_is_told_close_to_what_its_neighbours_take() -> None:
    costs = StepCosts(Slowness(together=0.0))
    observe_twice(costs, 40, 7.0)  # 4 in truth
    for _ in range(50):
        costs.observe(20, 2.0)
        costs.observe(80, 8.0)
    assert 4.0 < costs.seconds(40) < 4.7
    for _ in range(100):
        costs.observe(40, 6.0)  # what is seen often enough is believed
    assert costs.seconds(40) == pytest.approx(6.0, rel=0.05)


def test_a_few_slow_steps_of_a_small_size_do_not_lift_what_many_of_a_larger_one_took() -> None:
    costs = StepCosts(Slowness(together=0.0))
    observe_twice(costs, 30, 9.0)  # 3 in truth, and never seen again
    for _ in range(50):
        costs.observe(20, 2.0)
        costs.observe(45, 4.5)
        costs.observe(60, 6.0)
    assert costs.seconds(45) == pytest.approx(4.5, rel=0.1)
    assert costs.seconds(60) == pytest.approx(6.0, rel=0.02)


def test_a_machine_that_gets_slower_slows_plain_steps_too_though_none_is_made() -> None:
    costs = SpeculationCosts(costs_a_forward=True)
    for _ in range(20):
        costs.plain.observe(4, 1.0)
        costs.verifying.observe(20, 2.0)
    for _ in range(60):
        costs.verifying.observe(20, 4.0)
    assert costs.verifying.seconds(20) == pytest.approx(4.0, rel=0.02)
    assert costs.plain_s(4)[0] == pytest.approx(2.0, rel=0.2)


def test_a_few_plain_steps_tell_what_they_take_now_and_verifying_ones_are_taken_to_stay_as_they_are() -> None:
    costs = SpeculationCosts(costs_a_forward=False)
    for _ in range(40):
        costs.plain.observe(4, 1.0)
        costs.verifying.observe(20, 2.0)
    for _ in range(12):  # they look dear where drafting begins, and drafts are verified from then on
        costs.plain.observe(4, 1.1)
    for _ in range(300):
        costs.verifying.observe(20, 2.0)
    for _ in range(6):
        costs.plain.observe(4, 1.0)
    assert costs.plain_s(4)[0] == pytest.approx(1.0, rel=0.015)
    assert costs.verifying.seconds(20) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("margin", "in_use", "seconds", "chosen"),
    [
        (0.02, 0, [100.0, 98.5, 99.0], 0),
        (0.02, 0, [100.0, 97.5, 97.0], 2),
        (0.01, 1, [100.0, 99.5, 99.9], 0),
        (0.01, 1, [100.0, 98.5, 98.0], 1),  # another depth has to be better by a percent, too
        (0.01, 1, [100.0, 98.5, 97.0], 2),
        (0.0, 1, [100.0, 100.5, 101.0], 1),
        (0.0, 0, [100.0, 99.5, 99.9], 0),
    ],
)
def test_drafts_have_to_be_faster_than_none_by_a_margin(
    margin: float, in_use: int, seconds: list[float], chosen: int
) -> None:
    assert _fastest(seconds, in_use, margin) == chosen


def test_new_sizes_whose_first_steps_were_fast_do_not_make_plain_ones_look_slow() -> None:
    def told(seed: int) -> float:
        costs, rng = SpeculationCosts(costs_a_forward=True), np.random.default_rng(seed)
        for _ in range(20):
            costs.plain.observe(4, 1.0)
        for _ in range(30):  # all of them new at first, and told by the faster one of two steps
            for size in np.geomspace(8, 80, 14):
                costs.verifying.observe(float(size), float(size) / 8 * rng.lognormal(0.0, 0.15))
        return costs.plain_s(4)[0]

    assert np.mean([told(seed) for seed in range(20)]) == pytest.approx(1.0, abs=0.04)


def test_steps_that_verify_more_than_any_did_are_taken_to_grow_on_but_for_a_hope() -> None:
    costs = planner_that_knows(4, 0.6, lambda size: 1.0 + np.asarray(size, dtype=float)).costs
    largest, largest_s = costs.verifying.largest
    beyond_s = costs.verifying_s(4)(3 * largest, 1)
    assert largest_s < beyond_s < 1.0 + 3 * largest
    flat = planner_that_knows(4, 0.6, lambda size: 1.0 + 0.0 * np.asarray(size, dtype=float)).costs
    assert flat.verifying_s(4)(3 * largest, 1) == pytest.approx(1.0, rel=0.01)


def test_what_catching_up_takes_follows_from_one_time() -> None:
    costs = SpeculationCosts(costs_a_forward=True)
    for _ in range(2):
        costs.drafting.observe(8, 0.01)
    assert costs.catching_up_s(8, 500) == pytest.approx(costs.drafting_s(8))  # nothing is known
    assert costs.catching_up_s(8, 0) == 0.0
    costs.catching_up.observe(100, 0.02)  # once is enough: tries are seldom
    assert costs.catching_up_s(8, 100) == pytest.approx(0.02)
    assert costs.catching_up_s(8, 500) == pytest.approx(0.1)
    assert costs.catching_up_s(8, 60) == pytest.approx(0.012)
    assert costs.catching_up_s(8, 10) == pytest.approx(0.01)  # a forward nevertheless


def test_a_depth_in_use_stays_while_it_is_about_as_good() -> None:
    planner = planner_that_knows(4, 0.6, CURVES["linear"])
    depth = planner.plan([50.0] * 4, is_tail=True).depth
    best = planner_that_knows(4, 0.62, CURVES["linear"])
    planner.profile = best.profile
    assert planner.plan([50.0] * 4, is_tail=True).depth == depth


def test_a_plan_for_some_of_its_samples_keeps_what_is_theirs() -> None:
    plan = planner_that_knows(6, 0.9, CURVES["steps"]).plan([90.0, 80.0, 70.0, 40.0, 20.0, 10.0], is_tail=True)
    some = plan.of([0, 4])
    assert some.depth == plan.depth > 0
    assert (some.worths, some.least_survivals) == (
        [plan.worths[0], plan.worths[4]],
        [plan.least_survivals[0], plan.least_survivals[4]],
    )
    assert plan.worths[0] > plan.worths[4]


def test_what_prepares_many_steps_is_shared_among_them() -> None:
    costs = SpeculationCosts(costs_a_forward=True)
    shares = [costs.take_preparing(3.0), *(costs.take_preparing(0.0) for _ in range(500))]
    assert max(shares) < 0.1
    assert sum(shares) == pytest.approx(3.0, rel=0.01)


def test_samples_that_are_behind_verify_less_likely_tokens() -> None:
    plan = planner_that_knows(4, 0.8, CURVES["linear"]).plan([10.0, 40.0, 60.0, 80.0], is_tail=True)
    assert list(plan.least_survivals) == sorted(plan.least_survivals, reverse=True)
    assert plan.least_survivals[0] > 1.5 * plan.least_survivals[-1]
    no_tail = planner_that_knows(4, 0.8, CURVES["linear"]).plan([10.0, 40.0, 60.0, 80.0], is_tail=False)
    assert len(set(no_tail.least_survivals)) == 1  # a waiting sample takes the slot


@settings(max_examples=20)
@given(
    outcomes=st.lists(
        st.lists(st.booleans(), min_size=4, max_size=4).map(lambda stands: [*stands, False].index(False)),
        min_size=200, max_size=400,
    )
)  # fmt: skip
def test_a_profile_comes_to_the_mean_and_the_variance_of_what_was_seen(outcomes: list[int]) -> None:
    profile = DepthProfile(4)
    for stood in outcomes:
        profile.learn(4, stood, depth=4, room=stood + 1)
    tokens = [1 + stood for stood in outcomes]
    deepest = profile.outcomes()[-1]
    assert deepest.tokens == pytest.approx(np.mean(tokens), abs=0.25)
    assert deepest.variance == pytest.approx(np.var(tokens), abs=0.5)
    assert deepest.drafted == pytest.approx(4.0)


def test_what_was_seen_long_ago_fades_at_depths_that_are_tried_no_more_however_many_drafts_there_were() -> None:
    profile = DepthProfile(2)
    for _ in range(20_000):  # beyond which counts are scaled back
        profile.learn(2, 1, depth=2, room=3)
    assert profile.num_tried(2) == pytest.approx(1000.0, rel=0.01)
    assert [outcome.tokens for outcome in profile.outcomes()] == pytest.approx([2.0, 2.0], abs=0.02)
    for _ in range(10_000):
        profile.learn(1, 1, depth=1, room=2)
    assert profile.num_tried(2) < 0.1
    assert profile.outcomes()[1].tokens == pytest.approx(3.0, abs=0.05)  # as the first one stands


def test_a_depth_never_tried_is_hoped_to_do_as_the_one_before_it() -> None:
    profile = DepthProfile(3)
    for _ in range(1000):
        profile.learn(1, 1, depth=1, room=2)
    one, two, three = profile.outcomes()
    assert one.tokens == pytest.approx(2.0, abs=0.01)
    assert two.tokens == pytest.approx(3.0, abs=0.02)
    assert three.drafted == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize("curve", sorted(CURVES))
def test_step_costs_are_within_15_percent_after_50_noisy_steps_and_again_after_the_machine_slows_down(
    curve: str,
) -> None:
    rng, costs = random.Random(0), StepCosts()
    sizes = [1, 2, 4, 7, 12, 20, 33, 60]
    for factor in (1.0, 2.0, 0.5):
        for _ in range(50):
            size = rng.choice(sizes)
            noise = rng.lognormvariate(0, 0.1) * (4.0 if rng.random() < 0.02 else 1.0)
            costs.observe(size, factor * float(CURVES[curve](np.array(size))) * noise)
        errors = [costs.seconds(size) / (factor * float(CURVES[curve](np.array(size)))) - 1 for size in sizes]
        assert np.abs(errors).mean() < 0.15


def test_step_costs_never_fall_with_size_and_stay_flat_beyond_what_was_tried() -> None:
    costs = StepCosts()
    for size, seconds in ((1, 1.0), (8, 0.7), (16, 2.0), (4, 3.0)):
        observe_twice(costs, size, seconds)
    curve = np.array([costs.seconds(size) for size in range(1, 64)])
    assert (np.diff(curve) >= 0).all()
    assert curve[-1] == curve[20]


def test_costs_between_two_sizes_lie_between_theirs() -> None:
    costs = StepCosts()
    observe_twice(costs, 4, 1.0)
    observe_twice(costs, 12, 3.0)
    assert costs.seconds(8) == pytest.approx(2.0)


def test_the_first_step_of_a_size_does_not_tell_what_it_takes() -> None:
    costs = StepCosts()
    observe_twice(costs, 4, 1.0)
    for size in (2, 12):
        costs.observe(size, 300.0)  # kernels are loaded, say
        assert costs.seconds(size) == 1.0
    costs.observe(12, 3.0)
    assert costs.seconds(12) == pytest.approx(3.0)


def test_a_clock_that_stands_still_or_goes_back_costs_next_to_nothing() -> None:
    costs = StepCosts()
    for seconds in (0.0, -1.0, 0.0, 0.0):
        costs.observe(4, seconds)
    assert 0.0 < costs.seconds(4) < 1e-6


def test_rates_of_a_kind_go_from_what_all_kinds_do_to_what_it_does() -> None:
    rates = AcceptanceRates()
    assert rates("new") == 1.0  # drafts are not cut off for what never fell
    for _ in range(200):
        rates.learn(["good", "bad"], 1)
    assert rates("good") > 0.95
    assert rates("bad") < 0.05
    assert 0.4 < rates("new") < 0.6


def test_tokens_behind_the_first_fallen_say_nothing() -> None:
    rates = AcceptanceRates()
    rates.learn(["a", "b", "c"], 0)
    assert rates("a") < rates("b") == rates("c")
