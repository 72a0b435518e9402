"""Depths compared with a brute-force search, and the number of probes, in simulated steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.generation.speculative.controller import (
    MAX_BACKOFF,
    MIN_WEIGHT,
    REVIEW_STEPS,
    SETTLING_STEPS,
    AcceptanceByDepth,
    CostLine,
    DepthController,
    DraftOutcome,
    MeasuredStep,
    first_depth,
)
from tests.matrices import crossed

MAX_DEPTH = 8
CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda tokens: 1.0,
    "gentle": lambda tokens: 1.0 + 0.02 * tokens,
    "linear": lambda tokens: 0.1 + 0.05 * tokens,
    "knee": lambda tokens: max(1.0, tokens / 48),
}


@dataclass
class Simulation:
    """Steps of a controller: every sample's drafted tokens are accepted with ``chance``, one after the other."""

    seconds_of: Callable[[int], float]
    chance: float
    num_rows: int
    draft_s: float = 0.01
    noise: float = 0.0
    controller: DepthController = field(default_factory=lambda: DepthController(MAX_DEPTH))
    depths: list[int] = field(default_factory=list)
    """Depth of every step."""

    def run(self, num_steps: int, *, seen_prompts: bool = False) -> list[int]:
        """Return the depths of ``num_steps`` steps of a generation."""
        rng, controller = random.Random(len(self.depths)), self.controller
        controller.begin(seen_prompts=seen_prompts)
        for _ in range(num_steps):
            depth = controller.held_depth(self.num_rows)
            if depth is None:
                depth = controller.decide(self.num_rows)
            outcomes = [DraftOutcome(depth, depth, self._num_accepted(rng, depth)) for _ in range(self.num_rows)]
            drafted = depth * self.num_rows
            noise = rng.lognormvariate(0, self.noise)
            controller.record(
                MeasuredStep(
                    controller.num_steps, self.num_rows, depth, drafted,
                    seconds=noise * self.seconds_of(self.num_rows + drafted), drafting_s=noise * self.draft_s * depth,
                    outcomes=outcomes if depth else (),
                )
            )  # fmt: skip
            self.depths.append(depth)
        return self.depths[-num_steps:]

    def speed(self, depth: int) -> float:
        """Return the expected tokens of a sample per second."""
        tokens = sum(self.chance**place for place in range(depth + 1))
        return tokens / (self.seconds_of(self.num_rows * (1 + depth)) + self.draft_s * depth)

    def _num_accepted(self, rng: random.Random, depth: int) -> int:
        return next((place for place in range(depth) if rng.random() >= self.chance), depth)


@pytest.mark.parametrize(
    ("setting", "noise"), crossed(list(product(sorted(CURVES), [1, 4, 32], [0.1, 0.6, 0.95])), [0.0, 0.05])
)
def test_the_depth_is_nearly_as_fast_as_that_of_a_brute_force_search(
    setting: tuple[str, int, float], noise: float
) -> None:
    curve, num_rows, chance = setting
    simulation = Simulation(CURVES[curve], chance, num_rows, noise=noise)
    simulation.run(1500)
    best = max(map(simulation.speed, range(MAX_DEPTH + 1)))
    depths = simulation.run(500)
    assert np.mean([simulation.speed(depth) for depth in depths]) > 0.94 * best
    usual = max(set(depths), key=depths.count)
    assert simulation.speed(usual) > 0.93 * best  # a gain below the margin is ignored


@pytest.mark.parametrize(("num_rows", "depth"), [(1, 8), (2, 4), (4, 4), (5, 2), (64, 2)])
def test_the_first_depth_after_a_few_plain_steps_depends_on_the_number_of_samples(num_rows: int, depth: int) -> None:
    assert first_depth(num_rows) == depth
    begin = int(MIN_WEIGHT) + SETTLING_STEPS
    assert Simulation(CURVES["flat"], 0.9, num_rows).run(begin + 3) == [0] * begin + [depth] * 3


@pytest.mark.parametrize("num_rows", [1, 4, 32])
def test_unpredictable_text_costs_few_probes_with_doubling_waits(num_rows: int) -> None:
    simulation = Simulation(CURVES["linear"], 0.0, num_rows)
    simulation.run(200)
    depths = simulation.run(20_000)
    begins = [step for step, (before, depth) in enumerate(pairwise(depths)) if depth and not before]
    lost = sum(1.0 - simulation.speed(depth) / simulation.speed(0) for depth in depths)
    assert sum(map(bool, depths)) <= REVIEW_STEPS * len(begins)
    assert 2 <= len(begins) <= 40
    assert lost < 0.005 * len(depths)
    waits = [later - earlier for earlier, later in pairwise(begins)]
    assert max(waits) < 1.5 * MAX_BACKOFF * waits[0]
    assert waits == sorted(waits) or max(waits) < 1.2 * min(waits)


def test_drafts_that_become_right_are_found_again() -> None:
    simulation = Simulation(CURVES["gentle"], 0.0, 4)
    assert simulation.run(2000)[-100:].count(0) >= 100 - REVIEW_STEPS
    simulation.chance = 0.95
    depths = simulation.run(2000)
    assert np.mean(depths[-500:]) > 3.0


def test_drafts_that_become_wrong_are_given_up_soon() -> None:
    simulation = Simulation(CURVES["linear"], 0.95, 4)
    assert np.mean(simulation.run(500)[-100:]) > 0
    simulation.chance = 0.0
    assert sum(map(bool, simulation.run(400)[100:])) <= 2 * REVIEW_STEPS


def test_acceptance_of_seen_prompts_is_learnt_separately() -> None:
    simulation = Simulation(CURVES["gentle"], 0.0, 4)
    simulation.run(1000)
    simulation.chance = 0.95
    assert np.mean(simulation.run(100, seen_prompts=True)[-50:]) > 3.0
    simulation.chance = 0.0
    assert sum(map(bool, simulation.run(100))) <= REVIEW_STEPS


def test_a_machine_that_slows_down_as_a_whole_changes_no_depth() -> None:
    simulation = Simulation(CURVES["gentle"], 0.8, 4)
    before = simulation.run(1000)[-200:]
    usual = max(set(before), key=before.count)
    simulation.seconds_of, simulation.draft_s = lambda tokens: 2.0 * CURVES["gentle"](tokens), 0.02
    after = simulation.run(300)
    assert after.count(usual) > 200


def test_one_step_that_is_far_too_slow_changes_no_depth() -> None:
    simulation = Simulation(CURVES["gentle"], 0.8, 4)
    before = simulation.run(1000)[-50:]
    usual = max(set(before), key=before.count)
    simulation.seconds_of = lambda tokens: 100.0
    simulation.run(1)
    simulation.seconds_of = CURVES["gentle"]
    assert simulation.run(60).count(usual) >= 45


def test_many_samples_that_end_together_get_no_deeper_drafts() -> None:
    # The last of 64 samples is far behind the mean, and further if the tokens of a step vary more.
    depths = {}
    for horizon in (40.0, float("inf")):
        simulation = Simulation(CURVES["knee"], 0.85, 64)
        simulation.run(1000)
        simulation.controller.begin(seen_prompts=False)
        depths[horizon] = simulation.controller.decide(64, horizon=horizon, may_probe=False)
    assert depths[40.0] <= depths[float("inf")]


def test_a_drafter_is_not_used_if_reading_costs_more_than_drafts_save() -> None:
    simulation = Simulation(CURVES["gentle"], 0.9, 4)
    simulation.run(500)
    controller = simulation.controller
    controller.record(MeasuredStep(controller.num_steps, 4, 4, 16, seconds=1.0, drafting_s=10.0, num_unread=100))
    controller.begin(seen_prompts=False)
    assert controller.decide(4, num_unread=100, remaining_tokens=1000.0, may_probe=False) > 0
    assert controller.decide(4, num_unread=100, remaining_tokens=5.0, may_probe=False) == 0


def test_steps_that_are_not_measured_belong_to_no_probe() -> None:
    simulation = Simulation(CURVES["linear"], 0.0, 4)
    simulation.run(200)
    controller = simulation.controller
    controller.begin(seen_prompts=False)
    for _ in range(3000):
        depth = controller.held_depth(4, may_probe=False)
        assert (controller.decide(4, may_probe=False) if depth is None else depth) == 0


@settings(max_examples=20)
@given(st.lists(st.integers(0, 4), min_size=100, max_size=150))
def test_expected_tokens_have_the_mean_and_variance_of_the_accepted_ones(accepted: list[int]) -> None:
    acceptance = AcceptanceByDepth(4)
    acceptance.learn([DraftOutcome(4, 4, own) for own in accepted], step=1)
    acceptance.estimate()
    tokens = [1 + own for own in accepted]
    assert acceptance.tokens[4] == pytest.approx(np.mean(tokens), abs=0.25)
    assert acceptance.spread[4] ** 2 == pytest.approx(np.var(tokens), abs=0.5)
    assert acceptance.drafted[4] == pytest.approx(4.0)


def test_drafts_shorter_than_allowed_count_as_rejected_after_their_end() -> None:
    acceptance = AcceptanceByDepth(4)
    for step in range(100):
        acceptance.learn([DraftOutcome(4, 2, 2), DraftOutcome(4, 0, 0)], step)
    acceptance.estimate()
    assert acceptance.tokens[4] == pytest.approx(2.0, abs=0.1)
    assert acceptance.drafted == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0], abs=0.1)


def test_a_depth_never_drafted_is_expected_to_equal_the_one_before_it() -> None:
    acceptance = AcceptanceByDepth(3)
    for step in range(1000):
        acceptance.learn([DraftOutcome(1, 1, 1)], step)
    acceptance.estimate()
    assert acceptance.tokens[3] == pytest.approx(4.0, abs=0.3)
    assert acceptance.drafted[3] == pytest.approx(3.0, abs=0.01)


def test_old_acceptance_fades_to_the_weight_of_a_few_drafts() -> None:
    acceptance = AcceptanceByDepth(1)
    for step in range(1000):
        acceptance.learn([DraftOutcome(1, 1, 0)] * 8, step)
    acceptance.learn([DraftOutcome(1, 1, 1)] * 8, 5000)
    acceptance.estimate()
    assert acceptance.tokens[1] == pytest.approx(1.0 + 8 / (8 + 16), abs=0.02)


def test_the_cost_line_fits_noisy_steps() -> None:
    line, rng = CostLine(), random.Random(0)
    for step in range(400):
        size = rng.randint(8, 64)
        line.observe(size, (2.0 + 0.1 * size) * rng.lognormvariate(0, 0.03), step)
    fixed_s, token_s = line.through(8, 2.8)
    assert fixed_s == pytest.approx(2.0, rel=0.15)
    assert token_s == pytest.approx(0.1, rel=0.15)


def test_the_cost_line_of_one_size_goes_through_the_plain_step() -> None:
    line = CostLine()
    for step in range(5):
        line.observe(20, 3.0, step)
    fixed_s, token_s = line.through(10, 2.0)
    assert fixed_s + 10 * token_s == pytest.approx(2.0)
    assert fixed_s + 30 * token_s == pytest.approx(4.0)


def test_a_slow_first_step_that_sets_up_kernels_is_ignored() -> None:
    line = CostLine()
    for step, seconds in enumerate((300.0, 3.0, 3.0)):
        line.observe(20, seconds, step)
    assert line.mean_s == pytest.approx(3.0)
