"""Top-p keeps and draws the same tokens as a naive loop over the sorted vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, TopPLogitsWarper

from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sampling import sample_tokens, sampling_weights
from lightning_realloc.generation.core.step import Forbidden

KINDS = ("random", "flat", "nearly flat", "peaked", "tied", "mostly impossible", "bfloat16")


def make_logits(kind: str, num_rows: int, vocabulary: int, seed: int) -> Tensor:
    """Return rows of logits of one kind."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_rows, vocabulary, generator=generator)
    if kind == "flat":
        return torch.zeros_like(noise)
    if kind == "tied":
        return noise.round()
    if kind == "mostly impossible":
        noise[:, 1:] = noise[:, 1:].masked_fill(noise[:, 1:].abs() > 0.3, float("-inf"))
        return noise
    if kind == "bfloat16":
        return noise.bfloat16()
    return noise * {"random": 1.0, "nearly flat": 0.01, "peaked": 8.0}[kind]


def kept_by_sorting(weights: Tensor, params: SamplingParams) -> list[int]:
    """Return the tokens that a row can draw, most likely first; equally likely ones in order of the vocabulary."""
    mass_of = weights.tolist()
    order = sorted(range(len(mass_of)), key=lambda token: (-mass_of[token], token))
    if params.top_k is not None and params.top_k < len(order):
        order = weights.topk(params.top_k).indices.tolist()
    total = sum(mass_of[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if params.top_p < 1.0 and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += mass_of[token]
    least = float(params.min_p * weights.max())
    return [token for token in kept if mass_of[token] >= least]


def drawn_by_sorting(weights: Tensor, kept: list[int], uniform: float) -> int:
    """Return the first kept token at which the running sum exceeds ``uniform`` times the total weight."""
    point, mass = uniform * sum(float(weights[token]) for token in kept), 0.0
    for token in sorted(kept):
        mass += float(weights[token])
        if mass > point:
            return token
    raise AssertionError("no uniform below 1 leads beyond all tokens")


def check(logits: Tensor, params: SamplingParams, uniforms: Tensor, forbidden: Forbidden | None = None) -> None:
    """Compare kept and drawn tokens with those of sorting each row."""
    weights = sampling_weights(logits, replace(params, top_k=None, top_p=1.0, min_p=0.0), forbidden=forbidden)
    law = sampling_weights(logits, params, forbidden=forbidden)
    tokens, _ = sample_tokens(logits, uniforms, params, forbidden=forbidden)
    for row, own in enumerate(weights):
        kept = kept_by_sorting(own, params)
        expected = torch.zeros_like(own).index_copy(0, torch.tensor(kept), own[kept])
        assert law[row].nonzero().flatten().tolist() == expected.nonzero().flatten().tolist()
        torch.testing.assert_close(law[row], expected / expected.sum())
        assert int(tokens[row]) == drawn_by_sorting(own, kept, float(uniforms[row]))


@settings(deadline=None, max_examples=120)
@given(
    kind=st.sampled_from(KINDS),
    vocabulary=st.sampled_from([1, 2, 37, 600]),
    seed=st.integers(0, 1000),
    top_p=st.sampled_from([1e-6, 0.25, 0.5, 0.9, 0.95, 0.9999999]) | st.floats(0.01, 0.99),
    top_k=st.sampled_from([None, None, 1, 30, 600]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    temperature=st.sampled_from([1.0, 0.6]),
    forbids=st.booleans(),
)
def test_kept_and_drawn_tokens_equal_those_of_sorting(
    kind: str, vocabulary: int, seed: int, top_p: float, top_k: int | None, min_p: float, temperature: float,
    forbids: bool,
) -> None:  # fmt: skip
    logits = make_logits(kind, 3, vocabulary, seed)
    params = SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p, temperature=temperature)
    uniforms = torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    forbidden = ([0, 2], [1, vocabulary // 2]) if forbids and vocabulary > 2 and kind != "mostly impossible" else None
    check(logits, params, uniforms, forbidden)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
@pytest.mark.parametrize("kind", KINDS)
def test_large_vocabularies_are_cut_like_small_ones(kind: str, uniform: float) -> None:
    check(make_logits(kind, 2, 20_011, 7), SamplingParams(top_p=0.9), torch.full((2,), uniform, dtype=torch.float64))


def test_the_first_of_equally_likely_tokens_are_kept() -> None:
    # 8 tokens of 1/8 each: the mass before the fifth is 0.5, which reaches top_p.
    weights = sampling_weights(torch.zeros(1, 8), SamplingParams(top_p=0.5))
    assert weights.tolist() == [[0.25] * 4 + [0.0] * 4]
    # 0.5 and four of 0.125: the mass before them is 0.5, 0.625, 0.75, 0.875.
    logits = torch.tensor([[0.125, 0.125, 0.5, 0.125, 0.125]]).log()
    assert sampling_weights(logits, SamplingParams(top_p=0.7)).nonzero()[:, 1].tolist() == [0, 1, 2]


def test_a_rows_draw_does_not_depend_on_other_rows() -> None:
    logits = torch.cat([make_logits(kind, 1, 3000, 3).float() for kind in KINDS])
    uniforms = torch.rand(len(KINDS), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(top_p=0.8)
    together, _ = sample_tokens(logits, uniforms, params)
    alone = [int(sample_tokens(logits[row, None], uniforms[row, None], params)[0]) for row in range(len(KINDS))]
    assert together.tolist() == alone


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.95])
@pytest.mark.parametrize("kind", ["random", "nearly flat", "peaked"])
def test_kept_tokens_equal_those_of_transformers(kind: str, top_p: float) -> None:
    logits = make_logits(kind, 3, 2000, 1)
    theirs = LogitsProcessorList([TopPLogitsWarper(top_p)])(torch.zeros(3, 1, dtype=torch.int64), logits.clone())
    torch.testing.assert_close(sampling_weights(logits, SamplingParams(top_p=top_p)), theirs.softmax(-1))


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 200}, {"top_k": 300, "top_p": 0.8}, {"min_p": 0.01}])
def test_rounding_that_changes_ranks_changes_few_drawn_tokens(settings: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 0.4 * torch.randn(400, 2000, generator=generator)  # flat: neighbours in rank are 5e-4 apart
    uniforms = torch.rand(400, dtype=torch.float64, generator=generator)
    params = SamplingParams(**settings)
    tokens, _ = sample_tokens(logits, uniforms, params)
    rounded = logits + 1e-4 * torch.randn(logits.shape, generator=generator)
    others, _ = sample_tokens(rounded, uniforms, params)
    num_moved = int((logits.argsort(dim=-1) != rounded.argsort(dim=-1)).sum())
    assert num_moved > 0.1 * logits.numel()
    assert int((tokens != others).sum()) <= 12  # of 400


def test_a_row_of_nan_has_a_log_probability_of_nan() -> None:
    logits = torch.zeros(2, 50)
    logits[0, 3] = float("nan")
    tokens, logprobs = sample_tokens(logits, torch.full((2,), 0.5, dtype=torch.float64), SamplingParams(top_p=0.9))
    assert 0 <= int(tokens[0]) < 50 and bool(logprobs[0].isnan())
    assert int(tokens[1]) == 22  # 45 of 50 are kept; the middle of their mass is in the 23rd
