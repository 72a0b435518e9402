"""Stages of a pipeline generate the tokens of one rank that holds the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams, Speculation
from tests.generation.staged.staged_ranks import LAYERS, answer_in_words, generate_staged
from tests.matrices import matrix
from tests.models import EXPERT_FAMILIES, tiny_model
from tests.workers import WorkerPool

PROMPTS = [[5, 9, 17, 3], [8] * 11, [40], [7, 7, 90, 4, 4, 4], [101, 33], [61, 2, 5]]
LAYOUTS = ("pp2@1,0", "pp4", "pp2.dp2", "pp2.fsdp2", "pp2.tp2@3,1,2,0")
SAMPLED = SamplingParams(max_new_tokens=12, n=2, seed=11, stop_token_ids=tuple(range(100, 120)))


def check_as_alone(
    workers: WorkerPool, family: str, layouts: Sequence[str], arguments: dict[str, Any], **options: Any
) -> None:
    """Check that each layout's ranks together have the completions of one rank."""
    alone = GenerationEngine(tiny_model(family, **LAYERS)).generate(PROMPTS, **arguments)
    expected = {completion.sample_id: completion.token_ids for completion in alone}
    results = workers.run(generate_staged, family, layouts, PROMPTS, arguments, options)
    for number, text in enumerate(layouts):
        made: list[Completion] = [each for result in results for each in result[number] or ()]
        found = {completion.sample_id: completion.token_ids for completion in made}
        assert found == expected, text


def test_groups_that_take_turns_ask_their_environment_and_verify_drafts(workers: WorkerPool) -> None:
    arguments = {"params": SAMPLED, "environment": answer_in_words}
    drafts = {"speculation": Speculation(drafter="ngram", num_draft_tokens=3)}
    check_as_alone(workers, "llama", ["pp2@1,0", "pp2.fsdp2", "pp2.tp2@3,1,2,0"], arguments, max_slots=5, **drafts)


@pytest.mark.parametrize("family", matrix(["llama", "qwen3", "gemma2", "gpt_oss", "mixtral"], "llama"))
def test_stages_generate_the_tokens_of_one_rank(workers: WorkerPool, family: str) -> None:
    layouts = [text for text in LAYOUTS if "tp" not in text or family not in EXPERT_FAMILIES]
    check_as_alone(workers, family, layouts, {"params": SAMPLED}, max_slots=5)
