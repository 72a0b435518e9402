"""What all engines share: capabilities, arguments, versions, streams of tokens and of finished samples."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lightning_realloc.algorithms.base.generation_options import GenerationOptions, check_engine
from lightning_realloc.errors import ConfigError, GenerationError
from lightning_realloc.generation import (
    Completion,
    GenerationEngine,
    HFEngine,
    RolloutBudget,
    SamplingParams,
    VLLMOptions,
)
from lightning_realloc.generation.core.capabilities import CAPABILITIES, NATIVE_HINTS
from lightning_realloc.generation.speculative.config import Speculation
from tests.generation.fake_engine import CountingEngine
from tests.models import tiny_model

OPTIONS: dict[str, tuple[Any, str]] = {
    "speculation": (Speculation(), "drafts"),
    "max_cache_bytes": (1 << 20, "cache_bound"),
    "free_cache": (False, "keeps_cache"),
    "sample_reallocation": (True, "moves"),
    "compile": ("inductor", "captures"),
    "cuda_graphs": (False, "captures"),
    "batch_invariant": (True, "batch_invariant"),
    "rollout_budget": (RolloutBudget(tokens=9), "budget"),
    "vllm": (VLLMOptions(), "vllm"),
}
"""Option -> a value that asks for more than every engine has, and the capability that it needs."""


@pytest.mark.parametrize("engine", CAPABILITIES)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_refused_exactly_where_the_engine_lacks_its_capability(engine: Any, option: str) -> None:
    value, capability = OPTIONS[option]
    drafts = value if option == "speculation" else None
    options = GenerationOptions() if option == "speculation" else GenerationOptions(**{option: value})
    if capability in CAPABILITIES[engine]:
        check_engine(engine, options, drafts)
        return
    able = [f"engine={name!r}" for name, known in CAPABILITIES.items() if capability in known]
    with pytest.raises(ConfigError) as caught:
        check_engine(engine, options, drafts)
    assert str(caught.value).endswith(f"and engine={engine!r} does not; leave it out, or use {' or '.join(able)}")
    assert str(caught.value).startswith(f"{option}={value!r} needs an engine that ")


def test_the_native_engine_has_all_capabilities_of_the_own_generate_and_its_settings_are_hinted_at() -> None:
    assert CAPABILITIES["hf"] < CAPABILITIES["native"]
    shared = set(inspect.signature(HFEngine.__init__).parameters)
    assert set(inspect.signature(GenerationEngine.__init__).parameters) - shared == NATIVE_HINTS.keys()


def test_a_new_engine_gets_the_checks_and_the_samples_of_the_others() -> None:
    engine = CountingEngine(tiny_model("llama"), tokenizer=None, max_slots=4, max_length=None)
    finished: list[Completion] = []
    params = SamplingParams(n=2, max_new_tokens=5, stop_token_ids=(4,), ignore_eos=True)
    engine.weights_updated()
    made = engine.generate([[7], [8, 9]], params, token_limits=[9, 3], length_hints=[1, 2], on_finished=finished.append)
    assert [c.token_ids for c in made] == [(1, 2, 3, 4)] * 2 + [(1, 2, 3)] * 2
    assert [c.finish_reason for c in made] == ["stop"] * 2 + ["length"] * 2
    assert [c.sample_id for c in finished] == [2, 3, 0, 1] and sorted(finished, key=made.index) == made
    assert {version for c in made for version in c.versions} == {1}
    assert engine.stats.num_steps == 4 and engine.stats.generated_tokens == 14
    with pytest.raises(GenerationError, match=r"environment needs an engine that .*, and engine='counting' does not"):
        engine.generate([[7]], params, environment=lambda turn: None)
    with pytest.raises(GenerationError, match="prompt 0 is empty"):
        engine.generate([[]], params)


def test_streamed_tokens_are_those_of_the_completions_and_come_step_by_step() -> None:
    streamed: dict[int, list[int]] = {}
    pieces: list[int] = []

    def on_tokens(sample_id: int, token_ids: Any) -> None:
        streamed.setdefault(sample_id, []).extend(token_ids)
        pieces.append(len(token_ids))

    engine = GenerationEngine(tiny_model("llama"), max_slots=2)
    params = SamplingParams(n=2, max_new_tokens=6, ignore_eos=True)
    made = engine.generate([[5, 6], [7]], params, on_tokens=on_tokens)
    assert streamed == {c.sample_id: list(c.token_ids) for c in made}
    assert pieces == [1] * 24
    with pytest.raises(GenerationError, match=r"on_tokens needs an engine that reports tokens .* engine='native'"):
        HFEngine(tiny_model("llama")).generate([[5]], params, on_tokens=on_tokens)
    with pytest.raises(GenerationError, match="on_tokens='print' must be a function or None"):
        engine.generate([[5]], params, on_tokens="print")
