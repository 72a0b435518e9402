"""Packed forward passes equal one forward pass per sequence in values and gradients, and isolate sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.attention.packable import ATTENTION
from lightning_realloc.runtime.forward.attention.packed_attention import (
    check_segments,
    install_packed_attention,
    segment_attention,
)
from lightning_realloc.runtime.parallel.packed_forward import packed_logits, token_logprobs
from tests.models import FAMILIES, SIZES, tiny_model

# The sliding window of 4 is shorter than the longest sequence and longer than the shortest.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "mistral, sliding window": ("mistral", {"sliding_window": 4}),
    "phi3, sliding window": ("phi3", {"sliding_window": 4}),
    "qwen2, one sliding layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gpt_oss, sinks and one sliding layer": ("gpt_oss", {"sliding_window": 4}),
    "granite_swa, sinks and one sliding layer": ("granite_swa", {}),
    "gemma2, soft caps and one sliding layer": ("gemma2", {"sliding_window": 4}),
}
PROMPT_LENGTHS, RESPONSE_LENGTHS = (3, 1, 5, 2), (4, 2, 6, 1)


def _packed(columns: tuple[str, ...] = ()) -> PackedBatch:
    generator = torch.Generator().manual_seed(3)

    def draw(lengths: tuple[int, ...]) -> Ragged:
        return Ragged(torch.randint(3, 128, (sum(lengths),), generator=generator), torch.tensor(lengths))

    samples = Samples(torch.arange(4), {"prompt_ids": draw(PROMPT_LENGTHS), "response_ids": draw(RESPONSE_LENGTHS)})
    return pack(samples, columns=columns)


def _one_by_one(model: torch.nn.Module, packed: PackedBatch, temperature: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Return logits, logprobs and entropies of the tokens, one sequence per forward pass, by the plain formulas."""
    logits, logprobs, entropies = [], [], []
    for ids in torch.split(packed.input_ids[0], list(packed.lengths)):
        row = model(input_ids=ids[None], use_cache=False).logits[0]
        log_p = (row / temperature).log_softmax(-1)[:-1]
        zero = row.new_zeros(1)
        logits.append(row)
        logprobs.append(torch.cat([zero, log_p.gather(1, ids[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(log_p.exp() * log_p).sum(-1)]))
    return torch.cat(logits), torch.cat(logprobs), torch.cat(entropies)


def _model(family: str, **sizes: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=128, **sizes))


def _gradients(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_have_the_logprobs_and_gradients_of_single_ones(name: str) -> None:
    family, overrides = MODELS[name]
    model, packed = tiny_model(family, **overrides), _packed()
    weights = torch.linspace(-1, 1, packed.num_tokens)
    logits, logprobs, entropies = _one_by_one(model, packed, temperature=0.7)
    expected = _gradients(model, (weights * (logprobs + 0.3 * entropies)).sum())
    model.train()
    torch.testing.assert_close(packed_logits(model, packed), logits, atol=1e-5, rtol=1e-5)
    statistics = token_logprobs(model, packed, temperature=0.7, with_entropy=True)
    assert statistics.entropy is not None
    torch.testing.assert_close(statistics.logprobs, logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(statistics.entropy, entropies, atol=1e-5, rtol=0)
    actual = _gradients(model, (weights * (statistics.logprobs + 0.3 * statistics.entropy)).sum())
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", MODELS)
def test_a_shared_prompt_gives_the_same_results_as_one_prompt_per_response(name: str) -> None:
    family, overrides = MODELS[name]
    model = tiny_model(family, **overrides)
    results = []
    for share in (True, False):
        packed = pack(_group(), share_prompts=share)
        statistics = token_logprobs(model, packed, only_responses=True, with_entropy=True)
        assert statistics.entropy is not None
        logprobs = packed.responses(statistics.logprobs).values
        model.zero_grad()
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        results.append([logprobs.detach(), packed.responses(statistics.entropy).values.detach(), *gradients])
    for shared, apart in zip(*results, strict=True):
        torch.testing.assert_close(shared, apart, atol=2e-5, rtol=1e-4)


def test_shared_prompts_are_refused_for_a_bidirectional_model() -> None:
    model = tiny_model("llama")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    with pytest.raises(ConfigError, match="share_prompts=False"):
        token_logprobs(model, pack(_group(), share_prompts=True))


def _group() -> Samples:
    """Five responses to one prompt, two of them next to each other of equal length, then two other sequences."""
    prompts = [*[[5, 6, 7, 8, 9]] * 5, [11], [12, 13]]
    responses = [[20, 21, 22], [23], [24, 25, 26, 27, 28, 29], [36, 37, 38, 39, 40, 41], [42], [30, 31], [32, 33, 34]]
    return Samples(
        torch.arange(7), {"prompt_ids": Ragged.from_list(prompts), "response_ids": Ragged.from_list(responses)}
    )


@pytest.mark.parametrize("name", MODELS)
def test_changing_one_sequence_changes_no_bit_of_the_others(name: str) -> None:
    family, overrides = MODELS[name]
    model, packed = tiny_model(family, **overrides), _packed()
    before = packed_logits(model, packed)
    changed = packed.input_ids.clone()
    second = packed.sample_index == 1
    changed[0, second] = (changed[0, second] + 1) % 128
    packed.input_ids.copy_(changed)
    after = packed_logits(model, packed)
    assert torch.equal(before[~second], after[~second])
    assert not torch.equal(before[second], after[second])


def test_only_responses_gives_the_same_values_inside_the_mask_and_zero_outside() -> None:
    for family in ("llama", "opt"):
        model, packed = tiny_model(family), _packed()
        everywhere, responses = token_logprobs(model, packed), token_logprobs(model, packed, only_responses=True)
        expected = torch.where(packed.response_mask, everywhere.logprobs, 0.0)
        torch.testing.assert_close(responses.logprobs, expected, atol=1e-6, rtol=0)


def test_recomputed_activations_give_the_same_gradients() -> None:
    model, packed = tiny_model("llama").train(), _packed()
    expected = _gradients(model, token_logprobs(model, packed).logprobs.sum())
    model.activation_checkpointing_enable()
    actual = _gradients(model, token_logprobs(model, packed).logprobs.sum())
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def test_forward_passes_that_are_not_packed_work_as_before() -> None:
    for family in ("mistral", "gpt_oss", "gemma2"):
        model = tiny_model(family, sliding_window=4)
        ids, mask = torch.randint(3, 128, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
        mask[1, :4] = 0
        before = model(input_ids=ids, attention_mask=mask).logits
        install_packed_attention(model)
        assert model.config._attn_implementation == ATTENTION
        after = model(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(before[mask.bool()], after[mask.bool()], atol=1e-5, rtol=1e-5)
        read = model(input_ids=ids[:, :8], attention_mask=mask[:, :8], use_cache=True)
        last = model(input_ids=ids[:, 8:], attention_mask=mask, past_key_values=read.past_key_values).logits
        torch.testing.assert_close(last, before[:, 8:], atol=1e-5, rtol=1e-5)


def test_a_pack_without_predicted_tokens_still_reaches_every_parameter() -> None:
    model = tiny_model("llama")
    samples = Samples(
        torch.tensor([0]), {"prompt_ids": Ragged.from_list([[5]]), "response_ids": Ragged.from_list([[]])}
    )
    token_logprobs(model, pack(samples)).logprobs.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_models_that_cannot_keep_sequences_apart_are_refused_by_name() -> None:
    bloom = _model("bloom", n_layer=1, n_head=2, hidden_size=8)
    mamba = _model("mamba", num_hidden_layers=1, hidden_size=8, state_size=2)
    for model, rule in (
        (bloom, "BloomForCausalLM cannot run packed sequences: its attention cannot be replaced"),
        (mamba, r"MambaForCausalLM cannot run packed sequences: its layers \['linear_attention'\] may let"),
    ):
        with pytest.raises(ConfigError, match=rule):
            packed_logits(model, _packed())
    with pytest.raises(ConfigError, match="Linear is none and contains none"):
        packed_logits(torch.nn.Linear(2, 2), _packed())
    nemotron = _model("nemotron", **{name: SIZES[name] for name in SIZES if name != "vocab_size"})
    without_forward, with_forward = lambda: check_segments([nemotron]), lambda: packed_logits(nemotron, _packed())
    for check in (without_forward, with_forward):
        with pytest.raises(ConfigError, match="NemotronAttention got packed sequences without their segments"):
            check()


def test_models_of_one_class_and_configuration_are_checked_once() -> None:
    class Counting(torch.nn.SiLU):
        num_calls = 0

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            Counting.num_calls += 1
            return super().forward(features)

    models = [tiny_model("llama", num_hidden_layers=1, seed=seed) for seed in (0, 1)]
    for model in (*models, other := tiny_model("llama", num_hidden_layers=1, rms_norm_eps=1e-4)):
        model.model.layers[0].mlp.act_fn = Counting()
    check_segments(models)
    assert Counting.num_calls == 1
    check_segments([*models, other])
    assert Counting.num_calls == 3


def test_a_family_with_recurrent_layers_packs_where_a_config_has_none() -> None:
    settings = {**SIZES, "layer_types": ["full_attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0}
    config = AutoConfig.for_model("granitemoehybrid", **settings)
    model, packed = AutoModelForCausalLM.from_config(config).eval(), _packed()
    check_segments([model])
    torch.testing.assert_close(packed_logits(model, packed), _one_by_one(model, packed)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        (
            "roberta",
            {"is_decoder": True},
            "RobertaForCausalLM .* counts positions from the one after its padding",
        ),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "num_experts": 2},
            "Qwen2MoeAttention attends with a sliding window of 4 by its mask only, .* has 11 tokens",
        ),
        ("doge", {}, "DogeAttention attends with a mask of its own"),
    ],
)
def test_attention_and_positions_that_packs_would_change_are_refused(
    family: str, settings: dict[str, Any], reason: str
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **settings))
    with pytest.raises(ConfigError, match=reason):
        packed_logits(model, _packed())


def test_experts_in_float64_need_the_eager_implementation() -> None:
    model, packed = tiny_model("mixtral").double(), _packed()
    with pytest.raises(ConfigError, match=r"experts are in float64, .*set_experts_implementation\('eager'\)"):
        token_logprobs(model, packed)
    model.set_experts_implementation("eager")
    expected = _one_by_one(model, packed)[1].float()
    torch.testing.assert_close(token_logprobs(model, packed).logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_longest_sequence_are_refused(kind: str) -> None:
    factors: dict[str, Any] = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8} if kind == "longrope" else {}
    for original, matters in ((11, False), (8, True)):  # sequences of 7, 3, 11 and 3 tokens
        rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": original}
        model, packed = tiny_model("llama", rope_parameters=rope | factors), _packed()
        if matters:
            with pytest.raises(
                ConfigError, match=f"of 3 and 11 tokens in one pack: beyond 8 tokens .* its {kind} rotary"
            ):
                token_logprobs(model, packed)
        else:
            expected = _one_by_one(model, packed)[1]
            torch.testing.assert_close(token_logprobs(model, packed).logprobs, expected, atol=1e-5, rtol=0)


def test_attention_with_both_sinks_and_capped_scores_is_refused() -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"Identity attends with sinks and with scores capped at 50\.0"):
        segment_attention(torch.nn.Identity(), states, states, states, None, s_aux=torch.zeros(2), softcap=50.0)


def test_a_head_is_refused_if_it_scores_rows_and_accepted_if_it_scores_tokens() -> None:
    config, packed = tiny_model("llama").config, _packed()
    config.num_labels, config.pad_token_id = 1, 0
    with pytest.raises(ConfigError, match=r"LlamaForSequenceClassification gave \(1, 1\) for 24 tokens"):
        packed_logits(AutoModelForSequenceClassification.from_config(config), packed)
    scorer = AutoModelForTokenClassification.from_config(config).eval()
    expected = [scorer(row[None]).logits[0] for row in torch.split(packed.input_ids[0], list(packed.lengths))]
    torch.testing.assert_close(packed_logits(scorer, packed), torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mistral, sliding window", "granite_swa, sinks and one sliding layer"]
)
def test_the_cuda_kernel_agrees_with_single_sequences(name: str) -> None:
    family, overrides = MODELS[name]
    packed = _packed().to("cuda")
    reference = tiny_model(family, **overrides).cuda()
    _, expected, _ = _one_by_one(reference, packed)
    expected_gradients = _gradients(reference, expected.sum())
    model = tiny_model(family, **overrides).cuda().bfloat16()
    actual = token_logprobs(model, packed).logprobs
    # bf16 keeps 8 bits: logits of size 1 are off by up to 2^-8 a layer
    torch.testing.assert_close(actual, expected, atol=0.05, rtol=0.02)
    gradients = _gradients(model, actual.sum()).float()
    assert (gradients - expected_gradients).norm() <= 0.05 * expected_gradients.norm()
