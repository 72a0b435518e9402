"""Tokens follow the distribution of the model; uniforms depend on seed, sample and position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.keyed_sampler import HeldTokens
from lightning_realloc.generation.core.noise import keyed_uniforms, sample_key
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.sampling import Scratch, sample_tokens, sampling_weights
from lightning_realloc.generation.core.step import Draft, decode_rows

MASK = (1 << 64) - 1


def draw(logits: torch.Tensor, count: int, params: SamplingParams) -> torch.Tensor:
    """Return how often each token was drawn, over ``count`` draws keyed by position."""
    uniforms = torch.tensor(keyed_uniforms([sample_key(params.seed, 0)] * count, range(count)), dtype=torch.float64)
    tokens, _ = sample_tokens(logits.expand(count, -1), uniforms, params)
    return torch.bincount(tokens, minlength=logits.shape[-1])


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# The last is prime: no block width divides it.
@pytest.mark.parametrize("vocabulary", [7, 96, 1024, 1031])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_draws_follow_softmax(vocabulary: int, temperature: float) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    counts = draw(logits, 20_000, SamplingParams(temperature=temperature))
    statistic = chi_square(counts, torch.softmax(logits / temperature, -1))
    # Chi-square with k degrees of freedom has mean k and variance 2k; five standard deviations, seeds are fixed.
    freedom = vocabulary - 1
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_a_uniform_picks_the_same_token_as_a_plain_running_sum() -> None:
    logits = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    running = torch.softmax(logits.double(), -1).cumsum(-1)
    expected = torch.searchsorted(running, uniforms[:, None], right=True)[:, 0]
    tokens, logprobs = sample_tokens(logits, uniforms, SamplingParams())
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0])


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("vocabulary", [5, 1024, 1031])
def test_the_extreme_uniforms_never_pick_a_token_of_probability_zero(uniform: float, vocabulary: int) -> None:
    logits = torch.full((1, vocabulary), float("-inf"))
    logits[0, vocabulary // 2] = 3.0
    for params in (SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.9)):
        tokens, logprobs = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), params)
        assert tokens.tolist() == [vocabulary // 2]
        assert logprobs.tolist() == [0.0]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_nan_logits_draw_a_valid_token_with_a_logprob_that_is_not_finite(settings: dict[str, Any]) -> None:
    logits = torch.full((2, 4099), math.nan)  # no block width divides a prime, so rows are padded
    uniforms = torch.tensor([0.0, 0.999], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, uniforms, SamplingParams(**settings))
    assert tokens.max() < 4099
    assert not logprobs.isfinite().any()


@given(seed=st.integers(-(2**63), 2**63 - 1), sample=st.integers(0, 2**62), position=st.integers(0, 10_000))
def test_uniforms_are_splitmix64_of_seed_sample_and_position(seed: int, sample: int, position: int) -> None:
    def splitmix64(state: int) -> int:
        z = state & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    key = sample_key(seed, sample)
    expected = splitmix64(key + (position + 1) * 0x9E3779B97F4A7C15) >> 11
    assert keyed_uniforms([key], [position]) == [expected / 2**53]
    assert keyed_uniforms([key] * 64, [position] * 64) == [expected / 2**53] * 64  # as an array


def test_splitmix64_gives_its_published_first_number() -> None:
    # The reference implementation seeded with 1234567 gives 6457827717110365317.
    assert keyed_uniforms([1234567], [0]) == [(6457827717110365317 >> 11) / 2**53]


def test_neighbouring_samples_and_seeds_have_uncorrelated_uniforms() -> None:
    streams = torch.tensor(
        [keyed_uniforms([sample_key(s, i)] * 4000, range(4000)) for s, i in ((0, 0), (0, 1), (1, 0))],
        dtype=torch.float64,
    )
    correlation = torch.corrcoef(streams) - torch.eye(3)
    assert correlation.abs().max() < 0.08  # five standard deviations of 1/sqrt(4000)
    assert abs(float(streams.mean()) - 0.5) < 0.02


def test_top_k_draws_exactly_the_k_most_likely() -> None:
    logits = torch.arange(40.0) / 8
    counts = draw(logits, 4000, SamplingParams(top_k=5))
    assert counts.nonzero().flatten().tolist() == [35, 36, 37, 38, 39]
    assert chi_square(counts[35:], torch.softmax(logits[35:], -1)) < 20  # 4 degrees of freedom, p = 0.0005


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.49, [0]), (0.51, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_draws_the_fewest_tokens_that_reach_it(top_p: float, kept: list[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.125, 0.075]).log()
    counts = draw(logits, 2000, SamplingParams(top_p=top_p))
    assert counts.nonzero().flatten().tolist() == kept


def test_top_p_counts_probability_after_top_k() -> None:
    # Among the first two, token 0 has 0.5 / 0.8 = 0.625: enough for 0.6, though it has only 0.5 of everything.
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    counts = draw(logits, 500, SamplingParams(top_k=2, top_p=0.6))
    assert counts.tolist() == [500, 0, 0]


@pytest.mark.parametrize(
    "settings",
    [
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "temperature": 0.7},
        {"min_p": 0.1, "top_k": 12, "top_p": 0.8, "temperature": 1.4, "repetition_penalty": 1.3},
    ],
)
def test_the_distribution_of_draws_is_that_of_transformers_processors(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    logits = 3 * torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    held = torch.tensor([[5, 9, 5, 0], [39, 1, 2, 3], [7, 7, 7, 7]])
    processors: list[Any] = [RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
                             TemperatureLogitsWarper(params.temperature), TopKLogitsWarper(params.top_k or 40),
                             TopPLogitsWarper(params.top_p), MinPLogitsWarper(params.min_p)]  # fmt: skip
    expected = torch.softmax(LogitsProcessorList(processors)(held, logits.clone()), -1)
    repeated = (torch.arange(3).repeat_interleave(4), held.flatten())
    weights = sampling_weights(logits, params, repeated=repeated)
    torch.testing.assert_close(weights, expected)
    uniforms = torch.tensor(keyed_uniforms([sample_key(0, 0)] * 3, range(3)), dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, uniforms, params, repeated=repeated)
    assert bool((expected.gather(1, tokens[:, None]) > 0).all())
    reported = torch.log_softmax(logits / params.temperature, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, reported)


def test_held_tokens_include_earlier_drafted_and_appended_tokens() -> None:
    samples = [Sample(0, 0, ModelInput((5, 5, 3)), 8, key=1), Sample(1, 0, ModelInput((2,)), 8, key=2)]
    held, params = HeldTokens(), SamplingParams(repetition_penalty=2.0)

    def of_rows(*drafts: list[int]) -> list[set[int]]:
        rows, tokens = held.of_rows(decode_rows(samples, list(map(Draft, drafts)), params), torch.device("cpu"))
        return [set(tokens[rows == row].tolist()) for row in range(int(rows.max()) + 1)]

    assert of_rows([7, 8], []) == [{3, 5}, {3, 5, 7}, {3, 5, 7, 8}, {2}]
    samples[0].append(7, 0.0)
    samples[1].extend(ModelInput((9, 2)))
    assert of_rows([], [4]) == [{3, 5, 7}, {2, 9}, {2, 4, 9}]


def test_logprobs_are_of_the_whole_tempered_distribution_despite_top_k_and_top_p() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9)
    tokens, logprobs = sample_tokens(logits, torch.rand(6, dtype=torch.float64), params)
    torch.testing.assert_close(logprobs, torch.log_softmax(logits / 0.5, -1).gather(1, tokens[:, None])[:, 0])


def test_forbidden_tokens_are_not_drawn_in_their_rows_only() -> None:
    logits = torch.tensor([[0.0, 9.0, 5.0]] * 2)
    for temperature in (0.0, 0.01):
        params = SamplingParams(temperature=temperature)
        tokens, _ = sample_tokens(logits, torch.full((2,), 0.5, dtype=torch.float64), params, forbidden=([1], [1]))
        assert tokens.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be a whole number"),
        ({"top_k": 2.5}, "top_k=2.5 must be a whole number or None"),
        ({"seed": None}, "seed=None must be a whole number"),
        ({"seed": 1 << 64}, r"seed=18446744073709551616 must lie between -2\*\*63 and 2\*\*64 - 1"),
        ({"n": True}, "n=True must be a whole number"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
        ({"temperature": 1e-40}, "temperature=1e-40 is so small that logits over it leave float32; use 0"),
        ({"temperature": "1"}, "temperature='1' must be a number"),
        ({"top_p": None}, "top_p=None must be a number"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 must lie between 0 and max_new_tokens=8"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0 must be at least 1; use None"),
        ({"top_p": 0.0}, "top_p=0.0 must lie in"),
        ({"min_p": 1.5}, r"min_p=1.5 must lie in \[0, 1\]; use 0 for no limit"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be finite and above 0; use 1 for none"),
        ({"repetition_penalty": None}, "repetition_penalty=None must be a number"),
        ({"n": 0}, "n=0"),
        ({"stop_strings": ("",)}, "empty string"),
        ({"stop_strings": "ab"}, r"stop_strings='ab' must be a tuple of strings; write \('ab',\)"),
        ({"stop_strings": None}, r"stop_strings=None must be a tuple of strings; use \(\) for none"),
        ({"stop_strings": ("a", "b\ud800")}, r"stop_strings \['b\\ud800'\] can never occur: they hold halves"),
        ({"stop_strings": ("a", 5)}, r"stop_strings=\('a', 5\) must be a tuple of strings"),
        ({"stop_token_ids": 2}, r"stop_token_ids=2 must be a tuple of ints; write \(2,\)"),
        ({"stop_token_ids": ("a",)}, r"stop_token_ids=\('a',\) must be a tuple of ints"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_lists_of_stops_count_as_tuples() -> None:
    params = SamplingParams(stop_strings=["a", "b"], stop_token_ids=[2])  # type: ignore[arg-type]
    assert params == SamplingParams(stop_strings=("a", "b"), stop_token_ids=(2,))
    assert hash(params) == hash(SamplingParams(stop_strings=("a", "b"), stop_token_ids=(2,)))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}, {"temperature": 0.0}])
@pytest.mark.parametrize("forbidden", [None, ([1], [3])])
def test_reused_memory_changes_neither_tokens_nor_logits(
    settings: dict[str, Any], forbidden: tuple[list[int], list[int]] | None
) -> None:
    params, scratch, generator = SamplingParams(**settings), Scratch(), torch.Generator().manual_seed(0)
    for num_rows, dtype in ((5, torch.float32), (2, torch.bfloat16), (9, torch.float32), (3, torch.float32)):
        logits = torch.randn(num_rows, 700, generator=generator).to(dtype)
        uniforms = torch.rand(num_rows, dtype=torch.float64, generator=generator)
        before = logits.clone()
        made = sample_tokens(logits, uniforms, params, forbidden=forbidden, scratch=scratch)
        assert torch.equal(logits, before)
        assert all(map(torch.equal, made, sample_tokens(before, uniforms, params, forbidden=forbidden)))


def test_memory_is_allocated_once_for_steps_that_do_not_grow() -> None:
    scratch = Scratch()
    first = scratch.take("some", torch.empty(4, 10)).data_ptr()
    assert scratch.take("some", torch.empty(3, 10)).data_ptr() == first
    assert scratch.take("other", torch.empty(4, 10)).data_ptr() != first
