"""Generation keeps latents in its cache, and attends to them as the model does to all heads' keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from lightning_realloc.generation import GenerationEngine, SamplingParams, Speculation
from lightning_realloc.generation.cache.kv_cache import Places, SlotCache
from lightning_realloc.generation.forward.attention import attention_given_back, slot_attention
from lightning_realloc.generation.forward.latents import (
    LatentPlaces,
    heads_of,
    latent_modules,
    latents_kept,
    weight_of,
)
from lightning_realloc.generation.forward.packed_linear import packed_linears
from tests.generation.test_engine import draw_prompts, reference_greedy, reference_logprobs
from tests.models import tiny_model

GREEDY = SamplingParams(max_new_tokens=9, temperature=0)
RANK, ROTARY, PLAIN, VALUE, HEADS = 16, 8, 16, 16, 4


def attention_of(model: PreTrainedModel) -> Any:
    return latent_modules(model)[-1]


def with_adapters(model: PreTrainedModel) -> Any:
    adapters = LoraConfig(r=4, target_modules=["kv_b_proj"], init_lora_weights=False)
    return get_peft_model(model, adapters).eval()


def test_the_absorbed_form_is_the_expanded_one() -> None:
    attention = attention_of(tiny_model("deepseek_v3").double())
    torch.manual_seed(0)
    queries = torch.randn(3, HEADS, PLAIN + ROTARY, dtype=torch.float64)
    latents, rotary = (torch.randn(1, 1, 7, width, dtype=torch.float64) for width in (RANK, ROTARY))
    keys, values = (part[0] for part in attention.expand_kv(latents, rotary))  # (H, 7, D)
    weights = torch.softmax(queries.transpose(0, 1) @ keys.mT, -1)
    expected = (weights @ values).transpose(0, 1)
    with latents_kept(attention):
        key, value = attention.expand_kv(latents, rotary)
        assert key.shape == value.shape == (1, 1, 7, RANK + ROTARY)
        heads = heads_of(attention, key)
    absorbed = heads.absorb(queries)  # (3, H, rank + rotary)
    shared = torch.softmax(absorbed @ key[0, 0].mT, -1) @ value[0, 0]
    torch.testing.assert_close(heads.project(shared), expected)
    expanded = heads.expand(*(part[0].transpose(0, 1) for part in (key, value)))
    assert all(part.transpose(0, 1).equal(own) for part, own in zip(expanded, (keys, values), strict=True))


def test_autocast_rounds_latents_as_the_expansion_would() -> None:
    attention = attention_of(tiny_model("deepseek_v3"))
    latents, rotary = torch.randn(1, 1, 7, RANK), torch.randn(1, 1, 7, ROTARY)
    with torch.autocast("cpu", torch.bfloat16):
        keys, _ = attention.expand_kv(latents, rotary)
        with latents_kept(attention):
            kept, _ = attention.expand_kv(latents, rotary)
    assert kept.dtype == keys.dtype == torch.bfloat16


def test_layers_that_are_more_than_a_product_show_their_weight_by_unit_vectors() -> None:
    model = with_adapters(tiny_model("deepseek_v3").double())
    adapted = attention_of(model).kv_b_proj
    delta = adapted.get_delta_weight("default")
    torch.testing.assert_close(weight_of(adapted, torch.empty(0, RANK).double()), adapted.base_layer.weight + delta)
    assert weight_of(adapted.base_layer, torch.empty(0, RANK)) is adapted.base_layer.weight
    hooked = nn.Linear(3, 5, bias=False)
    hooked.register_forward_hook(lambda layer, given, output: 2 * output)
    torch.testing.assert_close(weight_of(hooked, torch.empty(0, 3)), 2 * hooked.weight)


class ExpandsInForward(nn.Module):
    """Attention that passes keys and values of all heads on."""

    kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim = RANK, ROTARY, PLAIN, VALUE

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(RANK, HEADS * (PLAIN + VALUE), bias=False)


def test_modules_without_an_absorbed_form_expand_their_latents() -> None:
    assert latent_modules(ExpandsInForward()) == [] == latent_modules(tiny_model("llama"))
    model = tiny_model("deepseek_v3")
    first, second = latent_modules(model)
    first.kv_b_proj = nn.Linear(RANK, HEADS * (PLAIN + VALUE), bias=True)
    assert latent_modules(model) == [second]
    (prompt,) = draw_prompts(1)
    (completion,) = GenerationEngine(model).generate([prompt], GREEDY)
    assert list(completion.token_ids) == reference_greedy(model, prompt, max_new_tokens=9)


def test_latents_are_given_back_between_steps_and_at_the_end() -> None:
    model = tiny_model("deepseek_v3")
    attention: DeepseekV3Attention = attention_of(model)
    expands = attention.expand_kv
    with slot_attention(model):
        keeps = attention.expand_kv
        with attention_given_back(model):
            assert attention.expand_kv == expands
            with slot_attention(model):
                assert attention.expand_kv == keeps != expands
            assert attention.expand_kv == expands
        assert attention.expand_kv == keeps
    assert attention.expand_kv == expands


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "long prompts in parts": {"max_slots": 3, "max_prefill_tokens": 5},
    "pages": {"max_cache_bytes": 60_000, "max_prefill_tokens": 9},
    "drafts from the text": {"speculation": Speculation(drafter="ngram", num_draft_tokens=3)},
    "drafts from the first block": {"speculation": Speculation(drafter="blocks", draft_blocks=1, num_draft_tokens=3)},
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [("deepseek_v3", "long prompts in parts"), ("deepseek_v2", "pages"), ("minicpm3", "drafts from the text"),
     ("deepseek_v3", "drafts from the first block")],
)  # fmt: skip
def test_greedy_tokens_are_those_of_generate(family: str, settings: str) -> None:
    model, prompts = tiny_model(family), draw_prompts(3)
    made = GenerationEngine(model, **SETTINGS[settings]).generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, made, strict=True):
        assert list(completion.token_ids) == reference_greedy(model, prompt, max_new_tokens=9)
        expected = reference_logprobs(model, prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_adapters_of_the_absorbed_projection_count() -> None:
    model, prompts = with_adapters(tiny_model("deepseek_v3")), draw_prompts(2)
    made = GenerationEngine(model).generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, made, strict=True):
        assert list(completion.token_ids) == reference_greedy(model, prompt, max_new_tokens=9)
    with model.disable_adapter():
        (base,) = GenerationEngine(model).generate(prompts[:1], GREEDY)
    assert base.logprobs != made[0].logprobs


def test_a_token_takes_the_bytes_of_latents_and_rotary_features() -> None:
    model = tiny_model("minicpm3")
    engine = GenerationEngine(model, max_slots=2)
    engine.generate([[5] * 8] * 2, SamplingParams(max_new_tokens=40, ignore_eos=True))
    cache = engine._cache
    assert isinstance(cache, SlotCache)
    per_token = 2 * (16 + 16) * 4  # layers, latents and rotary features, bytes of float32
    assert engine.stats.cache_bytes == 2 * cache.capacity * per_token


def test_latents_move_from_one_cache_to_another() -> None:
    ours, theirs, tokens = SlotCache(), SlotCache(), torch.arange(5)
    ours.make_room(2, 8, longest=8)
    theirs.make_room(3, 8, longest=8)
    keys = torch.randn(5, 1, RANK + ROTARY)
    LatentPlaces(ours.places(Places((), 0, tokens // 5 + 1, tokens, 5, [5] * 5, 5))).store(0, keys, keys)
    shapes = ours.describe()
    assert [shape.num_bytes for shape in shapes] == [4 * (RANK + ROTARY)]
    theirs.prepare(shapes, torch.device("cpu"))
    theirs.write(2, 0, 5, ours.read(1, 0, 5))
    received = LatentPlaces(theirs.places(Places((), 0, tokens[:0], tokens[:0], 0, [], 5)))
    ((_, (moved, nothing)),) = theirs.own_layers()
    found_keys, found_values = received.sequence((moved, nothing), 2, 5)
    assert found_keys.equal(keys) and found_values.equal(keys) and nothing.nbytes == 0


def test_packing_leaves_out_the_layers_that_decoding_absorbs() -> None:
    model = tiny_model("minicpm3").bfloat16()
    with packed_linears(model, num_steps=64):
        assert all("forward" not in vars(attention.kv_b_proj) for attention in latent_modules(model))
