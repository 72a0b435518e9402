"""Stages of a pipeline generate the tokens of one rank that holds the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightning_realloc.generation import GenerationEngine, SamplingParams, Speculation
from lightning_realloc.generation.loop.run import GenerationStats
from tests.generation.staged.staged_ranks import LAYERS, answer_in_words, generate_staged
from tests.matrices import matrix
from tests.models import tiny_model
from tests.workers import WorkerPool

PROMPTS = [[5, 9, 17, 3], [8] * 11, [40], [7, 7, 90, 4, 4, 4], [101, 33], [61, 2, 5]]
LAYOUTS = ("pp2@1,0", "pp4", "pp2.dp2", "pp2.fsdp2", "pp2.tp2@3,1,2,0")
NGRAM = {"speculation": Speculation(drafter="ngram", num_draft_tokens=3)}
TWO, FOUR = 2 * 4096 * (2 * 8 + 6), 4 * 4200 * (8 + 6)
"""Bytes for two and four groups whose samples have up to six pages: eight pages in all layers, and six of one."""
SAMPLED = SamplingParams(max_new_tokens=12, n=2, seed=11, stop_token_ids=tuple(range(100, 120)))


def check_as_alone(
    workers: WorkerPool, family: str, layouts: Sequence[str], arguments: dict[str, Any], **options: Any
) -> list[GenerationStats]:
    """Check that each layout's ranks together have the completions of one rank; return their counts."""
    prompts = arguments.pop("prompts", PROMPTS)
    alone = GenerationEngine(tiny_model(family, **LAYERS)).generate(prompts, **arguments)
    expected = {completion.sample_id: completion.token_ids for completion in alone}
    results = workers.run(generate_staged, family, layouts, prompts, arguments, options)
    for number, text in enumerate(layouts):
        made = [each for result in results if result[number] for each in result[number].completions]
        found = {completion.sample_id: completion.token_ids for completion in made}
        assert found == expected, text
    made = [made for result in results for made in result if made is not None]
    if "moves" in options:
        assert sum(each.moves.num_received for each in made)
    return [each.stats for each in made]


@pytest.mark.exhaustive
def test_groups_that_take_turns_ask_their_environment_and_verify_drafts(workers: WorkerPool) -> None:
    arguments = {"params": SAMPLED, "environment": answer_in_words}
    check_as_alone(workers, "llama", ["pp2@1,0", "pp2.fsdp2", "pp2.tp2@3,1,2,0"], arguments, max_slots=5, **NGRAM)


@pytest.mark.parametrize(
    ("family", "layouts", "bound"),
    matrix([("llama", "pp2@1,0", TWO), ("llama", "pp2.dp2 pp2.fsdp2 pp2.tp2@3,1,2,0", TWO), ("mixtral", "pp4", FOUR)]),
)
def test_groups_share_a_bound_on_bytes_and_samples_that_lose_their_pages_are_read_again(
    workers: WorkerPool, family: str, layouts: str, bound: int
) -> None:
    prompts = [[*range(30, 50), 5 + number, 6] for number in range(6)]  # the first page of 16 tokens is the same
    params = SamplingParams(max_new_tokens=60, n=2, seed=3, ignore_eos=True, stop_token_ids=(7, 70, 77))
    asked = {"prompts": prompts, "params": params, "environment": answer_in_words}
    for stats in check_as_alone(workers, family, layouts.split(), asked, max_slots=8, max_cache_bytes=bound, **NGRAM):
        assert 0 < stats.cache_bytes <= bound and stats.num_preemptions and stats.shared_prefill_tokens


@pytest.mark.parametrize(("layouts", "bound"), matrix([("pp2@1,0", TWO), ("pp2@1,0 pp2.tp2@3,1,2,0 pp2.fsdp2", None)]))
def test_a_draft_model_on_the_last_stage_follows_the_samples_of_each_group(
    workers: WorkerPool, layouts: str, bound: int | None
) -> None:
    drafts = {"speculation": Speculation(drafter="none", num_draft_tokens=3), "drafts_by_itself": True}
    asked = {"params": replace(SAMPLED, max_new_tokens=40), "environment": answer_in_words}
    bounded = {"max_cache_bytes": None if bound is None else 2 * bound}
    for stats in check_as_alone(workers, "llama", layouts.split(), asked, max_slots=5, **bounded, **drafts):
        assert stats.accepted_tokens > 0.9 * stats.verified_tokens > 0
        assert bound is None or stats.num_preemptions


@pytest.mark.parametrize(
    ("layout", "moves", "bound", "asks"),
    matrix(
        [("pp2.dp2@3,1,2,0", "queued", None, True), ("pp2.dp2", "all", TWO, True), ("pp2.dp2", "all", None, False)],
        ("pp2.dp2", "all", TWO, True),
    ),
)
def test_samples_that_move_between_pipelines_at_random_get_the_tokens_of_one_rank(
    workers: WorkerPool, layout: str, moves: str, bound: int | None, asks: bool
) -> None:
    params = SamplingParams(max_new_tokens=24, n=2, seed=3, stop_token_ids=(7, 70, 77))
    asked = {"params": params, "prompts": [*PROMPTS, [3, 4], [9, 8, 7]]} | (
        {"environment": answer_in_words} if asks else {}
    )
    slots = 3 if moves == "queued" else 16  # running samples move to free slots
    check_as_alone(workers, "llama", [layout], asked, moves=moves, max_slots=slots, max_cache_bytes=bound, **NGRAM)


@pytest.mark.parametrize(
    ("family", "layouts"),
    matrix(
        [*((family, LAYOUTS) for family in ("llama", "qwen3", "gemma2", "gpt_oss", "mixtral")),
         ("deepseek_v3", ("pp2@1,0", "pp2.fsdp2", "pp2.tp2@3,1,2,0")), ("deepseek_v3", ("pp2@1,0",))],
        ("llama", LAYOUTS), ("deepseek_v3", ("pp2@1,0",)),
    ),
)  # fmt: skip
def test_stages_generate_the_tokens_of_one_rank(workers: WorkerPool, family: str, layouts: Sequence[str]) -> None:
    check_as_alone(workers, family, layouts, {"params": SAMPLED}, max_slots=5)
