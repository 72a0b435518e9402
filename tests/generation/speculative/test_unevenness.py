"""How uneven samples are to draft for: told from what simulated ones got, where the truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.speculative.unevenness import Unevenness, tokens_behind


def told(
    spread: float, *, num_rows: int, start: float = 0.0, generations: int = 30, steps: int = 50, num_others: int = 0
) -> float:
    """Return what is told of samples whose tokens per step beyond one have the mean 2 and this spread over samples."""
    rng, unevenness = np.random.default_rng(num_rows), Unevenness(start)
    for _ in range(generations):
        samples = [Sample(number, number, (1,), 1000, 0) for number in range(num_rows)]
        means = rng.normal(2.0, 2.0 * spread, num_rows).clip(0.0)
        for _ in range(steps):
            emitted = [[0] * (1 + got) for got in rng.poisson(means)]
            unevenness.count(samples, emitted)
            for sample, tokens in zip(samples, emitted, strict=True):
                sample.token_ids += tokens
        for sample in samples:
            sample.token_ids += [0] * num_others
        unevenness.end_generation()
    return unevenness.share


@pytest.mark.parametrize("num_rows", [4, 16, 64])
def test_samples_that_differ_are_told_from_those_that_scatter_by_chance(num_rows: int) -> None:
    shares = {spread: told(spread, num_rows=num_rows) for spread in (0.0, 0.2, 0.4)}
    assert shares[0.0] < 0.1 < shares[0.2] < 0.2 < shares[0.4] < 0.4  # a third of it is what was taken for true before


def test_what_was_taken_for_true_at_first_counts_for_a_third() -> None:
    assert told(0.1, num_rows=32, start=0.5, generations=0) == 0.5
    assert 0.3 < told(0.1, num_rows=32, start=0.5, generations=1) < 0.5
    assert told(0.1, num_rows=32, start=0.5) == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(("num_rows", "steps"), [(1, 50), (16, 3), (16, 0)])
def test_one_sample_and_few_steps_tell_nothing(num_rows: int, steps: int) -> None:
    assert told(0.4, num_rows=num_rows, start=0.25, steps=steps) == 0.25


def test_samples_that_were_hardly_drafted_for_tell_nothing() -> None:
    assert told(0.4, num_rows=16, start=0.1, steps=10, num_others=1000) == 0.1
    assert told(0.4, num_rows=16, start=0.1, steps=10, num_others=100) > 0.2


def test_where_one_of_many_samples_alone_gets_tokens_the_share_stays_bounded() -> None:
    samples, unevenness = [Sample(number, number, (1,), 1000, 0) for number in range(64)], Unevenness(0.3)
    for _ in range(20):
        unevenness.count(samples, [[0, 0], *[[0]] * 63])
    unevenness.end_generation()
    assert unevenness.share < 1.0


def test_responses_whose_every_token_stood_or_fell_are_even() -> None:
    samples = [Sample(number, number, (1,), 1000, 0) for number in range(4)]
    for num_tokens in (1, 3):
        unevenness = Unevenness(0.3)
        for _ in range(9):
            unevenness.count(samples, [range(num_tokens)] * 4)
        unevenness.end_generation()
        assert unevenness.share == pytest.approx(0.3 if num_tokens == 1 else 0.3 * (32 / 35) ** 0.5)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.2])
def test_the_last_sample_is_as_far_behind_as_it_is_simulated_to_be(num_rows: int, spread: float) -> None:
    rng, num_steps = np.random.default_rng(0), 50
    means = rng.normal(2.0, 2.0 * spread, (4000, num_rows)).clip(0.0)
    got = num_steps + rng.poisson(num_steps * means)
    behind = (got.mean() - got.min(axis=1)).mean()
    assert tokens_behind(num_rows, 3.0, 2.0, num_steps, spread) == pytest.approx(behind, rel=0.08, abs=0.5)
