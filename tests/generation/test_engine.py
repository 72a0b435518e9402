"""Greedy tokens equal those of Hugging Face's generate, and log-probabilities those of a full forward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import (
    Completion,
    GenerationEngine,
    HFEngine,
    SamplingParams,
    Speculation,
)
from lightning_realloc.generation.core.plain_decoding import Decoding
from tests.models import FAMILIES, SCORING_FAMILIES, SIZES, byte_tokenizer, tiny_model

GREEDY = SamplingParams(max_new_tokens=20, temperature=0)


def draw_prompts(count: int, *, vocabulary: int = 128, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 14))] for _ in range(count)]


def reference_greedy(model: PreTrainedModel, prompt: list[int], **settings: Any) -> list[int]:
    """Return the response of ``model.generate`` to one prompt on its own."""
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": 20, **settings}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **settings)
    return output[0, len(prompt) :].tolist()


def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], response: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return the response's log-probabilities by one forward over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def tokens_of(completions: list[Completion]) -> dict[int, tuple[int, ...]]:
    return {completion.sample_id: completion.token_ids for completion in completions}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in FAMILIES),
        ("mistral", {"sliding_window": 6}),
        ("phi3", {"sliding_window": 6}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
    ],
)
def test_greedy_output_is_that_of_generate_with_the_logprobs_of_a_full_forward(
    family: str, overrides: dict[str, Any]
) -> None:
    model = tiny_model(family, **overrides)
    prompts = draw_prompts(4)
    completions = GenerationEngine(model, max_slots=3).generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.token_ids) == reference_greedy(model, prompt)
        expected = reference_logprobs(model, prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", SCORING_FAMILIES)
def test_models_with_soft_caps_or_sinks_match_generate_and_a_full_forward(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(40.0)  # scores that a cap of 0.5 changes
    prompts = [[*draw_prompts(1, seed=3)[0], *range(3, 123)][:100], *draw_prompts(2)]
    settings: list[dict[str, Any]] = [
        {"max_slots": 3, "max_prefill_tokens": 30},
        {"max_cache_bytes": 400_000, "speculation": Speculation(drafter="ngram", num_draft_tokens=3)},
    ]
    for engine in (GenerationEngine(model, **some) for some in settings):
        for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert list(completion.token_ids) == reference_greedy(model, prompt)
            expected = reference_logprobs(model, prompt, completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_a_layer_may_view_the_output_of_its_attention() -> None:
    settings = {**SIZES, "head_dim": 16, "sliding_window": 6, "num_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("afmoe", **settings, moe_intermediate_size=32, num_dense_layers=1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for prompt in draw_prompts(3):
        (completion,) = GenerationEngine(model).generate([prompt], GREEDY)
        assert list(completion.token_ids) == reference_greedy(model, prompt)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_logprobs_are_those_of_a_full_forward_at_the_same_temperature(temperature: float) -> None:
    model, prompts = tiny_model("llama"), draw_prompts(5)
    params = SamplingParams(max_new_tokens=20, temperature=temperature, n=2, top_k=20, seed=5)
    for completion in GenerationEngine(model, max_slots=4).generate(prompts, params):
        expected = reference_logprobs(model, prompts[completion.prompt_index], completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_samples_do_not_depend_on_slots_order_or_other_samples() -> None:
    model, prompts = tiny_model("qwen2"), draw_prompts(9)
    params = SamplingParams(max_new_tokens=20, n=3, seed=7)
    limits = [3, 20, 9, 1, 14, 6, 20, 2, 11]
    alone = tokens_of(GenerationEngine(model, max_slots=1).generate(prompts, params, token_limits=limits))
    for slots in (4, 64):
        completions = GenerationEngine(model, max_slots=slots).generate(
            prompts, params, token_limits=limits, length_hints=limits
        )
        assert [completion.prompt_index for completion in completions] == [i // 3 for i in range(27)]
        assert tokens_of(completions) == alone
    some = GenerationEngine(model, max_slots=5).generate(
        [prompts[8], prompts[2]], params, sample_ids=[24, 25, 26, 6, 7, 8], token_limits=[11, 9]
    )
    assert tokens_of(some).items() <= alone.items()


def test_seeds_and_sample_ids_change_the_drawn_tokens() -> None:
    engine = GenerationEngine(tiny_model("llama"))
    drawn = {
        engine.generate([[5, 6]], SamplingParams(max_new_tokens=12, seed=seed, ignore_eos=True), sample_ids=[id_])[
            0
        ].token_ids
        for seed in (0, 1, -1)
        for id_ in (0, 1, 2**40)
    }
    assert len(drawn) == 9


def test_the_samples_of_a_prompt_share_one_prefill() -> None:
    engine = GenerationEngine(tiny_model("llama"), max_slots=3)
    engine.generate([[5] * 10, [6] * 8], SamplingParams(max_new_tokens=6, n=4))
    # All but the last token of each prompt, once.
    assert engine.stats.prefill_tokens == 9 + 7


def test_finished_rows_are_no_longer_computed() -> None:
    engine = GenerationEngine(tiny_model("llama"), max_slots=4)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    completions = engine.generate(draw_prompts(6), params, token_limits=[30, 2, 5, 9, 1, 17])
    assert [len(completion.token_ids) for completion in completions] == [30, 2, 5, 9, 1, 17]
    assert engine.stats.row_steps == engine.stats.generated_tokens == 64
    assert engine.stats.num_steps == 30  # as many as the longest sample needs


def test_a_call_after_a_weight_change_uses_only_the_new_weights() -> None:
    model, prompts = tiny_model("llama"), draw_prompts(5)
    engine = GenerationEngine(model, max_slots=2)
    before = engine.generate(prompts, GREEDY)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), tiny_model("llama", seed=1).parameters(), strict=True):
            parameter.copy_(other)
    engine.weights_updated()
    after = engine.generate(prompts, GREEDY)
    assert tokens_of(after) != tokens_of(before)
    for prompt, completion in zip(prompts, after, strict=True):
        assert list(completion.token_ids) == reference_greedy(model, prompt)
        expected = reference_logprobs(model, prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_the_cache_outlives_a_call_and_can_be_released() -> None:
    engine = GenerationEngine(tiny_model("llama"), max_slots=2)
    first = engine.generate(draw_prompts(3), GREEDY)
    # two layers of keys and values, two slots, heads 2 x 16, four bytes; at most 14 + 20 positions
    assert 0 < engine.stats.cache_bytes <= 2 * 2 * 2 * 34 * 32 * 4
    engine.release()
    assert tokens_of(engine.generate(draw_prompts(3), GREEDY)) == tokens_of(first)


def test_end_of_sequence_tokens_of_the_model_end_a_response_unless_ignored() -> None:
    model, prompt = tiny_model("llama"), [9, 8, 7]
    free = reference_greedy(model, prompt, eos_token_id=None)
    stop = free[4]
    length = free.index(stop) + 1
    model.generation_config.eos_token_id = [stop, 1]
    engine = GenerationEngine(model)
    (ended,) = engine.generate([prompt], GREEDY)
    assert (list(ended.token_ids), ended.finish_reason) == (free[:length], "stop")
    (ignored,) = engine.generate([prompt], SamplingParams(max_new_tokens=20, temperature=0, ignore_eos=True))
    assert (list(ignored.token_ids), ignored.finish_reason) == (free, "length")


@pytest.mark.parametrize("engine_class", [GenerationEngine, HFEngine])
def test_the_end_of_sequence_token_of_the_tokenizer_ends_a_response_too(engine_class: Any) -> None:
    model, tokenizer, prompt = tiny_model("llama"), byte_tokenizer(), [9, 8, 7]
    free = reference_greedy(model, prompt, eos_token_id=None)
    stop = free[4]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    (ended,) = engine_class(model, tokenizer=tokenizer).generate([prompt], GREEDY)
    assert (list(ended.token_ids), ended.finish_reason) == (free[: free.index(stop) + 1], "stop")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(200)  # beyond the model's 128 tokens
    least = SamplingParams(max_new_tokens=20, min_new_tokens=2, temperature=0)
    (unending,) = engine_class(model, tokenizer=tokenizer).generate([prompt], least)
    assert (list(unending.token_ids), unending.finish_reason) == (free, "length")


def test_stop_token_ids_end_a_response_after_min_new_tokens() -> None:
    model, prompt = tiny_model("llama"), [9, 8, 7]
    model.generation_config.eos_token_id = None
    free = reference_greedy(model, prompt)
    stops = tuple(set(free[1:4]))
    engine = GenerationEngine(model)
    for least in (0, 2, 6):
        params = SamplingParams(max_new_tokens=20, temperature=0, stop_token_ids=stops, min_new_tokens=least)
        (completion,) = engine.generate([prompt], params)
        expected = reference_greedy(model, prompt, eos_token_id=list(stops), min_new_tokens=least)
        assert list(completion.token_ids) == expected
        expected_logprobs = reference_logprobs(model, prompt, expected)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected_logprobs, atol=1e-5, rtol=0)


def test_a_stop_string_across_tokens_ends_a_response_at_its_last_token() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer))
    prompt = tokenizer.encode("what?")
    params = SamplingParams(max_new_tokens=30, seed=3, ignore_eos=True)
    engine = GenerationEngine(model, tokenizer=tokenizer)
    (free,) = engine.generate([prompt], params)
    text = tokenizer.decode(list(free.token_ids), skip_special_tokens=False)
    # Printable bytes only: they are one character and one token each.
    begin = next(i for i in range(5, 27) if all(31 < ord(c) < 127 for c in text[i : i + 3]) and len(text) >= 28)
    stop = text[begin : begin + 3]
    params = SamplingParams(max_new_tokens=30, seed=3, ignore_eos=True, stop_strings=("never", stop))
    (ended,) = engine.generate([prompt], params)
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: len(ended.token_ids)]
    cut = tokenizer.decode(list(ended.token_ids), skip_special_tokens=False)
    assert cut.endswith(stop) and stop not in cut[:-1]


def test_a_response_ends_at_the_end_of_the_context() -> None:
    model = tiny_model("gpt2")
    (completion,) = GenerationEngine(model).generate([[5] * 120], SamplingParams(max_new_tokens=50, ignore_eos=True))
    assert (len(completion.token_ids), completion.finish_reason) == (8, "length")
    (completion,) = GenerationEngine(model, max_length=12).generate([[5] * 9], SamplingParams(ignore_eos=True))
    assert len(completion.token_ids) == 3


def test_no_prompts_give_no_completions() -> None:
    assert GenerationEngine(tiny_model("llama")).generate([], GREEDY) == []


def test_generation_works_in_mixed_precision_and_with_bfloat16_weights() -> None:
    prompts = draw_prompts(4)
    model = tiny_model("llama")
    engine = GenerationEngine(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = engine.generate(prompts, GREEDY)
    exact = engine.generate(prompts, GREEDY)  # the same cache, now with other dtypes
    half = GenerationEngine(tiny_model("llama").to(torch.bfloat16)).generate(prompts, GREEDY)
    assert [list(completion.token_ids) for completion in exact] == [reference_greedy(model, p) for p in prompts]
    for completion in (*mixed, *half):
        expected = reference_logprobs(model, prompts[completion.prompt_index], completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=0.1, rtol=0)


class Interrupted(Exception):
    """Raised by a hook in the middle of a forward."""


@pytest.mark.parametrize("fail", [False, True])
def test_generation_restores_the_models_attention_and_modes(fail: bool) -> None:
    model = tiny_model("llama")
    model.train()
    model.model.layers[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    seen = []

    def hook(module: torch.nn.Module, *_: object) -> None:
        seen.append((module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        if fail and len(seen) > 3:
            raise Interrupted

    model.model.layers[0].register_forward_hook(hook)
    engine = GenerationEngine(model)
    if fail:
        with pytest.raises(Interrupted):
            engine.generate([[5, 6]], GREEDY)
    else:
        engine.generate([[5, 6]], GREEDY)
    assert set(seen) == {(False, False, False)}
    assert model.config._attn_implementation == "eager"
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_a_config_that_must_have_a_padding_token_keeps_it_whatever_raises() -> None:
    settings = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    settings |= {"layer_types": ["full_attention"] * 2, "cls_token_id": 1, "sep_token_id": 2}
    config = AutoConfig.for_model("modernbert-decoder", **settings)  # which refuses pad_token_id=None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    own = model.config._attn_implementation
    params = SamplingParams(max_new_tokens=4, temperature=0)
    theirs = HFEngine(model).generate([[5, 6, 7]], params)
    assert GenerationEngine(model).generate([[5, 6, 7]], params)[0].token_ids == theirs[0].token_ids
    assert (model.config._attn_implementation, model.config.pad_token_id) == (own, 0)


def test_ranks_in_lockstep_run_as_many_forwards_as_the_slowest() -> None:
    asked: list[bool] = []

    def lockstep(has_work: bool) -> bool:
        asked.append(has_work)
        return len(asked) <= 25

    model, prompts = tiny_model("llama"), draw_prompts(3)
    params = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
    engine = GenerationEngine(model, lockstep=lockstep)
    completions = engine.generate(prompts, params)
    assert engine.stats.num_steps == 25
    assert asked == [True] * 8 + [False] * 18
    assert tokens_of(completions) == tokens_of(GenerationEngine(model).generate(prompts, params))
    asked.clear()
    assert engine.generate([], params) == [] and engine.stats.num_steps == 25


def test_a_second_call_on_a_generating_model_is_refused() -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    engine = GenerationEngine(model)
    (expected,) = engine.generate([[5, 6, 7]], GREEDY)
    refused = []

    def meanwhile(_: Completion) -> None:
        for second in (engine, GenerationEngine(model)):
            with pytest.raises(GenerationError, match="LlamaForCausalLM is generated from already, by another thread"):
                second.generate([[9]], GREEDY)
            refused.append(second)
        assert GenerationEngine(other).generate([[5, 6, 7]], GREEDY) == [expected]

    engine.generate([[5], [6, 7]], GREEDY, on_finished=meanwhile)
    assert len(refused) == 4
    assert engine.generate([[5, 6, 7]], GREEDY) == [expected]


def test_weights_that_are_not_finite_are_reported_and_affect_no_later_call() -> None:
    model = tiny_model("llama")
    engine = GenerationEngine(model)
    kept = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    with pytest.raises(GenerationError, match=r"not finite for sample ids \[0, 1\] \(2 of 2 running\)"):
        engine.generate([[5, 6, 7]] * 2, GREEDY)
    assert torch.equal(kept, model.model.norm.weight)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), tiny_model("llama").parameters(), strict=True):
            parameter.copy_(other)
    assert list(engine.generate([[5, 6]], GREEDY)[0].token_ids) == reference_greedy(model, [5, 6])


def test_a_module_that_is_no_language_model_is_refused_on_construction() -> None:
    with pytest.raises(GenerationError, match="Linear cannot be generated from in process: it is no Hugging Face"):
        GenerationEngine(torch.nn.Linear(2, 2))


def test_prompts_may_be_tensors_and_settings_may_be_left_out() -> None:
    engine = GenerationEngine(tiny_model("llama"))
    expected = engine.generate([[5, 6, 7]], SamplingParams())
    assert engine.generate(torch.tensor([[5, 6, 7]])) == expected  # type: ignore[arg-type]


def test_a_sliding_window_of_zero_means_no_window() -> None:
    sizes = {**SIZES, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2_moe", **sizes)).eval()
    assert model.config.sliding_window == 0
    prompts = draw_prompts(3)
    for prompt, completion in zip(prompts, GenerationEngine(model).generate(prompts, GREEDY), strict=True):
        assert list(completion.token_ids) == reference_greedy(model, prompt)


def test_plain_generation_decodes_one_token_a_step() -> None:
    engine = GenerationEngine(tiny_model("llama"))
    assert type(engine._decoding) is Decoding
