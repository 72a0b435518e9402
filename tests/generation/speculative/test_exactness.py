"""Speculation changes only the number of steps, compared with plain generation and enumerated distributions."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation import GenerationEngine, SamplingParams, Speculation
from lightning_realloc.generation.core.noise import sample_key
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.step import Draft, decode_rows
from lightning_realloc.generation.speculative import config as speculation
from lightning_realloc.generation.speculative.draft_model import ModelDrafter
from lightning_realloc.generation.speculative.verify import Rejection
from tests.generation.markov import VOCABULARY, target
from tests.generation.speculative.drafters import DRAFTERS, prompts_of, speculating, tokens_of
from tests.matrices import crossed, matrix
from tests.models import byte_tokenizer, tiny_model

SAMPLED = {
    "plain": SamplingParams(max_new_tokens=16, n=2, seed=3),
    "cut": SamplingParams(max_new_tokens=16, n=2, seed=3, temperature=0.7, top_p=0.9),
    "penalized": SamplingParams(max_new_tokens=16, n=2, seed=3, repetition_penalty=1.5, min_p=0.05),
    "early stops forbidden": SamplingParams(max_new_tokens=16, n=2, seed=3, min_new_tokens=5, stop_token_ids=(7, 11)),
}


DRAFTING = [name for name in DRAFTERS if name != "none"]
LIKE_OTHERS = ("ngram", "itself", "blocks", "random")
DEPTHS = [("none", 0), *zip(DRAFTING, itertools.cycle([8, 1, None]), strict=False)]
"""Each drafter with a depth that makes it draft."""


@pytest.mark.parametrize(("drafter", "depth"), matrix(itertools.product(DRAFTERS, [0, 1, 8, None]), *DEPTHS))
def test_greedy_tokens_are_those_of_generate_with_any_drafter(drafter: str, depth: int | None) -> None:
    params = SamplingParams(max_new_tokens=14, temperature=0)
    engine = speculating(target(), drafter, depth)
    for _ in range(2):  # the second time with a history
        assert tokens_of(engine.generate(prompts_of(6), params)) == greedy_by_generate()


@cache
def greedy_by_generate() -> list[tuple[int, ...]]:
    """Return the response of `generate` to every prompt on its own."""
    responses = []
    for prompt in prompts_of(6):
        ids = torch.tensor([prompt])
        output = target().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=14)
        responses.append(tuple(output[0, len(prompt) :].tolist()))
    return responses


@pytest.mark.parametrize(
    ("drafter", "rule"),
    crossed(
        DRAFTING,
        [*(("match", params) for params in SAMPLED), ("gumbel", "plain"), ("gumbel", "cut")],
    ),
)
def test_sampled_tokens_are_the_same_with_and_without_drafts(drafter: str, rule: tuple[str, str]) -> None:
    verification, params = rule
    model, prompts = copy.deepcopy(target()).double(), prompts_of(4)
    expected = tokens_without_drafts(verification, params)
    for depth in (3, None):
        engine = speculating(model, drafter, depth, verification)
        for _ in range(2):  # the second time with a history
            assert tokens_of(engine.generate(prompts, SAMPLED[params])) == expected


@cache
def tokens_without_drafts(verification: str, params: str) -> list[tuple[int, ...]]:
    """Return the responses to four prompts if nothing is drafted."""
    engine = speculating(copy.deepcopy(target()).double(), "none", 0, verification)
    return tokens_of(engine.generate(prompts_of(4), SAMPLED[params]))


def test_a_draft_by_the_target_itself_is_always_accepted() -> None:
    for verification in ("match", "gumbel", "reject"):
        engine = speculating(copy.deepcopy(target()).double(), "itself", 4, verification)
        engine.generate(prompts_of(3), SamplingParams(max_new_tokens=20, n=2, ignore_eos=True))
        # Twenty tokens a sample: four steps that take five each.
        assert engine.stats.row_steps == 6 * 4
        assert engine.stats.accepted_tokens == engine.stats.verified_tokens == 6 * 16


def test_drafts_of_text_that_repeats_save_steps() -> None:
    prompts, params = [[5, 6, 7, 8] * 8], SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
    plain = GenerationEngine(target())
    expected = plain.generate(prompts, params)
    engine = speculating(target(), "history", 8)
    engine.generate(prompts, params)
    assert tokens_of(engine.generate(prompts, params)) == tokens_of(expected)
    assert engine.stats.num_steps == math.ceil(40 / 9)  # the whole response is known: every step takes nine tokens
    assert plain.stats.num_steps == 40


# ---- the distribution of responses
HOT = SamplingParams(max_new_tokens=3, temperature=1.3, n=4000, ignore_eos=True)


def joint_law(model: PreTrainedModel, prompt: list[int], temperature: float) -> torch.Tensor:
    """Return the probability (V**3,) of every response of three tokens."""
    law = torch.ones(1)
    contexts = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(3):
            following = torch.softmax(model(contexts, use_cache=False).logits[:, -1].double() / temperature, -1)
            law = (law[:, None] * following).flatten()
            tokens = torch.arange(VOCABULARY).repeat(len(contexts))[:, None]
            contexts = torch.cat([contexts.repeat_interleave(VOCABULARY, 0), tokens], 1)
    return law


def penalized_law(model: PreTrainedModel, prompt: list[int], penalty: float) -> torch.Tensor:
    """Return the probability (V**2,) of every response of two tokens, as transformers' processor penalizes them."""
    penalize = RepetitionPenaltyLogitsProcessor(penalty)
    law, contexts = torch.ones(1), torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(2):
            logits = model(contexts, use_cache=False).logits[:, -1]
            law = (law[:, None] * torch.softmax(penalize(contexts, logits).double(), -1)).flatten()
            tokens = torch.arange(VOCABULARY).repeat(len(contexts))[:, None]
            contexts = torch.cat([contexts.repeat_interleave(VOCABULARY, 0), tokens], 1)
    return law


def probability_of_counts(responses: Sequence[Sequence[int]], law: torch.Tensor) -> float:
    """Return the p-value of the chi-square test; responses expected fewer than five times are one cell."""
    codes = torch.tensor([(a * VOCABULARY + b) * VOCABULARY + c for a, b, c in responses])
    counts = torch.bincount(codes, minlength=len(law)).double()
    expected = law * len(responses)
    often = expected >= 5
    cells = torch.cat([counts[often], counts[~often].sum()[None]])
    means = torch.cat([expected[often], expected[~often].sum()[None]])
    statistic = ((cells - means) ** 2 / means).sum()
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    assert freedom > 20, "too few cells to see a difference"
    return float(torch.special.gammaincc(freedom, statistic / 2))


def drawn(
    verification: str, drafter: str, seed: int, prompt: list[int], depth: int | None = 2
) -> list[tuple[int, ...]]:
    """Return responses to one prompt."""
    engine = speculating(target(), drafter, depth, verification, max_slots=512)
    return tokens_of(engine.generate([prompt], replace(HOT, seed=seed)))


@pytest.mark.parametrize(
    ("verification", "drafter"),
    [
        ("match", "model"),
        pytest.param("match", "history", marks=pytest.mark.exhaustive),
        ("gumbel", "model"),
        # Of drafters that look texts up, one is enough, and of those that draw from a model.
        *(pytest.param("reject", name, marks=[pytest.mark.exhaustive] * (name in LIKE_OTHERS)) for name in DRAFTING),
    ],
)
def test_responses_follow_the_distribution_of_the_target(verification: str, drafter: str) -> None:
    prompt = prompts_of(1, seed=1)[0]
    law = joint_law(target(), prompt, HOT.temperature)
    # With one seed the same test refuses both wrong rules below.
    assert probability_of_counts(drawn(verification, drafter, 0, prompt), law) > 1e-3


@pytest.mark.parametrize(
    ("verification", "drafter"),
    matrix([("match", "model"), ("reject", "model"), ("reject", "random")], ("match", "model"), ("reject", "random")),
)
def test_a_repetition_penalty_counts_earlier_drafted_tokens(verification: str, drafter: str) -> None:
    prompt = prompts_of(1, seed=1)[0]
    law = penalized_law(target(), prompt, 2.0)
    engine = speculating(target(), drafter, 1, verification, max_slots=512)
    params = SamplingParams(max_new_tokens=2, n=4000, ignore_eos=True, repetition_penalty=2.0)
    responses = [(0, *response) for response in tokens_of(engine.generate([prompt], params))]
    padded = torch.cat([law, torch.zeros(VOCABULARY**3 - len(law))])
    assert probability_of_counts(responses, padded) > 1e-3


class KeepsTheTarget(Rejection):
    """A wrong rule: the token after a rejected draft is drawn from the target, not from the residual distribution."""

    def _finals(self, weights: Any, starts: Any, rows: Any, accepted: Any) -> list[int]:
        bare = [row._replace(laws=[torch.zeros(VOCABULARY)] * len(row.laws)) for row in rows]
        return super()._finals(weights, starts, bare, accepted)


class Lenient(Rejection):
    """A wrong rule: drafts are accepted more often than their probability ratio allows."""

    def _num_accepted(self, weights: Any, starts: Any, rows: Any) -> list[int]:
        return super()._num_accepted(1.65 * weights, starts, rows)


@pytest.mark.parametrize("wrong", matrix([KeepsTheTarget, Lenient], Lenient))
def test_the_test_of_the_distribution_detects_wrong_rules(
    wrong: type[Rejection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "Rejection", wrong)
    prompt = prompts_of(1, seed=1)[0]
    law = joint_law(target(), prompt, HOT.temperature)
    assert probability_of_counts(drawn("reject", "model", 0, prompt), law) < 1e-6


def test_rejection_is_biased_if_a_draft_is_dropped_because_of_its_own_token() -> None:
    # Target (.5, .5), drafter (.9, .1). A draft of token 0 is accepted with probability 5/9: 0.9 * 5/9 = 0.5 of all
    # responses; 0.4 become token 1. If drafts of token 1 (0.1) are dropped, half of those become 0: 0.55 in all.
    params = SamplingParams()
    rule = Rejection(params)
    law, count = torch.tensor([0.9, 0.1]), 20_000
    samples = [Sample(i, 0, ModelInput((0,)), 4, sample_key(0, i)) for i in range(count)]
    tokens, _ = rule.draw_drafts(law.log().expand(count, 2), samples, 0)
    whole = [Draft([token], laws=[law]) for token in tokens]
    for drafts, expected in ((whole, 0.5), ([d if d.tokens == [0] else d.cut(0) for d in whole], 0.55)):
        logits = torch.zeros(sum(len(draft) + 1 for draft in drafts), 2)
        firsts = [own[0] for own, _ in rule.emit(logits, decode_rows(samples, drafts, params), None)]
        assert abs(firsts.count(0) / count - expected) < 4 * 0.5 / count**0.5


def test_adaptive_rejection_without_a_drafter_draws_as_with_no_drafts() -> None:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    adaptive, none = (
        GenerationEngine(
            target(), speculation=Speculation(drafter="none", verification="reject", num_draft_tokens=depth)
        ).generate(prompts_of(3), params)
        for depth in (None, 0)
    )
    assert tokens_of(adaptive) == tokens_of(none)


def test_a_clock_that_stands_still_stops_no_generation() -> None:
    engine = speculating(target(), "ngram", None, clock=lambda: 0.0)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    assert [len(completion.token_ids) for completion in engine.generate(prompts_of(3), params)] == [40] * 3


@pytest.mark.parametrize("drafter", ["model", "history"])
def test_adaptive_rejection_drafts_after_steps_without_drafts(drafter: str) -> None:
    # Every step takes equally long, so that drafts pay after the first plain steps.
    engine = speculating(target(), drafter, None, "reject", clock=itertools.count().__next__)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    completions = engine.generate(prompts_of(6), params)
    assert [len(completion.token_ids) for completion in completions] == [60] * 6
    assert engine.stats.accepted_tokens > 0


# ---- log-probabilities, slots and stops
@pytest.mark.parametrize(
    ("verification", "drafter"), crossed(["match", "gumbel", "reject"], ["random", "history", "model"])
)
def test_logprobs_are_those_of_a_full_forward(verification: str, drafter: str) -> None:
    prompts, temperature = prompts_of(5), 0.8
    engine = speculating(target(), drafter, 5, verification)
    params = SamplingParams(max_new_tokens=20, n=2, temperature=temperature, top_p=0.95)
    engine.generate(prompts, params)
    for completion in engine.generate(prompts, params):
        prompt, response = prompts[completion.prompt_index], list(completion.token_ids)
        assert len(completion.logprobs) == len(response)
        with torch.no_grad():
            logits = target()(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


@cache
def one_by_one() -> tuple[SamplingParams, list[int], dict[int, tuple[int, ...]]]:
    """Return settings and limits of nine prompts, and the tokens by sample id of plain generation in one slot."""
    params, limits = SamplingParams(max_new_tokens=14, n=2, seed=7), [3, 14, 9, 1, 12, 6, 14, 2, 11]
    plain = GenerationEngine(copy.deepcopy(target()).double(), max_slots=1)
    made = plain.generate(prompts_of(9), params, token_limits=limits)
    return params, limits, {completion.sample_id: completion.token_ids for completion in made}


@pytest.mark.parametrize("drafter", matrix(["random", "history", "model", "blocks"], "model"))
def test_samples_do_not_depend_on_slots_order_or_other_samples(drafter: str) -> None:
    model, prompts = copy.deepcopy(target()).double(), prompts_of(9)
    params, limits, expected = one_by_one()
    order = random.Random(1).sample(range(9), 9)
    ids = [2 * index + copy_ for index in order for copy_ in range(2)]
    for slots in (1, 3, 64):
        completions = speculating(model, drafter, 4, max_slots=slots).generate(
            [prompts[i] for i in order], params, sample_ids=ids, token_limits=[limits[i] for i in order]
        )
        assert {completion.sample_id: completion.token_ids for completion in completions} == expected


@pytest.mark.parametrize("verification", ["match", "reject"])
def test_nothing_follows_a_stop_within_an_accepted_draft(verification: str) -> None:
    prompts = prompts_of(6)
    stop = (9, 17)
    engine = speculating(copy.deepcopy(target()).double(), "itself", 8, verification)
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=21, n=3, stop_token_ids=stop, ignore_eos=True))
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        last = completion.token_ids[-1]
        assert not set(completion.token_ids[:-1]) & set(stop)
        assert (last in stop) == (completion.finish_reason == "stop")
        assert len(completion.token_ids) == len(completion.logprobs) <= 21
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 21


def test_a_stop_string_ends_a_response_within_an_accepted_draft() -> None:
    model, tokenizer = tiny_model("llama", vocab_size=259), byte_tokenizer()
    params = SamplingParams(max_new_tokens=30, temperature=2.0, n=8, stop_strings=("a", "7"))
    plain = GenerationEngine(model, tokenizer=tokenizer).generate([[70, 71]], params)
    engine = GenerationEngine(
        model, tokenizer=tokenizer, speculation=Speculation(num_draft_tokens=6), drafter=ModelDrafter(model, model)
    )
    assert tokens_of(engine.generate([[70, 71]], params)) == tokens_of(plain)
    assert engine.stats.accepted_tokens > 20
