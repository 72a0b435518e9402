"""Under ``batch_invariant`` nothing but a sample's own tokens changes a bit of its log-probabilities."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams, Speculation, engine_parts
from lightning_realloc.generation.forward.batch_invariant import TileGraphs, fitting_threads
from tests.devices import DEVICES
from tests.generation.forward.test_cuda_graphs import Recorder
from tests.generation.test_engine import reference_greedy, reference_logprobs
from tests.matrices import matrix
from tests.models import tiny_model

PARAMS = SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.95, seed=3, ignore_eos=True)
FAMILIES = ("llama", "qwen3", "gemma", "gemma2", "phi3", "gpt_neox", "gpt2", "opt", "minicpm3")
Bits = dict[int, tuple[tuple[int, ...], tuple[float, ...]]]
"""Sample id -> its tokens and log-probabilities."""


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 128) for _ in range(rng.randrange(1, 24))] for _ in range(count)]


def bits_of(completions: Sequence[Completion]) -> Bits:
    return {one.sample_id: (one.token_ids, one.logprobs) for one in completions}


def generate(model: PreTrainedModel, numbers: Sequence[int], params: SamplingParams = PARAMS, **settings: Any) -> Bits:
    """Return the results of the samples with these numbers, generated together."""
    engine = GenerationEngine(model, **{"batch_invariant": True, **settings})
    prompts = prompts_of(64)
    return bits_of(engine.generate([prompts[number] for number in numbers], params, sample_ids=list(numbers)))


@pytest.mark.parametrize(
    ("family", "dtype"),
    matrix(
        itertools.product(FAMILIES, [torch.bfloat16, torch.float32]),
        ("gemma2", torch.float32), ("gpt2", torch.bfloat16), ("minicpm3", torch.float32),
    ),
)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
def test_results_are_equal_to_the_bit_in_any_batch_and_with_drafts(
    family: str, dtype: torch.dtype, device: str
) -> None:
    model = tiny_model(family).to(device, dtype)
    whole = generate(model, range(64))
    for numbers in ([5], [40, 3, 21, 9, 63, 5, 0]):
        some = generate(model, numbers)
        assert some == {number: whole[number] for number in numbers}
    few_slots = {"max_slots": 3, "max_prefill_tokens": 5}
    assert generate(model, range(8), **few_slots) == {number: whole[number] for number in range(8)}
    drafts = {"speculation": Speculation(drafter="history", num_draft_tokens=3)}
    assert generate(model, range(20), **drafts) == {number: whole[number] for number in range(20)}


def test_other_forwards_round_otherwise() -> None:
    model = tiny_model("llama", hidden_size=128)
    whole, alone = (generate(model, numbers, batch_invariant=False) for numbers in (range(64), [5]))
    assert whole[5] != alone[5]


@pytest.mark.parametrize("family", [*FAMILIES, "mistral", "qwen2"])
def test_tokens_are_those_of_the_models_own_generate(family: str) -> None:
    model = tiny_model(family, sliding_window=6) if family == "mistral" else tiny_model(family)
    model = model.double()
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
    for number, (tokens, logprobs) in generate(model, range(2), greedy).items():
        prompt = prompts_of(64)[number]
        assert list(tokens) == reference_greedy(model, prompt, max_new_tokens=12)
        expected = reference_logprobs(model, prompt, tokens)
        # Norms round to float32 where values are in float64.
        torch.testing.assert_close(torch.tensor(logprobs).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", matrix(["llama", "gemma2", "gpt2"], "gemma2", "gpt2"))
def test_replayed_tiles_give_the_same_bits_by_few_graphs(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    model, long = tiny_model(family), replace(PARAMS, max_new_tokens=46)
    expected = generate(model, range(20), long)
    recorder = Recorder()
    graphs = partial(TileGraphs, make_record=lambda: recorder, device_type="cpu")
    monkeypatch.setattr(engine_parts, "TileGraphs", graphs)
    assert generate(model, range(20), long) == expected
    assert recorder.num_replayed > 100 > 20 > recorder.num_captured > 0


def test_pages_and_shared_prompts_change_no_bit() -> None:
    model = tiny_model("llama")
    prompts = [[7] * 20 + [number] for number in range(3, 9)] + [[7] * 20 + [3]]
    params = SamplingParams(max_new_tokens=30, n=2, seed=1, ignore_eos=True)
    unbounded, bounded = (
        GenerationEngine(model, batch_invariant=True, max_slots=6, max_cache_bytes=bound).generate(prompts, params)
        for bound in (None, 2 * 2 * 16 * 16 * 4 * (2 * 14 + 4))
    )
    assert bits_of(unbounded) == bits_of(bounded)


def test_samples_with_a_minimal_length_change_no_bit_of_others() -> None:
    model = tiny_model("llama")
    params = replace(PARAMS, min_new_tokens=8, stop_token_ids=(5,), ignore_eos=False, max_new_tokens=20)
    whole = generate(model, range(16), params)
    assert generate(model, range(16), params, max_slots=3) == whole
    assert generate(model, [7], params)[7] == whole[7]


@pytest.mark.parametrize("width", [4864, 11008])
def test_more_threads_than_divide_the_values_evenly_change_no_bit(width: int) -> None:
    model, threads = tiny_model("llama", intermediate_size=width), torch.get_num_threads()
    try:
        torch.set_num_threads(4 if width == 4864 else 8)
        few = replace(PARAMS, max_new_tokens=2)
        assert generate(model, range(6), few, max_slots=3) == generate(model, range(6), few)
    finally:
        torch.set_num_threads(threads)


def test_threads_divide_all_values_at_multiples_of_16() -> None:
    assert fitting_threads([4864], 16, 4) == 2  # of three threads, each would get 25,942 values
    assert fitting_threads([11008], 16, 8) == 4
    assert fitting_threads([64, 128], 16, 64) == 64  # few values are not divided
    assert fitting_threads([4864, 11008], 16, 1) == 1


def test_weights_that_are_not_finite_are_said_to_be_so() -> None:
    model = tiny_model("llama")
    for weight in model.parameters():
        torch.nn.init.constant_(weight, float("nan"))
    with pytest.raises(GenerationError, match="lower the learning rate"):
        generate(model, range(2))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_are_refused(family: str) -> None:
    with pytest.raises(GenerationError, match="multiplies as many rows as tokens choose an expert"):
        GenerationEngine(tiny_model(family), batch_invariant=True)


def test_settings_and_sizes_that_would_change_bits_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(GenerationError, match="generate in a layout with fsdp=1"):
        GenerationEngine(model, batch_invariant=True, lockstep=lambda has_work: has_work)
    with pytest.raises(GenerationError, match="leave compile='inductor' out"):
        GenerationEngine(model, batch_invariant=True, compile="inductor")
    with pytest.raises(GenerationError, match="batch_invariant='no' must be True or False"):
        GenerationEngine(model, batch_invariant="no")  # type: ignore[arg-type]
    with pytest.raises(GenerationError, match=r"multiples of 16 on CPU, .*\.gate_proj has 33; leave batch_invariant"):
        GenerationEngine(tiny_model("llama", intermediate_size=33), batch_invariant=True)


def test_kernels_that_round_by_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    usual = model.lm_head.forward

    def by_place(hidden: torch.Tensor) -> torch.Tensor:
        return usual(hidden) + 1e-6 * torch.arange(hidden.shape[1])[None, :, None]

    monkeypatch.setattr(model.lm_head, "forward", by_place)
    with pytest.raises(GenerationError, match="LlamaForCausalLM on cpu gets other bits in another place"):
        generate(model, [0])
