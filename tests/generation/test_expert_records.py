"""Recorded experts are those of one forward over the whole sequence, however its tokens were generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import (
    Completion,
    Conversation,
    GenerationEngine,
    SamplingParams,
    Speculation,
    Turn,
    engine_parts,
)
from lightning_realloc.generation.forward.cuda_graphs import StepGraphs
from lightning_realloc.runtime.forward.routers import RoutedPass, routers_of
from tests.generation.forward.test_cuda_graphs import Recorder
from tests.models import EXPERT_FAMILIES, FURTHER_EXPERT_FAMILIES, tiny_model

PROMPTS = [[5, 9, 17, 3], [8] * 11, [40], [7, 7, 90, 4, 4, 4]]
SAMPLED = SamplingParams(max_new_tokens=12, n=3, seed=11, stop_token_ids=tuple(range(100, 120)))
ENDLESS = SamplingParams(max_new_tokens=40, n=2, seed=11, ignore_eos=True)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "few slots and chunked prompts": {"max_slots": 5, "max_prefill_tokens": 3},
    "preempted in pages": {"max_cache_bytes": 80_000},
    "drafts": {"speculation": Speculation(drafter="ngram", num_draft_tokens=3)},
}


def _answer(turn: Turn) -> Sequence[int] | None:
    return [33, 34, 35] if len(turn.token_ids) < 8 else None


@torch.no_grad()
def check_records(model: PreTrainedModel, engine: GenerationEngine, made: Sequence[Completion]) -> None:
    """Check the records of responses, and the counts of the tokens that the model chose and read."""
    routers = routers_of(model)
    assert routers is not None and engine.expert_counts is not None
    counts = torch.zeros_like(engine.expert_counts)
    for each in made:
        routed, ids = RoutedPass(routers, records=True), torch.tensor([[*each.prompt, *each.token_ids]])
        model(input_ids=ids, use_cache=False, **routed.arguments)
        assert each.experts is not None and each.experts.dtype == torch.uint8
        assert each.experts.equal(routed.record()[:-1])
        is_read = torch.tensor([chosen and place + 1 < len(each.token_ids) and each.model_mask[place + 1]
                                for place, chosen in enumerate(each.model_mask)])  # fmt: skip
        counts += routers.count(each.experts[len(each.prompt) :][is_read[: len(each.token_ids) - 1]])
    assert engine.expert_counts.equal(counts)


@pytest.mark.parametrize("name", SETTINGS)
def test_records_are_those_of_whole_forwards(name: str) -> None:
    model = tiny_model("qwen3_moe")
    engine = GenerationEngine(model, **SETTINGS[name])
    engine.record_experts(True)
    with engine.sharing():
        made = engine.generate(PROMPTS, ENDLESS)
    check_records(model, engine, made)
    assert (engine.stats.num_preemptions > 0) == (name == "preempted in pages")
    assert (engine.stats.verified_tokens > engine.stats.accepted_tokens) == (name == "drafts")


@pytest.mark.parametrize("family", [*EXPERT_FAMILIES, *FURTHER_EXPERT_FAMILIES, "gpt_oss"])
def test_records_of_conversations_in_every_family(family: str) -> None:
    model = tiny_model(family)
    engine = GenerationEngine(model, max_slots=5)
    engine.record_experts(True)
    with engine.sharing():
        made = engine.generate(PROMPTS, SAMPLED, environment=_answer, conversation=Conversation(max_turns=3))
    assert any(not all(each.model_mask) for each in made)
    check_records(model, engine, made)


def test_replayed_graphs_store_records(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    captured = partial(StepGraphs, make_record=lambda: recorder, device_type="cpu")
    monkeypatch.setattr(engine_parts, "StepGraphs", captured)
    model = tiny_model("mixtral")
    engine = GenerationEngine(model)
    engine.record_experts(True)
    with engine.sharing():
        made = engine.generate(PROMPTS, SAMPLED)
    assert recorder.num_replayed > 0
    check_records(model, engine, made)


def test_a_dense_model_has_no_experts_to_record() -> None:
    with pytest.raises(GenerationError, match="experts of tokens, and LlamaForCausalLM has no"):
        GenerationEngine(tiny_model("llama")).record_experts(True)
