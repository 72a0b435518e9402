"""Finished samples are sent before a generation ends, each once and in chunks of equal size."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from lightning_realloc.algorithms.base.rollout_columns import sample_responses
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.generation import Completion, GenerationEngine, HFEngine, SamplingParams
from lightning_realloc.generation.loop.streaming import PartialResults
from lightning_realloc.runtime.messages.flight_record import ActivityProgress
from tests.models import tiny_model

PARAMS = SamplingParams(max_new_tokens=12, n=2, seed=3, stop_token_ids=tuple(range(100, 128)))
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]


def _batch(count: int) -> Samples:
    return Samples(torch.arange(count), {"prompt_ids": Ragged.from_list(PROMPTS[:count])})


@pytest.mark.parametrize("kind", [GenerationEngine, HFEngine])
def test_every_completion_is_reported_once_and_equals_the_returned_one(kind: Any) -> None:
    heard: list[Completion] = []
    engine = kind(tiny_model("llama"), max_slots=3)
    completions = engine.generate(PROMPTS, PARAMS, on_finished=heard.append)
    assert sorted(heard, key=lambda completion: completion.sample_id) == completions


def test_short_responses_are_reported_first_and_unfinished_ones_last() -> None:
    heard: list[Completion] = []
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    engine = GenerationEngine(tiny_model("llama"))
    engine.generate(PROMPTS, params, token_limits=[9, 3, 12, 6], token_budget=25, on_finished=heard.append)
    # Every step gives each running sample a token: 8 steps make 8 + 3 + 8 + 6 = 25.
    assert [completion.prompt_index for completion in heard] == [1, 3, 0, 2]
    assert [completion.finish_reason for completion in heard] == ["length", "length", "unfinished", "unfinished"]


@pytest.mark.parametrize("num_parts", [2, 3, 8, 20])
def test_chunks_hold_the_rows_that_the_rollout_returns(num_parts: int) -> None:
    engine = GenerationEngine(tiny_model("llama"), max_slots=3)
    plain = sample_responses(engine, _batch(4), PARAMS)
    parts: list[Samples] = []
    with engine.sharing(PartialResults(num_parts, parts.append)):
        rollout = sample_responses(engine, _batch(4), PARAMS)
    assert engine.partial_results is None
    assert rollout.equals(plain)
    # 8 samples: all chunks but the last hold 8 / num_parts of them, at least 1.
    sizes = {2: [4], 3: [3, 3], 8: [1] * 7, 20: [1] * 8}[num_parts]
    assert [len(part) for part in parts] == sizes
    early = Samples.concatenate(parts)
    assert rollout.by_ids(early.ids).equals(early)


def test_a_rank_without_prompts_sends_no_chunks() -> None:
    parts: list[Samples] = []
    engine = GenerationEngine(tiny_model("llama"))
    with engine.sharing(PartialResults(4, parts.append)):
        assert len(sample_responses(engine, _batch(0), PARAMS)) == 0
    assert parts == []


@pytest.mark.parametrize("kind", [GenerationEngine, HFEngine])
def test_progress_covers_all_generations_that_are_shared_and_none_before_or_after(kind: Any) -> None:
    engine = kind(tiny_model("llama"), max_slots=3)
    seen: list[ActivityProgress] = []
    engine.generate(PROMPTS, PARAMS)
    assert engine.progress() is None
    with engine.sharing():
        assert engine.progress() == ActivityProgress(0, 0, "samples", 0, None)
        made = engine.generate(PROMPTS, PARAMS, on_finished=lambda _: seen.append(engine.progress()))
        made += engine.generate(PROMPTS, PARAMS, on_finished=lambda _: seen.append(engine.progress()))
        last = engine.progress()
    assert engine.progress() is None
    num_tokens = sum(len(completion.token_ids) for completion in made)
    assert last == ActivityProgress(16, 16, "samples", num_tokens, None)
    assert [progress.total for progress in seen] == [8] * 8 + [16] * 8
    for before, after in pairwise(seen):
        assert before.done <= after.done and before.num_tokens <= after.num_tokens  # type: ignore[operator]
