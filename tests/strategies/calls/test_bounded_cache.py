"""Generation with a bounded cache gives the same iteration as without a bound."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_realloc import GenerationOptions
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import SamplingParams
from tests.strategies import runs
from tests.strategies.calls.test_speculation import run_settings
from tests.workers import WorkerFailure, WorkerPool

SAMPLING = SamplingParams(n=4, max_new_tokens=40)


def run(workers: WorkerPool, layout: str, max_cache_bytes: int | None) -> runs.Outcome:
    """Return the outcome of two iterations on two ranks."""
    settings: dict[str, Any] = {"generation": GenerationOptions(max_cache_bytes=max_cache_bytes), "sampling": SAMPLING}
    outcome: runs.Outcome = workers.run(run_settings, layout, settings, world_size=2, init_process_group=False)[0]
    return outcome


@pytest.mark.exhaustive  # tokens: tests/generation/test_paged_engine.py
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_iterations_give_the_same_results_with_a_bound_on_the_cache(workers: WorkerPool, layout: str) -> None:
    plain, bounded = (run(workers, layout, bound) for bound in (None, 70_000))
    assert bounded.tokens == plain.tokens
    assert bounded.rewards == plain.rewards
    # Products of other shapes round differently; near a gradient of 0 Adam enlarges that to a part of its step of 1e-2.
    assert runs.largest_difference(bounded.weights, plain.weights) < 1e-3
    assert runs.mean_difference(bounded.weights, plain.weights) < 1e-7
    assert all("preemptions/actor.generate" not in step for step in plain.logged)
    assert all("preemptions/actor.generate" in step for step in bounded.logged)


@pytest.mark.exhaustive  # on one rank: tests/generation/test_paged_engine.py
def test_preemptions_are_counted_over_all_ranks(workers: WorkerPool) -> None:
    # Six samples of up to 68 tokens on each rank grow by up to five pages; the bound reserves two pages for each.
    sampling = SamplingParams(n=2, max_new_tokens=60, ignore_eos=True)
    settings: dict[str, Any] = {"generation": GenerationOptions(max_cache_bytes=100_000), "sampling": sampling}
    everyone = workers.run(run_settings, "dp2", settings, world_size=2, init_process_group=False)
    counts = [[step["preemptions/actor.generate"] for step in outcome.logged] for outcome in everyone]
    assert counts[0] == counts[1] and min(counts[0]) >= 1


def test_a_bound_below_one_sample_ends_the_run_on_every_rank(workers: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="max_cache_bytes=1000 must hold the longest sample of a call"):
        run(workers, "fsdp2", 1000)


def test_a_bound_on_the_cache_needs_the_native_engine() -> None:
    with pytest.raises(ConfigError, match="bounds the bytes of its cache, and engine='hf' does not"):
        runs.grpo(engine="hf", generation=GenerationOptions(max_cache_bytes=10**6))
