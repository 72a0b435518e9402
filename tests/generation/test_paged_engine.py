"""Generation in a bounded cache gives the same tokens as generation without a bound."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Completion, Conversation, GenerationEngine, SamplingParams, Speculation, Turn
from lightning_realloc.generation.cache.kv_cache import Places
from lightning_realloc.generation.cache.paged_cache import PagedCache
from lightning_realloc.generation.speculative.draft_model import ModelDrafter
from tests.generation.dialogues import GREEDY, PROMPTS, SAMPLED, check_same, engine_of, exact_model, expected, tool
from tests.generation.markov import VOCABULARY
from tests.generation.speculative.drafters import DRAFTERS, prompts_of, speculating
from tests.generation.test_partial import in_pieces
from tests.matrices import crossed, matrix
from tests.models import tiny_model

LONG = SamplingParams(max_new_tokens=70, n=2, seed=3, ignore_eos=True)
"""Up to 90 positions, six pages a sample: long enough to run out of pages."""
LAYER_PAGE = 2 * 2 * 16 * 16
"""Elements of a page of one layer: keys and values of two heads of 16."""


def bound_of(num_pages: int, *, longest: int, element_bytes: int = 8, num_layers: int = 2) -> int:
    """Return the bytes of ``num_pages`` pages of a tiny model and of a buffer for ``longest`` pages of one layer."""
    return LAYER_PAGE * element_bytes * (num_layers * num_pages + longest)


@cache
def small_model() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=VOCABULARY).double()


@cache
def long_responses(verification: str = "match") -> list[tuple[int, ...]]:
    engine = speculating(small_model(), "none", 0, verification, max_slots=8)
    return tokens_of(engine.generate(prompts_of(3), LONG))


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(
    ("drafter", "depth"),
    matrix(  # "itself" is a draft model, too
        product([name for name in DRAFTERS if name != "model"], [3, None]),
        ("none", 3),
        ("random", None),
        ("blocks", 3),
    ),
)
def test_tokens_are_the_same_on_too_few_pages_with_any_drafter(drafter: str, depth: int | None) -> None:
    num_layers = {"blocks": 3, "itself": 4}.get(drafter, 2)
    bound = bound_of(11, longest=6, num_layers=num_layers)  # for 6 samples with up to 6 pages each
    first = 0 if drafter == "none" else depth
    engine = speculating(small_model(), drafter, first, max_slots=8, max_cache_bytes=bound)
    assert tokens_of(engine.generate(prompts_of(3), LONG)) == long_responses()
    if depth is not None:  # adaptive depths, and whether pages run out then, depend on the clock
        assert engine.stats.num_preemptions > 0
    assert 0 < engine.stats.cache_bytes <= bound
    if drafter == "itself":  # the draft model is the target, so it has to see the same tokens
        assert engine.stats.accepted_tokens == engine.stats.verified_tokens > 0


@pytest.mark.parametrize(
    ("num_pages", "max_prefill_tokens"), matrix(product([6, 10, 1000], [7, 8192]), (6, 7), (1000, 8192))
)
def test_tokens_are_the_same_on_any_number_of_pages(num_pages: int, max_prefill_tokens: int) -> None:
    bound = bound_of(num_pages, longest=6)
    engine = GenerationEngine(
        small_model(), max_slots=8, max_cache_bytes=bound, max_prefill_tokens=max_prefill_tokens
    )  # fmt: skip
    for _ in range(2):  # the second time on the same storage
        assert tokens_of(engine.generate(prompts_of(3), LONG)) == long_responses()
        assert engine.stats.cache_bytes <= bound
    assert (engine.stats.num_preemptions > 0) == (num_pages < 1000)
    engine.release()
    assert tokens_of(engine.generate(prompts_of(3), LONG)) == long_responses()


@pytest.mark.parametrize(
    ("family", "overrides"),
    matrix(
        [("gpt2", {}), ("gemma", {}), ("mistral", {"sliding_window": 20}), ("qwen3", {})],
        ("gpt2", {}),
        ("mistral", {"sliding_window": 20}),
    ),
)
def test_every_family_generates_the_same_from_pages_as_from_slots(family: str, overrides: dict[str, Any]) -> None:
    model = tiny_model(family, **overrides).double()
    params = SamplingParams(max_new_tokens=60, n=2, seed=1, ignore_eos=True)
    prompts = [[7] * 40, [7] * 33 + [9] * 9, [5, 6]]
    plain = GenerationEngine(model, max_slots=4).generate(prompts, params)
    needed = needed_bytes(model, prompts, params)
    engine = GenerationEngine(model, max_slots=4, max_cache_bytes=2 * needed, max_prefill_tokens=25)
    paged = engine.generate(prompts, params)
    assert tokens_of(paged) == tokens_of(plain)
    for one, other in zip(paged, plain, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-6, rtol=0)


def needed_bytes(model: PreTrainedModel, prompts: Sequence[Sequence[int]], params: SamplingParams) -> int:
    """Return the smallest bound that holds each single sample, as stated by the error for a smaller one."""
    with pytest.raises(GenerationError, match="raise max_cache_bytes to at least") as caught:
        GenerationEngine(model, max_cache_bytes=1).generate(prompts, params)
    found = re.search(r"at least (\d+)", str(caught.value))
    assert found is not None
    return int(found[1])


def test_a_bound_below_one_sample_is_refused_with_the_bytes_that_suffice() -> None:
    model, prompts = tiny_model("llama"), [[5] * 20, [6] * 3]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    # 60 tokens: 4 pages of 16, of 2 layers x 2 x 2 heads x 16 x 4 bytes a position; and half of that for the buffer.
    needed = needed_bytes(model, prompts, params)
    assert needed == bound_of(4, longest=4, element_bytes=4) == 4 * 16 * 512 * 3 // 2
    with pytest.raises(GenerationError, match=rf"max_cache_bytes={needed - 1} .* 60 tokens .* 4 pages of 16 tokens"):
        GenerationEngine(model, max_cache_bytes=needed - 1).generate(prompts, params)
    engine = GenerationEngine(model, max_cache_bytes=needed)
    assert tokens_of(engine.generate(prompts, params)) == tokens_of(GenerationEngine(model).generate(prompts, params))
    assert engine.stats.cache_bytes == needed
    with pytest.raises(GenerationError, match="max_cache_bytes=0 must be at least 1"):
        GenerationEngine(model, max_cache_bytes=0)


def test_a_common_prefix_of_prompts_is_prefilled_once() -> None:
    model = tiny_model("llama").double()
    prompts = [[*range(30, 70), 5 + index, 6, 7] for index in range(6)]  # 43 tokens each, the first 40 alike
    params = SamplingParams(max_new_tokens=20, n=2, seed=1)
    engine = GenerationEngine(model, max_slots=12, max_cache_bytes=10**7)
    assert tokens_of(engine.generate(prompts, params)) == tokens_of(GenerationEngine(model).generate(prompts, params))
    # Prompts have 42 positions to prefill (a row reads the last token); the first two pages are the same in all.
    assert engine.stats.prefill_tokens == 42 + 5 * 10
    assert engine.stats.shared_prefill_tokens == 5 * 32


def test_pages_of_earlier_weights_are_not_reused_in_the_next_call() -> None:
    model, prompts = tiny_model("llama"), [[*range(30, 70)]] * 2
    engine = GenerationEngine(model, max_slots=1, max_cache_bytes=10**6)
    before = engine.generate(prompts, GREEDY)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), tiny_model("llama", seed=1).parameters(), strict=True):
            parameter.copy_(other)
    after = engine.generate(prompts, GREEDY)
    assert engine.stats.shared_prefill_tokens == 32
    assert tokens_of(after) == tokens_of(GenerationEngine(model).generate(prompts, GREEDY)) != tokens_of(before)


@pytest.mark.parametrize(("params", "speculates"), crossed([GREEDY, SAMPLED], [False, True]))
def test_conversations_are_the_same_on_few_pages(params: SamplingParams, speculates: bool) -> None:
    engine = engine_of(
        exact_model(), speculates=speculates, max_slots=8, max_prefill_tokens=9, max_cache_bytes=bound_of(6, longest=3)
    )
    check_same(engine.generate(PROMPTS, params, environment=tool), expected(params))
    check_same(in_pieces(engine, params, 8, environment=tool), expected(params))


@pytest.mark.parametrize("drafts", [False, True])
def test_a_conversation_continues_from_its_pages_and_rereads_those_it_lost(drafts: bool) -> None:
    model = exact_model()

    def answer(turn: Turn) -> list[int] | None:
        return [60 + turn.sample_id] * 25 if turn.number < 4 else None

    params = SamplingParams(max_new_tokens=110, n=6, seed=3, stop_token_ids=tuple(range(60)))
    conversation = Conversation(max_turns=100)
    plain = GenerationEngine(model, max_slots=6)
    told = plain.generate([[5] * 17], params, environment=answer, conversation=conversation)
    read = plain.stats.prefill_tokens
    for num_pages, reads_again in ((100, False), (10, True)):
        bound = bound_of(num_pages, longest=8, num_layers=4 if drafts else 2)
        engine = GenerationEngine(
            model, max_slots=6, max_cache_bytes=bound,
            speculation=Speculation(num_draft_tokens=3) if drafts else None,
            drafter=ModelDrafter(model, model) if drafts else None,
        )  # fmt: skip
        paged = engine.generate([[5] * 17], params, environment=answer, conversation=conversation)
        assert tokens_of(paged) == tokens_of(told)
        assert (engine.stats.prefill_tokens > read, engine.stats.num_preemptions > 0) == (reads_again, reads_again)
        assert (engine.stats.accepted_tokens > 0) == drafts


def test_a_rank_in_lockstep_may_run_steps_without_work() -> None:
    steps_left = 3  # one forward to learn the layers' shapes, then two steps

    def lockstep(has_work: bool) -> bool:
        nonlocal steps_left
        steps_left -= 1
        return steps_left >= 0

    engine = GenerationEngine(tiny_model("llama"), lockstep=lockstep, max_cache_bytes=10**6)
    assert engine.generate([]) == [] and engine.stats.num_steps == 2


def test_positions_of_a_slot_are_read_and_written_as_bytes() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = PagedCache(10**6, page_size=4)
    shapes = [((2, 3), torch.float32), ((1, 5), torch.bfloat16)]
    for layer, (shape, dtype) in enumerate(shapes):
        brought = torch.zeros(1, *shape, dtype=dtype)
        cache.layer((0, layer), brought, brought)
    tables = cache.allocate(cache.plan_pages([24, 24], num_slots=2))
    tables.grow(0, 19)
    positions = torch.arange(19)
    step = cache.places(Places((), 0, torch.zeros(19, dtype=torch.long), positions, 1, [19], 19))
    contents = [[torch.randn(19, *shape, generator=generator).to(dtype) for _ in range(2)] for shape, dtype in shapes]
    for layer, (key, value) in enumerate(contents):
        step.store(layer, key, value)
    content = cache.read(0, 3, 17)
    assert content.dtype == torch.uint8 and content.shape == (14 * 2 * (2 * 3 * 4 + 5 * 2),)
    assert torch.equal(content[: 14 * 24], contents[0][0][3:17].reshape(-1).view(torch.uint8))
    tables.grow(1, 17)
    cache.write(1, 3, 17, content)
    assert torch.equal(cache.read(1, 3, 17), content)
    assert torch.equal(
        cache.read(0, 0, 19), torch.cat([t.reshape(-1).view(torch.uint8) for pair in contents for t in pair])
    )


@pytest.mark.parametrize("seed", matrix(range(3), 0))
def test_random_settings_give_the_same_tokens(seed: int) -> None:
    model, rng = small_model(), random.Random(seed)
    for _ in range(2):
        params = replace(LONG, n=rng.randint(1, 3), max_new_tokens=rng.randint(20, 90), seed=rng.randint(0, 9))
        prompts = [[9] * rng.choice((0, 16, 20, 40)) + prompt for prompt in prompts_of(4, rng.randint(0, 9))]
        limits = [rng.randint(1, params.max_new_tokens) for _ in prompts]
        plain = GenerationEngine(model, max_slots=4).generate(prompts, params, token_limits=limits)
        engine = GenerationEngine(
            model, max_slots=rng.randint(1, 9), max_prefill_tokens=rng.choice((5, 30, 8192)),
            max_cache_bytes=bound_of(rng.randint(10, 22), longest=10),
        )  # fmt: skip
        assert tokens_of(engine.generate(prompts, params, token_limits=limits)) == tokens_of(plain)
