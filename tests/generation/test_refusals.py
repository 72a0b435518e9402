"""Requests, settings and models that an engine cannot serve are refused with the rule and the way out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Conversation, GenerationEngine, HFEngine, SamplingParams, Speculation, Turn
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.step import Draft
from lightning_realloc.generation.speculative.drafter import Drafter
from lightning_realloc.generation.speculative.lookup import HistoryDrafter
from tests.models import SIZES, tiny_model

GREEDY = SamplingParams(max_new_tokens=20, temperature=0)


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([[5], []], {}, "prompt 1 is empty"),
        ([[5], [5] * 128], {}, "prompt 1 holds 128 tokens .* max_position_embeddings of 128; shorten .* at most 127"),
        ([[5] * 40], {}, "max_length of 40"),
        ([[5, 128]], {}, "prompt 0 holds token ids from 5 to 128, the model's vocabulary has 128"),
        ([[True, 5]], {}, r"prompt 0 must be a list of token ids; it is \[True, 5\]"),
        (["text"], {}, r"prompt 0 must be a list of token ids; it is 'text', .* tokenizer\(texts\)\[\"input_ids\"\]"),
        ("text", {}, "prompt 0 must be a list of token ids; it is 't'"),
        ([5, 6], {}, "prompt 0 must be a list of token ids; it is 5"),
        ([[5], [5.0]], {}, r"prompt 1 must be a list of token ids; it is \[5.0\]"),
        ([[5], [6]], {"sample_ids": [3]}, "2 prompts with n=1 need 2 distinct sample_ids, got 1"),
        ([[5], [6]], {"sample_ids": [3, 3]}, "got 2 of which 1 distinct"),
        ([[5], [6]], {"length_hints": [3]}, "length_hints must hold one number per prompt: got 1 for 2"),
        ([[5], [6]], {"token_limits": [3, 0]}, r"token_limits\[1\]=0 must be at least 1"),
        ([[5], [6]], {"token_limits": ["a", 2]}, r"token_limits=\['a', 2\] must be a list of whole numbers, one for"),
        (
            [[5], [6]],
            {"token_limits": [2.0, 3.0]},
            r"token_limits=\[2.0, 3.0\] must be a list of whole numbers, one for",
        ),
        ([[5], [6]], {"token_limits": 5}, "token_limits=5 must be a list with one number for each prompt"),
        (
            [[5], [6]],
            {"length_hints": [3, None]},
            r"length_hints\[1\]=None must be a number of tokens, 0 where none is",
        ),
        ([[5], [6]], {"length_hints": [math.nan, 3]}, r"length_hints\[0\]=nan must be a number of tokens"),
        (
            [[5], [6]],
            {"sample_ids": [1.7, 2.2]},
            r"sample_ids=\[1.7, 2.2\] must be a list of whole numbers, one for each",
        ),
        ([[5], [6]], {"sample_ids": 5}, "sample_ids=5 must be a list of whole numbers, one for each new completion"),
        ([[5]], {"on_finished": 5}, "on_finished=5 must be a function or None"),
        ([[5]], {"may_stop": 5}, "may_stop=5 must be a function or None"),
        (None, {}, "prompts must be a list of lists of token ids; it is a NoneType"),
        ([[5]], {"resume": [{"sample_id": 3}]}, "resume must hold completions of an earlier call; it holds dict"),
        ([[5]], {"resume": 5}, "resume must be a list of unfinished completions of an earlier call; it is a int"),
        ([[5]], {"environment": 5}, "environment=5 cannot be called with a Turn"),
        ([[5]], {"environment": Conversation}, "environment=<class .*Conversation'> cannot be called with a Turn"),
        ([[5]], {"environment": print, "conversation": 5}, r"conversation=5 is a int; write Conversation\(...\)"),
        ([[5]], {"conversation": Conversation()}, "bounds a conversation without environment"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    prompts: list[list[int]], arguments: dict[str, Any], message: str
) -> None:
    engine = GenerationEngine(tiny_model("llama"), max_length=40 if "max_length" in message else None)
    with pytest.raises(GenerationError, match=message):
        engine.generate(prompts, GREEDY, **arguments)


@pytest.mark.parametrize("engine_class", [GenerationEngine, HFEngine])
def test_sampling_parameters_of_the_wrong_type_are_refused(engine_class: Any) -> None:
    for params in ({"n": 2}, {}):
        with pytest.raises(GenerationError, match=r"params={.*} is a dict; write SamplingParams\(...\)"):
            engine_class(tiny_model("llama")).generate([[5]], params)


def test_an_async_environment_is_refused() -> None:
    async def tool(turn: Turn) -> list[int]:
        return [5]

    with pytest.raises(GenerationError, match=r"environment=<function .*tool.* is async; give a plain function"):
        GenerationEngine(tiny_model("llama")).generate([[5]], GREEDY, environment=tool)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_slots": 1.5}, "max_slots=1.5 must be a whole number"),
        ({"max_length": 0}, "max_length=0 must be at least 1"),
        ({"max_cache_bytes": "20GB"}, "max_cache_bytes='20GB' must be a number or None"),
        ({"max_cache_bytes": float("inf")}, "max_cache_bytes=inf must be finite; use None for no bound"),
        ({"tokenizer": "gpt2"}, r"tokenizer='gpt2' is a str, .* load it first: AutoTokenizer.from_pretrained\("),
        ({"max_cache_bytes": True}, "max_cache_bytes=True must be a number or None"),
        ({"speculation": "ngram"}, "speculation='ngram' is a str; write Speculation"),
        ({"peers": "x"}, "peers='x' is a str; write Peers"),
    ],
)
def test_settings_of_the_wrong_type_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        GenerationEngine(tiny_model("llama"), **settings)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(GenerationError, match=r"need a tokenizer; pass GenerationEngine\(model, tokenizer=...\)"):
        GenerationEngine(tiny_model("llama")).generate([[5]], SamplingParams(stop_strings=("x",)))


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        (
            "bloom",
            {"n_layer": 1, "hidden_size": 16, "n_head": 2},
            "does not go through transformers' attention registry",
        ),
        ("mamba", {"num_hidden_layers": 1, "hidden_size": 16}, "does not go through transformers' attention registry"),
    ],
)
def test_models_outside_transformers_attention_registry_are_refused(
    family: str, overrides: dict[str, Any], reason: str
) -> None:
    config = AutoConfig.for_model(family, vocab_size=32, **overrides)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(GenerationError, match=rf"{type(model).__name__} cannot be generated from.*({reason})"):
        GenerationEngine(model)


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0, "num_experts": 2},
            "Qwen2MoeAttention attends with a sliding window of 6 that only its mask states",
        ),
    ],
)
def test_attention_with_terms_that_are_not_implemented_is_refused(
    family: str, overrides: dict[str, Any], reason: str
) -> None:
    config = AutoConfig.for_model(family, **SIZES, head_dim=16, **overrides)
    engine = GenerationEngine(AutoModelForCausalLM.from_config(config))
    with pytest.raises(GenerationError, match=reason):
        engine.generate([[5] * 8], GREEDY)


def test_a_layer_that_attends_twice_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("diffllama", **SIZES))
    with pytest.raises(GenerationError, match="DiffLlamaAttention attends with the same layer twice in a forward"):
        GenerationEngine(model).generate([[5, 6], [7]], GREEDY)


def test_a_model_whose_layers_do_not_look_up_their_attention_is_refused() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.config = deepcopy(model.config)  # like layers that choose their attention on construction
    with pytest.raises(GenerationError, match=r"LlamaForCausalLM .* its layers do not look their"):
        GenerationEngine(model).generate([[5, 6], [7]], GREEDY)


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForSequenceClassification])
def test_a_model_without_a_language_model_head_is_refused(auto_class: Any) -> None:
    with pytest.raises(GenerationError, match="it has no head for the next token; load it by AutoModelForCausalLM"):
        GenerationEngine(auto_class.from_config(AutoConfig.for_model("llama", **SIZES)))


@pytest.mark.parametrize("engine_class", [GenerationEngine, HFEngine])
def test_an_encoder_is_refused(engine_class: Any) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", **SIZES))
    with pytest.raises(GenerationError, match=r"BertLMHeadModel .* its tokens attend to later ones.*; use a decoder"):
        engine_class(model)


@pytest.mark.parametrize("engine_class", [GenerationEngine, HFEngine])
def test_an_encoder_decoder_model_is_refused(engine_class: Any) -> None:
    config = AutoConfig.for_model("t5", vocab_size=32, d_model=16, num_layers=1, d_kv=8, num_heads=2, d_ff=16)
    with pytest.raises(GenerationError, match=r"T5ForConditionalGeneration .* encoder-decoder.*; use a decoder-only"):
        engine_class(AutoModelForSeq2SeqLM.from_config(config))


def test_a_model_that_keeps_state_between_calls_is_refused() -> None:
    # The second of two prompts would get other tokens than from a new model.
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("recurrent_gemma", **SIZES, lru_width=16))
    with pytest.raises(GenerationError, match=r"RecurrentGemmaForCausalLM .* keep the state of one call"):
        HFEngine(model)


@pytest.mark.parametrize("engine_class", [GenerationEngine, HFEngine])
def test_a_model_that_counts_positions_after_its_padding_token_is_refused(engine_class: Any) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("roberta", **SIZES, is_decoder=True))
    with pytest.raises(GenerationError, match=r"RobertaForCausalLM .* after its padding token.*; use a decoder"):
        engine_class(model)


@pytest.mark.parametrize("engine_class", [GenerationEngine, HFEngine])
def test_experts_in_a_dtype_that_torch_does_not_support_are_refused(engine_class: Any) -> None:
    model = tiny_model("mixtral").double()
    with pytest.raises(GenerationError, match=r"experts are in float64, .*set_experts_implementation\('eager'\)"):
        engine_class(model).generate([[5, 6]], GREEDY)
    model.set_experts_implementation("eager")
    assert len(engine_class(model).generate([[5, 6]], SamplingParams(max_new_tokens=2, ignore_eos=True))) == 1


def test_dynamic_rotary_embeddings_are_refused_beyond_their_original_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    engine = GenerationEngine(tiny_model("llama", rope_parameters=rope))
    assert len(engine.generate([[5] * 6], SamplingParams(max_new_tokens=10, ignore_eos=True))[0].token_ids) == 10
    with pytest.raises(GenerationError, match=r"dynamic rotary embedding .* beyond 16 positions .* may reach 17"):
        engine.generate([[5] * 6], SamplingParams(max_new_tokens=11))


def test_layers_of_a_type_that_the_cache_does_not_support_are_refused() -> None:
    model = tiny_model("qwen2", layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(GenerationError, match="layers of type chunked_attention"):
        GenerationEngine(model).generate([[5]], GREEDY)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drafter": "model", "draft_model": "x", "draft_learning_rate": "a"}, "rate='a' must be a number or None"),
        (
            {"drafter": "model", "draft_model": "x", "draft_learning_rate": math.inf},
            "rate=inf must be a finite number above 0",
        ),
        ({"drafter": "blocks", "draft_blocks": "1"}, "draft_blocks='1' must be a whole number"),
        ({"drafter": "blocks", "draft_blocks": 0}, "draft_blocks=0 must be at least 1"),
    ],
)
def test_settings_of_speculation_are_checked_on_construction(given: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        Speculation(**given)


class Proposing(Drafter):
    """Proposes the same draft for each running sample and any limit; leaves out ``missing`` samples."""

    def __init__(self, draft: Any, *, missing: int = 0) -> None:
        self._draft, self._missing = draft, missing

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> list[Draft]:
        return [self._draft] * (len(running) - self._missing)


class Forgetful(Drafter):
    """Returns None or an iterator instead of a list of drafts."""

    def __init__(self, returned: Any) -> None:
        self._returned = returned

    def propose(self, *_: Any) -> Any:
        return self._returned


@pytest.mark.parametrize("num_draft_tokens", [3, None])
@pytest.mark.parametrize(
    ("drafter", "verification", "message"),
    [
        (Proposing([5]), "match", r"Proposing.propose returned a list for sample 0; return Draft\(tokens\)"),
        (Proposing(Draft([5] * 30)), "match", r"returned 30 tokens for sample 0, whose limit is \d+; .*draft.cut\("),
        (Proposing(Draft([5, 128])), "match", "returned tokens 5 to 128 for sample 0, and the vocabulary has 128"),
        (Proposing(Draft([-1])), "match", "returned tokens -1 to -1 for sample 0, and the vocabulary has 128"),
        (Proposing(Draft([5]), missing=1), "match", r"returned \d drafts for \d running samples; return one for each"),
        (Proposing(Draft(["a"])), "match", r"Proposing.propose returned \['a'\] for sample 0; return token ids"),
        (Proposing(Draft([5.5])), "match", r"Proposing.propose returned \[5.5\] for sample 0; return token ids"),
        (
            Forgetful(None),
            "match",
            "Forgetful.propose returned a NoneType; return a list with a Draft for each running",
        ),
        (Forgetful(iter([])), "match", "Forgetful.propose returned a list_iterator; return a list with a Draft for"),
        (Proposing(Draft([5])), "reject", "has to know what each drafted token was drawn from, .* 0 laws for 1 tokens"),
    ],
)
def test_invalid_proposals_of_a_drafter_are_refused(
    drafter: Drafter, verification: Any, message: str, num_draft_tokens: int | None
) -> None:
    speculation = Speculation(drafter="none", num_draft_tokens=num_draft_tokens, verification=verification)
    engine = GenerationEngine(tiny_model("llama"), drafter=drafter, speculation=speculation)
    with pytest.raises(GenerationError, match=message):
        engine.generate([[5], [6]], SamplingParams(max_new_tokens=100, ignore_eos=True))


def test_a_drafter_is_used_without_settings_of_speculation() -> None:
    # The clock advances by one at each call: all steps take equally long, on a busy machine as well.
    clock = map(float, itertools.count()).__next__
    engine = GenerationEngine(tiny_model("llama"), drafter=HistoryDrafter(), pack_weights=False, clock=clock)
    params = SamplingParams(max_new_tokens=100, temperature=0, ignore_eos=True)
    plain = [made.token_ids for made in GenerationEngine(tiny_model("llama")).generate([[5], [6]], params)]
    for _ in range(2):
        assert [made.token_ids for made in engine.generate([[5], [6]], params)] == plain
    assert engine.stats.drafted_tokens > 0


def test_a_drafter_or_version_of_the_wrong_type_is_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(GenerationError, match=r"drafter='ngram' must be a Drafter; name one by speculation="):
        GenerationEngine(model, drafter="ngram")  # type: ignore[arg-type]
    for engine in (GenerationEngine(model), HFEngine(model)):
        with pytest.raises(GenerationError, match="version='a' must be a whole number or None"):
            engine.weights_updated("a")  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["./drafts/nowhere", "~/no/drafts", "no/drafts/here", Path("/no/drafts")])
def test_a_missing_folder_of_a_draft_model_is_named(folder: str | Path) -> None:
    with pytest.raises(GenerationError, match=r"draft_model='.*drafts.*' .*there is no such folder .*give a Hugging"):
        GenerationEngine(tiny_model("llama"), speculation=Speculation(drafter="model", draft_model=folder))


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(tiny_model("llama").config)
    with pytest.raises(GenerationError, match=r"its weights are on the meta device.*; load it by from_pretrained"):
        GenerationEngine(shapes)
    with pytest.raises(GenerationError, match="its weights are on the meta device"):
        GenerationEngine(tiny_model("llama"), speculation=Speculation(drafter="model", draft_model=shapes))


def test_an_unsupported_draft_model_is_refused_as_the_draft_model() -> None:
    mamba = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mamba", vocab_size=32, num_hidden_layers=1, hidden_size=16)
    )
    with pytest.raises(GenerationError, match=r"MambaForCausalLM cannot be the draft model.*'history' or 'ngram'"):
        GenerationEngine(tiny_model("llama"), speculation=Speculation(drafter="model", draft_model=mamba))
