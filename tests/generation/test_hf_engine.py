"""HFEngine equals the native engine in greedy tokens, log-probabilities and ends; its draws follow the distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
)

from lightning_realloc.errors import ConfigError, GenerationError
from lightning_realloc.generation import Completion, GenerationEngine, HFEngine, SamplingParams
from tests.generation.test_engine import draw_prompts
from tests.models import SIZES, byte_tokenizer, tiny_model


def test_greedy_completions_equal_those_of_the_native_engine() -> None:
    prompts, limits = draw_prompts(7), [5, 20, 1, 9, 20, 3, 12]
    for family in ("llama", "qwen2", "gpt2"):
        model = tiny_model(family)
        for params in (
            SamplingParams(max_new_tokens=20, temperature=0, n=2),
            SamplingParams(max_new_tokens=20, temperature=0, repetition_penalty=1.3),
            SamplingParams(max_new_tokens=20, temperature=0, stop_token_ids=tuple(range(60)), min_new_tokens=3),
        ):
            ours = GenerationEngine(model, max_slots=4).generate(prompts, params, token_limits=limits)
            theirs = HFEngine(model, max_slots=4).generate(prompts, params, token_limits=limits, length_hints=limits)
            for native, own in zip(ours, theirs, strict=True):
                assert without_logprobs(own) == without_logprobs(native)
                torch.testing.assert_close(torch.tensor(own.logprobs), torch.tensor(native.logprobs), atol=1e-5, rtol=0)


def without_logprobs(completion: Completion) -> tuple[object, ...]:
    """Return the fields that are exactly equal in both engines."""
    return completion.sample_id, completion.prompt_index, completion.token_ids, completion.finish_reason


def test_stop_strings_end_each_row_of_a_batch_on_its_own() -> None:
    model, tokenizer = tiny_model("llama", vocab_size=259), byte_tokenizer()
    params = SamplingParams(max_new_tokens=30, temperature=0, stop_strings=("a", "7", "Q"))
    prompts = draw_prompts(6)
    ours = GenerationEngine(model, tokenizer=tokenizer).generate(prompts, params)
    theirs = HFEngine(model, tokenizer=tokenizer).generate(prompts, params)
    assert [c.token_ids for c in theirs] == [c.token_ids for c in ours]


def test_no_row_of_a_batch_exceeds_the_context_while_others_continue() -> None:
    model = tiny_model("gpt2", n_positions=32)  # it has 32 learnt positions
    params = SamplingParams(max_new_tokens=100, temperature=0, ignore_eos=True)
    prompts = [list(range(3, 23)), [5], [7, 8]]
    ours = GenerationEngine(model).generate(prompts, params)
    theirs = HFEngine(model).generate(prompts, params)
    assert [len(completion.token_ids) for completion in theirs] == [12, 31, 30]
    assert [c.token_ids for c in theirs] == [c.token_ids for c in ours]


class ReadsPadding(LlamaForCausalLM):
    """A model that ignores the attention mask, as Reformer does."""

    def forward(self, *args: Any, attention_mask: Any = None, **settings: Any) -> Any:
        return super().forward(*args, **settings)


class ReadsCachedPadding(LlamaForCausalLM):
    """A model that ignores the mask once it has read the prompt, as MiniMax does."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **settings: Any) -> Any:
        is_prompt = input_ids.shape[1] > 1
        return super().forward(input_ids, attention_mask=attention_mask if is_prompt else None, **settings)


@pytest.mark.parametrize("kind", [ReadsPadding, ReadsCachedPadding])
def test_prompts_of_unequal_lengths_share_no_batch_if_the_model_ignores_the_mask(
    kind: type[LlamaForCausalLM], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    reads_padding = kind(model.config).eval()
    reads_padding.load_state_dict(model.state_dict())
    prompts, params = draw_prompts(6), SamplingParams(max_new_tokens=8, temperature=0, n=2)
    expected = HFEngine(model).generate(prompts, params)
    assert not caplog.records
    completions = HFEngine(reads_padding).generate(prompts, params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert f"{kind.__name__} may predict other tokens after a padded prompt" in caplog.text


def test_models_in_float64_which_have_no_softmax_over_padding_read_none() -> None:
    model, params = tiny_model("llama").double(), SamplingParams(max_new_tokens=8, temperature=0)
    prompts = draw_prompts(6)
    ours, theirs = GenerationEngine(model).generate(prompts, params), HFEngine(model).generate(prompts, params)
    assert [c.token_ids for c in theirs] == [c.token_ids for c in ours]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama4_text", {"attention_chunk_size": 8, "num_local_experts": 2, "layer_types": ["chunked_attention"] * 2}),
        ("deepseek_v32", {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "q_lora_rank": 16,
                          "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                          "num_key_value_heads": 4, "mlp_layer_types": ["dense"] * 2}),
    ],
)  # fmt: skip
def test_layers_that_attend_to_blocks_or_to_some_tokens_read_no_padding(family: str, settings: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **{**SIZES, "attn_implementation": "eager", **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)  # fresh weights make nearly uniform attention
    prompts, params = [[5, 6, 7], list(range(3, 14))], SamplingParams(max_new_tokens=20, temperature=0, ignore_eos=True)
    alone = [HFEngine(model).generate([prompt], params)[0].token_ids for prompt in prompts]
    assert [completion.token_ids for completion in HFEngine(model).generate(prompts, params)] == alone


def test_draws_follow_the_models_distribution_and_the_seed() -> None:
    model = tiny_model("llama")
    engine = HFEngine(model, max_slots=500)
    params = SamplingParams(
        max_new_tokens=1, n=1000, temperature=1.3, top_k=6, min_p=0.01, repetition_penalty=1.2, ignore_eos=True
    )
    drawn = torch.tensor([completion.token_ids[0] for completion in engine.generate([[5, 9, 17]], params)])
    with torch.no_grad():
        ids = torch.tensor([[5, 9, 17]])
        logits = RepetitionPenaltyLogitsProcessor(1.2)(ids, model(ids).logits[:, -1])[0] / 1.3
    values, tokens = logits.topk(6)
    counts = (drawn[:, None] == tokens).sum(0).double()
    assert int(counts.sum()) == 1000
    expected = 1000 * torch.softmax(values.double(), -1)
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5  # 5 degrees of freedom, p = 0.001
    few = SamplingParams(max_new_tokens=8, seed=3)
    first, second, other = (
        engine.generate([[5, 9]], params, sample_ids=[7])[0].token_ids
        for params in (few, few, SamplingParams(max_new_tokens=8, seed=4))
    )
    assert first == second != other


def test_generation_changes_neither_modes_nor_the_global_random_state() -> None:
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    state = torch.get_rng_state()
    HFEngine(model).generate([[5, 9]], SamplingParams(max_new_tokens=4))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.model.layers[0].training


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_reported(temperature: float) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    message = r"not finite for (some of the 2 )?sample ids \[0, 1\].*diverged or overflow"
    with pytest.raises(GenerationError, match=message):
        HFEngine(model).generate([[5, 6], [7]], SamplingParams(max_new_tokens=3, temperature=temperature))


def test_invalid_models_slots_and_prompts_are_refused() -> None:
    with pytest.raises(GenerationError, match=r"Linear has no generate\(\) of its own"):
        HFEngine(torch.nn.Linear(2, 2))
    with pytest.raises(GenerationError, match="max_slots=0 must be at least 1"):
        HFEngine(tiny_model("llama"), max_slots=0)
    with pytest.raises(GenerationError, match="prompt 0 is empty"):
        HFEngine(tiny_model("llama")).generate([[]])


def test_arguments_of_the_native_engine_only_are_refused_by_name() -> None:
    model, params = tiny_model("llama"), SamplingParams(max_new_tokens=2)
    with pytest.raises(ConfigError, match=r"HFEngine has no setting max_cache_bytes; .* GenerationEngine\(max_"):
        HFEngine(model, max_cache_bytes=10**6)
    for name, value in (("on_tokens", print), ("token_budget", 5), ("resume", [object()])):
        with pytest.raises(GenerationError, match=f"{name} needs an engine that .* engine='hf' does not; leave it out"):
            HFEngine(model).generate([[5]], params, **{name: value})
    assert len(HFEngine(model).generate([[5]], params, environment=None, resume=[])) == 1
    with pytest.raises(TypeError, match="unexpected keyword argument 'enviroment'"):
        HFEngine(model).generate([[5]], params, enviroment=print)


def test_stop_strings_that_no_token_can_spell_are_refused() -> None:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(("yes", "no", "<unk>"))}, "<unk>"))
    engine = HFEngine(tiny_model("llama"), tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"))
    with pytest.raises(GenerationError, match=r"stop_strings \['End'\] can never occur: no token .* holds"):
        engine.generate([[1]], SamplingParams(stop_strings=("End",)))
