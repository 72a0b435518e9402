"""Draft models and first blocks: contexts, slots, learning, and models that cannot draft."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams, Speculation
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.step import Draft, PrefillChunk
from lightning_realloc.generation.speculative import draft_model
from lightning_realloc.generation.speculative.draft_distillation import Distillation, Example
from lightning_realloc.generation.speculative.draft_model import BlocksDrafter, ModelDrafter, first_blocks
from tests.generation.markov import VOCABULARY, drafter_model, markov_text, target
from tests.generation.speculative.drafters import prompts_of, tokens_of
from tests.matrices import crossed, matrix
from tests.models import tiny_model


class AllBlocksDrafter(BlocksDrafter):
    """Drafts with all blocks, and so like the target if it reads the target's cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, 1)
        self.model = model


@pytest.mark.parametrize(("slots", "max_cache_bytes"), crossed([3, 12], [90_000, None]))
def test_blocks_draft_on_the_keys_and_values_of_the_target(max_cache_bytes: int | None, slots: int) -> None:
    # Apart from rounding they draw the target's tokens, also after moves of slots, copies of prompts and shared pages.
    model, params = target(), SamplingParams(max_new_tokens=60, n=2, ignore_eos=True)
    engine = GenerationEngine(
        model, speculation=Speculation(num_draft_tokens=4), drafter=AllBlocksDrafter(model), max_slots=slots,
        max_cache_bytes=max_cache_bytes,
    )  # fmt: skip
    limits = [60, 6, 41, 16, 60, 1]
    completions = engine.generate(prompts_of(6), params, token_limits=limits)
    plain = GenerationEngine(model).generate(prompts_of(6), params, token_limits=limits)
    assert tokens_of(completions) == tokens_of(plain)
    # A sample gets one token in the step that reads its prompt, then five a step while that many are left.
    steps = {1: 1, 6: 2, 16: 4, 41: 9, 60: 13}
    alone = 2 * sum(steps[limit] for limit in limits)
    most = alone + 2 * engine.stats.num_preemptions
    assert alone <= engine.stats.row_steps <= most
    assert engine.stats.accepted_tokens == engine.stats.verified_tokens
    assert (engine.stats.num_preemptions > 0) == (max_cache_bytes is not None)


def test_blocks_need_no_cache_of_their_own() -> None:
    model, params = target(), SamplingParams(max_new_tokens=12, n=2, ignore_eos=True)
    plain = GenerationEngine(model, max_cache_bytes=80_000)
    drafting = GenerationEngine(
        model, max_cache_bytes=80_000,
        speculation=Speculation(drafter="blocks", draft_blocks=1, num_draft_tokens=3),
    )  # fmt: skip
    for engine in (plain, drafting):
        engine.generate(prompts_of(4), params)
    assert drafting.stats.cache_bytes == plain.stats.cache_bytes
    assert drafting.stats.verified_tokens > 0


def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_reaches() -> None:
    model = target()
    short = tiny_model("llama", vocab_size=VOCABULARY, max_position_embeddings=16)
    engine = GenerationEngine(model, speculation=Speculation(num_draft_tokens=3), drafter=ModelDrafter(short, model))
    params = SamplingParams(max_new_tokens=30, n=2)
    prompts = prompts_of(3)
    assert tokens_of(engine.generate(prompts, params)) == tokens_of(GenerationEngine(model).generate(prompts, params))
    assert engine.stats.drafted_tokens > 0


class Watched(ModelDrafter):
    """Checks that it holds no more positions of a sample than there are."""

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> list[Draft]:
        assert all(0 <= filled <= sample.position for filled, sample in zip(self._filled, running, strict=False))
        return super().propose(running, limits)


def test_a_draft_model_drops_a_response_whose_slot_is_reused() -> None:
    drafter = Watched(drafter_model(), target())
    engine = GenerationEngine(target(), max_slots=1, speculation=Speculation(num_draft_tokens=2), drafter=drafter)
    engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=12, n=3, ignore_eos=True))
    assert engine.stats.drafted_tokens > 0


def test_tokens_that_a_draft_model_missed_are_read_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "_MOST_READ", 10)
    prompts = [tuple(range(25)), (1,), tuple(range(4)), tuple(range(15))]
    given = [PrefillChunk(tokens, (slot,), begin=slot) for slot, tokens in enumerate(prompts)]
    pieces = draft_model._in_pieces(given)
    assert [sum(len(part.tokens) for part in piece) for piece in pieces] == [10, 10, 10, 10, 5]
    for slot, tokens in enumerate(prompts):
        parts = [part for piece in pieces for part in piece if part.slots == (slot,)]
        assert tuple(itertools.chain(*(part.tokens for part in parts))) == tokens
        begins = itertools.accumulate((len(part.tokens) for part in parts), initial=slot)
        assert [part.begin for part in parts] == list(begins)[:-1]
    assert draft_model._in_pieces([]) == [[]]
    # Drafts after such prompts are as good as after others.
    drafts = GenerationEngine(
        target(), speculation=Speculation(num_draft_tokens=2), drafter=ModelDrafter(target(), target())
    )
    long = markov_text(3, 40, seed=8).tolist()
    completions = drafts.generate(long, SamplingParams(max_new_tokens=8))
    assert tokens_of(completions) == tokens_of(
        GenerationEngine(target()).generate(long, SamplingParams(max_new_tokens=8))
    )
    assert drafts.stats.accepted_tokens == drafts.stats.verified_tokens


@pytest.mark.parametrize(
    ("depth", "max_cache_bytes"), matrix(itertools.product([3, None], [None, 300_000]), (None, 300_000))
)
def test_a_draft_model_with_learnt_positions_drafts_as_far_as_they_reach(
    depth: int | None, max_cache_bytes: int | None
) -> None:
    model = tiny_model("gpt2", vocab_size=VOCABULARY)
    short = tiny_model("gpt2", vocab_size=VOCABULARY, n_positions=24, seed=1)
    learning = Speculation(drafter="model", draft_model=short, draft_learning_rate=1e-3, num_draft_tokens=depth)
    engine = GenerationEngine(model, max_slots=4, speculation=learning, max_cache_bytes=max_cache_bytes)
    plain = GenerationEngine(model)
    params = SamplingParams(max_new_tokens=40, n=2, ignore_eos=True)
    # Some prompts are longer than the draft model's context, some samples exceed it later, others start in used slots.
    prompts = [*prompts_of(3), *(row[:30] for row in markov_text(2, 30, seed=5).tolist()), *prompts_of(3, seed=1)]
    limits = [40, 8, 12, 40, 20, 5, 8, 12]
    for _ in range(2):
        completions = engine.generate(prompts, params, token_limits=limits)
        assert tokens_of(completions) == tokens_of(plain.generate(prompts, params, token_limits=limits))
    assert depth is None or engine.stats.drafted_tokens > 0


@pytest.mark.parametrize("verification", ["match", "gumbel"])
def test_a_draft_model_that_diverged_loses_only_its_drafts(verification: Any) -> None:
    small = tiny_model("llama", vocab_size=VOCABULARY)
    torch.nn.init.constant_(small.model.norm.weight, math.nan)
    settings = {"drafter": "model", "draft_model": small, "num_draft_tokens": 3, "verification": verification}
    engine = GenerationEngine(target(), speculation=Speculation(**settings))
    plain = GenerationEngine(target(), speculation=Speculation(**settings | {"num_draft_tokens": 0}))
    params = SamplingParams(max_new_tokens=12, n=2)
    prompts = prompts_of(3)
    assert tokens_of(engine.generate(prompts, params)) == tokens_of(plain.generate(prompts, params))
    assert engine.stats.drafted_tokens > 0


def test_a_step_of_distillation_without_a_finite_gradient_is_skipped() -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY)
    distillation = Distillation(model, learning_rate=1e-2)
    rows = [(tuple(row[:10]), tuple(row[10:])) for row in markov_text(4, 30, seed=3).tolist()]
    kept = model.model.norm.weight.detach().clone()
    torch.nn.init.constant_(model.model.norm.weight, math.inf)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert distillation.learn(rows) is None
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with torch.no_grad():
        model.model.norm.weight.copy_(kept)
    assert distillation.learn(rows) is not None
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])


def test_distillation_passes_all_learnt_weights_to_spread() -> None:
    spread: list[Any] = []
    model = tiny_model("llama", vocab_size=VOCABULARY)
    Distillation(model, learning_rate=1e-2, spread=spread.extend).learn([((5, 6), (7, 8))])
    assert [tensor.data_ptr() for tensor in spread] == [weight.data_ptr() for weight in model.parameters()]


def test_a_draft_model_learns_in_inference_mode() -> None:
    small = tiny_model("llama", vocab_size=VOCABULARY)
    learning = Speculation(drafter="model", draft_model=small, draft_learning_rate=1e-2, num_draft_tokens=2)
    with torch.inference_mode():
        engine = GenerationEngine(target(), speculation=learning)
        engine.generate(prompts_of(3), SamplingParams(max_new_tokens=6))
    learnt: Any = engine._decoding.drafter
    assert any(not torch.equal(weight, small.state_dict()[name]) for name, weight in learnt.model.state_dict().items())


def test_nothing_is_learnt_from_a_generation_that_failed() -> None:
    small = tiny_model("llama", vocab_size=VOCABULARY)
    learning = Speculation(drafter="model", draft_model=small, draft_learning_rate=1e-2, num_draft_tokens=2)
    engine = GenerationEngine(target(), max_slots=1, speculation=learning)
    learnt: Any = engine._decoding.drafter
    before = {name: weight.clone() for name, weight in learnt.model.state_dict().items()}

    def fail(_: Completion) -> None:
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        engine.generate(prompts_of(3), SamplingParams(max_new_tokens=6), on_finished=fail)
    assert all(torch.equal(weight, before[name]) for name, weight in learnt.model.state_dict().items())
    engine.generate(prompts_of(3), SamplingParams(max_new_tokens=6))
    assert any(not torch.equal(weight, before[name]) for name, weight in learnt.model.state_dict().items())


@pytest.mark.exhaustive  # what it learns from: below
def test_a_draft_model_that_learns_drafts_better_and_changes_no_token() -> None:
    small = tiny_model("llama", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    before = {name: weight.clone() for name, weight in small.state_dict().items()}
    learning = Speculation(drafter="model", draft_model=small, draft_learning_rate=1e-2, num_draft_tokens=3)
    engine, plain = GenerationEngine(target(), speculation=learning), GenerationEngine(target())
    prompts, rates = prompts_of(24), []
    for seed in range(5):  # the same prompts, so that little data is enough
        params = SamplingParams(max_new_tokens=24, n=4, seed=seed, temperature=0.2)
        assert tokens_of(engine.generate(prompts, params)) == tokens_of(plain.generate(prompts, params))
        rates.append(engine.stats.generated_tokens / engine.stats.row_steps)
    # A model with random weights hits one token in 32.
    assert rates[0] < 1.2
    assert rates[-1] > rates[0] + 0.3
    assert all(torch.equal(weight, before[name]) for name, weight in small.state_dict().items())  # a copy learns


def test_drafters_of_two_groups_learn_once_from_the_responses_of_both() -> None:
    first = ModelDrafter(drafter_model(), target(), distillation=(learning := _Listing()))
    second = first.for_other_samples()
    samples = [Sample(n, n, ModelInput((5, n)), max_new_tokens=4, key=n, token_ids=[7, 8]) for n in range(3)]
    for drafter in (first, second):
        drafter.begin(samples, Speculation().rule(SamplingParams()), num_slots=2)
    for drafter, sample in zip((first, second, first), samples, strict=True):
        drafter.finished(sample)
    second.end()
    assert not learning.seen  # the model still attends through the first one's slots
    first.end()
    first.begin(samples, Speculation().rule(SamplingParams()), num_slots=2)
    first.end()
    assert learning.seen == [[((5, number), (7, 8)) for number in range(3)], []]


class _Listing(Distillation):
    """Lists what it is to learn from."""

    def __init__(self) -> None:
        self.seen: list[Sequence[Example]] = []

    def learn(self, examples: Sequence[Example]) -> None:
        self.seen.append(examples)


def test_distillation_learns_only_from_the_last_responses() -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    distillation = Distillation(model, learning_rate=1e-2, most_tokens=64 * 30)
    losses = []
    for seed in range(12):
        rows = markov_text(96, 40, seed=seed).tolist()
        # The first third exceeds most_tokens; it is noise that cannot be learnt.
        noise = [(tuple(row[:10]), tuple(reversed(row[10:]))) for row in rows[:32]]
        losses.append(distillation.learn([*noise, *((tuple(row[:10]), tuple(row[10:])) for row in rows[32:])]))
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.3)  # random weights predict all tokens alike
    assert losses[-1] < losses[0] - 0.5
    assert distillation.learn([]) is None


# ---- errors
def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(GenerationError, match=r"vocabulary of 128 tokens and the target one of 32; .* tokenizer"):
        GenerationEngine(target(), speculation=Speculation(drafter="model", draft_model=tiny_model("llama")))


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_drafter_of_all_or_no_blocks_is_refused(count: int) -> None:
    with pytest.raises(GenerationError, match=f"draft_blocks={count} must lie between 1 and 1, below .* 2"):
        first_blocks(target(), count)


def test_a_model_of_one_block_cannot_draft_with_its_first_blocks() -> None:
    one = tiny_model("llama", num_hidden_layers=1)
    with pytest.raises(GenerationError, match=r"two blocks at least .* LlamaForCausalLM has 1; draft by 'history'"):
        GenerationEngine(one, speculation=Speculation(drafter="blocks", draft_blocks=1))


def test_a_draft_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match=f"draft_model='{tmp_path}' could not be loaded"):
        GenerationEngine(target(), speculation=Speculation(drafter="model", draft_model=tmp_path))
