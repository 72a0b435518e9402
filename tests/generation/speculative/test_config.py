"""Speculation changes the number of steps alone: compared with plain generation and with enumerated distributions."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams, Speculation
from lightning_realloc.generation.core.noise import sample_key
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.forward.packed_step import PrefillChunk
from lightning_realloc.generation.speculative import config as speculation
from lightning_realloc.generation.speculative import draft_model
from lightning_realloc.generation.speculative.draft_distillation import Distillation
from lightning_realloc.generation.speculative.draft_model import BlocksDrafter, ModelDrafter, first_blocks
from lightning_realloc.generation.speculative.drafter import Draft, Drafter
from lightning_realloc.generation.speculative.lookup import HistoryDrafter, NgramDrafter
from lightning_realloc.generation.speculative.speculator import Speculator
from lightning_realloc.generation.speculative.verify import KeyedDraws, Rejection
from tests.generation.markov import VOCABULARY, drafter_model, markov_text, target
from tests.models import byte_tokenizer, tiny_model


class RandomDrafter(Drafter):
    """Drafts anything, of any length within the limits: no output may depend on it."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._vocabulary = vocabulary

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> list[Draft]:
        drafts = []
        for limit in limits:
            length = self._rng.randint(0, max(limit, 0))
            tokens = [self._rng.choice((0, self._vocabulary - 1, 5, 9)) for _ in range(length)]
            laws = [(token,) for token in tokens]
            drafts.append(Draft(tokens, [("random",)] * length, laws))
        return drafts


DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "none": lambda model: Drafter(),
    "random": lambda model: RandomDrafter(VOCABULARY),
    "ngram": lambda model: NgramDrafter(),
    "history": lambda model: HistoryDrafter(),
    "model": lambda model: ModelDrafter(drafter_model(), model),
    "blocks": lambda model: BlocksDrafter(model, 1),
    "itself": lambda model: ModelDrafter(model, model),
}
SAMPLED = {
    "plain": SamplingParams(max_new_tokens=16, n=2, seed=3),
    "cut": SamplingParams(max_new_tokens=16, n=2, seed=3, temperature=0.7, top_p=0.9),
    "penalized": SamplingParams(max_new_tokens=16, n=2, seed=3, repetition_penalty=1.5, min_p=0.05),
    "early stops forbidden": SamplingParams(max_new_tokens=16, n=2, seed=3, min_new_tokens=5, stop_token_ids=(7, 11)),
}


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of Markov text, of 1 to 20 tokens."""
    rng = random.Random(seed)
    return [row[: rng.randint(1, 20)] for row in markov_text(count, 20, seed=99 + seed).tolist()]


def speculating(
    model: PreTrainedModel, drafter: str, depth: int | None, verification: Any = "match", **settings: Any
) -> GenerationEngine:
    """Return an engine that drafts as the table says."""
    return GenerationEngine(
        model,
        speculation=Speculation(drafter="none", num_draft_tokens=depth, verification=verification),
        drafter=DRAFTERS[drafter](model),
        **{"max_slots": 4, **settings},
    )


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_tokens_are_those_of_generate_with_any_drafter(drafter: str) -> None:
    model, prompts = target(), prompts_of(6)
    params = SamplingParams(max_new_tokens=20, temperature=0)
    for depth in (0, 1, 4, 8, None):
        engine = speculating(model, drafter, depth)
        for _ in range(2):  # the second time with a history
            assert tokens_of(engine.generate(prompts, params)) == greedy_by_generate()


@cache
def greedy_by_generate() -> list[tuple[int, ...]]:
    """Return what `generate` makes of every prompt on its own."""
    responses = []
    for prompt in prompts_of(6):
        ids = torch.tensor([prompt])
        output = target().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
        responses.append(tuple(output[0, len(prompt) :].tolist()))
    return responses


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "none"])
@pytest.mark.parametrize(
    ("verification", "params"), [*(("match", params) for params in SAMPLED), ("gumbel", "plain"), ("gumbel", "cut")]
)
def test_sampled_tokens_are_the_same_with_and_without_drafts(drafter: str, verification: str, params: str) -> None:
    model, prompts = copy.deepcopy(target()).double(), prompts_of(4)
    expected = tokens_of(speculating(model, "none", 0, verification).generate(prompts, SAMPLED[params]))
    for depth in (3, None):
        engine = speculating(model, drafter, depth, verification)
        for _ in range(2):  # the second time with a history
            assert tokens_of(engine.generate(prompts, SAMPLED[params])) == expected


class AllBlocksDrafter(BlocksDrafter):
    """Drafts by all blocks: as the target draws, if it finds what the target keeps."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, 1)
        self.model = model


@pytest.mark.parametrize("max_cache_bytes", [None, 90_000], ids=["slots", "pages"])
@pytest.mark.parametrize("slots", [3, 12])
def test_blocks_draft_on_the_keys_and_values_of_the_target(max_cache_bytes: int | None, slots: int) -> None:
    # Rounding aside they draw what the target draws, wherever slots move, prompts are copied and pages are shared.
    model, params = target(), SamplingParams(max_new_tokens=60, n=2, ignore_eos=True)
    engine = GenerationEngine(
        model, speculation=Speculation(num_draft_tokens=4), drafter=AllBlocksDrafter(model), max_slots=slots,
        max_cache_bytes=max_cache_bytes,
    )  # fmt: skip
    limits = [60, 6, 41, 16, 60, 1]
    completions = engine.generate(prompts_of(6), params, token_limits=limits)
    plain = GenerationEngine(model).generate(prompts_of(6), params, token_limits=limits)
    assert tokens_of(completions) == tokens_of(plain)
    # A sample whose prompt is read gets one token; then each step takes five, as long as so many are left.
    steps = {1: 1, 6: 2, 16: 4, 41: 9, 60: 13}
    alone = 2 * sum(steps[limit] for limit in limits)
    most = alone + 2 * engine.stats.num_preemptions
    assert alone <= engine.stats.row_steps <= most
    assert engine.stats.accepted_tokens == engine.stats.verified_tokens
    assert (engine.stats.num_preemptions > 0) == (max_cache_bytes is not None)


def test_blocks_keep_nothing_of_their_own() -> None:
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


def test_a_draft_by_the_target_itself_always_stands() -> None:
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


# ---- the law of what is drawn
HOT = SamplingParams(max_new_tokens=3, temperature=1.3, n=6000, ignore_eos=True)


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
    [("match", "model"), ("match", "history"), ("gumbel", "model"), ("reject", "model"), ("reject", "history"),
     ("reject", "random")],
)  # fmt: skip
def test_responses_follow_the_law_of_the_target(verification: str, drafter: str) -> None:
    prompt = prompts_of(1, seed=1)[0]
    law = joint_law(target(), prompt, HOT.temperature)
    for seed in (0, 1, 2):
        assert probability_of_counts(drawn(verification, drafter, seed, prompt), law) > 1e-3


@pytest.mark.parametrize(("verification", "drafter"), [("match", "model"), ("reject", "model"), ("reject", "random")])
def test_a_penalty_counts_what_is_drafted_before(verification: str, drafter: str) -> None:
    prompt = prompts_of(1, seed=1)[0]
    law = penalized_law(target(), prompt, 2.0)
    engine = speculating(target(), drafter, 1, verification, max_slots=512)
    params = SamplingParams(max_new_tokens=2, n=6000, ignore_eos=True, repetition_penalty=2.0)
    responses = [(0, *response) for response in tokens_of(engine.generate([prompt], params))]
    padded = torch.cat([law, torch.zeros(VOCABULARY**3 - len(law))])
    assert probability_of_counts(responses, padded) > 1e-3


class KeepsTheTarget(Rejection):
    """A wrong rule: what takes a fallen draft's place is drawn from the target, not from what is left of it."""

    def _finals(self, weights: Any, starts: Any, samples: Any, drafts: Any, standing: Any) -> list[int]:
        bare = [Draft(draft.tokens, draft.kinds, [torch.zeros(VOCABULARY)] * len(draft)) for draft in drafts]
        return super()._finals(weights, starts, samples, bare, standing)


class Lenient(Rejection):
    """A wrong rule: drafts stand more often than their ratio says."""

    def _num_accepted(self, weights: Any, starts: Any, samples: Any, drafts: Any) -> list[int]:
        return super()._num_accepted(1.65 * weights, starts, samples, drafts)


@pytest.mark.parametrize("wrong", [KeepsTheTarget, Lenient])
def test_the_test_of_the_law_sees_rules_that_are_wrong(wrong: type[Rejection], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "Rejection", wrong)
    prompt = prompts_of(1, seed=1)[0]
    law = joint_law(target(), prompt, HOT.temperature)
    assert probability_of_counts(drawn("reject", "model", 0, prompt), law) < 1e-6


def test_rejection_is_biased_where_a_draft_is_dropped_for_its_own_token() -> None:
    # Target (.5, .5), drafter (.9, .1). Verified only when it is token 0, it stands with 5/9: 0.9 * 5/9 = 0.5 of all
    # responses, and falls to token 1 for 0.4. Dropped when it is token 1 (0.1), half of those become 0: 0.55 in all.
    rule = Rejection(SamplingParams())
    law, count = torch.tensor([0.9, 0.1]), 20_000
    samples = [Sample(i, 0, [0], 4, sample_key(0, i)) for i in range(count)]
    tokens = rule.draw_drafts(law.log().expand(count, 2), samples, 0).tokens
    whole = [Draft([token], ["kind"], [law]) for token in tokens]
    for drafts, expected in ((whole, 0.5), ([d if d.tokens == [0] else d.cut(0) for d in whole], 0.55)):
        logits = torch.zeros(sum(len(draft) + 1 for draft in drafts), 2)
        firsts = [own[0] for own, _ in rule.emit(logits, samples, drafts, None)]
        assert abs(firsts.count(0) / count - expected) < 4 * 0.5 / count**0.5


def test_a_drafter_written_for_earlier_releases_drafts_the_same_and_warns() -> None:
    class Earlier(Drafter):
        def propose(self, running: Any, limits: Any, chance: Any, least_survivals: Any) -> list[Draft]:  # type: ignore[override]
            assert chance(("any", 1)) == 1.0 and list(least_survivals) == [0.0] * len(limits)
            return [Draft([5], [("any", 1)]).cut(limit) for limit in limits]

    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    fixed = Speculation(drafter="none", num_draft_tokens=2)
    with pytest.warns(DeprecationWarning, match=r"Earlier.propose takes chance .* propose\(self, running"):
        engine = GenerationEngine(target(), speculation=fixed, drafter=Earlier())
    plain = GenerationEngine(target())
    assert tokens_of(engine.generate(prompts_of(3), params)) == tokens_of(plain.generate(prompts_of(3), params))
    assert engine.stats.drafted_tokens > 0


@pytest.mark.parametrize("base", [Drafter, HistoryDrafter])
def test_methods_under_the_names_of_earlier_releases_are_called_and_warn(base: type[Drafter]) -> None:
    with pytest.warns(DeprecationWarning) as warned:

        class Earlier(base):  # type: ignore[misc, valid-type]
            def is_acquainted(self, samples: Sequence[Sample]) -> bool:
                assert not super().is_acquainted(samples)
                return True

            def hear(self, news: Any) -> None:
                super().hear(news)
                self.heard = list(news)

    assert [str(each.message).split(",")[0] for each in warned] == [
        "Earlier.is_acquainted is now called has_seen_prompts",
        "Earlier.hear is now called receive_news",
    ]
    drafter = Earlier()
    assert drafter.has_seen_prompts([Sample(0, 0, [5], 4, 0)])
    drafter.receive_news([((5,), (1,))])
    assert drafter.heard == [((5,), (1,))]


def test_methods_under_their_own_names_are_found_by_those_of_earlier_releases() -> None:
    drafter = HistoryDrafter()
    drafter.hear([((5,), (1,))])
    assert drafter.is_acquainted([Sample(0, 0, [5], 4, 0)])


def test_adaptive_rejection_refuses_a_drafter_whose_lengths_depend_on_the_tokens_left_out() -> None:
    class Anticipating(RandomDrafter):
        anticipates = True

    for depth, verification in ((3, "reject"), (None, "match")):
        speculation = Speculation(drafter="none", verification=verification, num_draft_tokens=depth)  # type: ignore[arg-type]
        GenerationEngine(target(), speculation=speculation, drafter=Anticipating(VOCABULARY)).generate([[5]])
    adaptive = Speculation(drafter="none", verification="reject")
    engine = GenerationEngine(target(), speculation=adaptive, drafter=Anticipating(VOCABULARY))
    with pytest.raises(GenerationError, match=r"that of Anticipating may, by anticipates=True; use verification='mat"):
        engine.generate([[5]])


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


def test_drafting_is_tried_in_steps_that_read_no_prompts_until_it_pays() -> None:
    # Others are not measured: with a queue, drafting in vain would last as long as that does.
    now_s = 0.0
    speculator = Speculator(Speculation(drafter="none"), RandomDrafter(VOCABULARY), clock=lambda: now_s)
    samples = [Sample(i, i, [5], 10_000, sample_key(0, i)) for i in range(4)]
    speculator.begin(samples, SamplingParams(), 4)

    class AllAccepted(KeyedDraws):
        def emit(self, logits: Any, samples: Any, drafts: Any, forbidden: Any) -> Any:
            return [([*draft.tokens, 1], [0.0] * (len(draft) + 1)) for draft in drafts]

    speculator._rule = AllAccepted(SamplingParams())

    def num_drafted(being_read: set[int]) -> int:
        nonlocal now_s
        drafts = speculator.propose(samples, being_read, is_tail=True)
        now_s += 10.0
        speculator.emit(torch.empty(0), samples, None)
        speculator.end_step(is_typical=not being_read)
        return sum(map(len, drafts))

    assert not any(num_drafted(set()) for _ in range(7))
    assert not any(num_drafted({3}) for _ in range(100))
    assert sum(num_drafted(set()) for _ in range(40))
    assert sum(num_drafted({3}) for _ in range(40))


@pytest.mark.parametrize("drafter", ["model", "history"])
def test_adaptive_rejection_drafts_after_steps_without_drafts(drafter: str) -> None:
    # Every step takes a tick, whatever it reads: after the first plain steps drafts pay.
    engine = speculating(target(), drafter, None, "reject", clock=itertools.count().__next__)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    completions = engine.generate(prompts_of(6), params)
    assert [len(completion.token_ids) for completion in completions] == [60] * 6
    assert engine.stats.accepted_tokens > 0


# ---- the rest of what a response is
@pytest.mark.parametrize("verification", ["match", "gumbel", "reject"])
@pytest.mark.parametrize("drafter", ["random", "history", "model"])
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


@pytest.mark.parametrize("drafter", ["random", "history", "model", "blocks"])
def test_samples_do_not_depend_on_slots_order_or_company(drafter: str) -> None:
    model, prompts = copy.deepcopy(target()).double(), prompts_of(9)
    params = SamplingParams(max_new_tokens=20, n=2, seed=7)
    limits = [3, 20, 9, 1, 14, 6, 20, 2, 11]
    plain = GenerationEngine(model, max_slots=1).generate(prompts, params, token_limits=limits)
    expected = {completion.sample_id: completion.token_ids for completion in plain}
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


def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_reaches() -> None:
    model = target()
    short = tiny_model("llama", vocab_size=VOCABULARY, max_position_embeddings=16)
    engine = GenerationEngine(model, speculation=Speculation(num_draft_tokens=3), drafter=ModelDrafter(short, model))
    params = SamplingParams(max_new_tokens=30, n=2)
    prompts = prompts_of(3)
    assert tokens_of(engine.generate(prompts, params)) == tokens_of(GenerationEngine(model).generate(prompts, params))
    assert engine.stats.drafted_tokens > 0


class Watched(ModelDrafter):
    """Looks whether it holds no more of a sample than there is."""

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> list[Draft]:
        assert all(0 <= filled <= sample.position for filled, sample in zip(self._filled, running, strict=False))
        return super().propose(running, limits)


def test_a_draft_model_forgets_a_response_whose_slot_another_one_takes_over() -> None:
    drafter = Watched(drafter_model(), target())
    engine = GenerationEngine(target(), max_slots=1, speculation=Speculation(num_draft_tokens=2), drafter=drafter)
    engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=12, n=3, ignore_eos=True))
    assert engine.stats.drafted_tokens > 0


def test_what_a_draft_model_missed_is_read_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
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
    # Prompts that are read so are drafted for as well as others.
    drafts = GenerationEngine(
        target(), speculation=Speculation(num_draft_tokens=2), drafter=ModelDrafter(target(), target())
    )
    long = markov_text(3, 40, seed=8).tolist()
    completions = drafts.generate(long, SamplingParams(max_new_tokens=8))
    assert tokens_of(completions) == tokens_of(
        GenerationEngine(target()).generate(long, SamplingParams(max_new_tokens=8))
    )
    assert drafts.stats.accepted_tokens == drafts.stats.verified_tokens


@pytest.mark.parametrize("depth", [3, None])
@pytest.mark.parametrize("max_cache_bytes", [None, 300_000])
def test_a_draft_model_of_learnt_positions_drafts_as_far_as_these_reach(
    depth: int | None, max_cache_bytes: int | None
) -> None:
    model = tiny_model("gpt2", vocab_size=VOCABULARY)
    short = tiny_model("gpt2", vocab_size=VOCABULARY, n_positions=24, seed=1)
    learning = Speculation(drafter="model", draft_model=short, draft_learning_rate=1e-3, num_draft_tokens=depth)
    engine = GenerationEngine(model, max_slots=4, speculation=learning, max_cache_bytes=max_cache_bytes)
    plain = GenerationEngine(model)
    params = SamplingParams(max_new_tokens=40, n=2, ignore_eos=True)
    # Some prompts are longer than the draft model's context, some samples leave it on the way, others begin anew.
    prompts = [*prompts_of(3), *(row[:30] for row in markov_text(2, 30, seed=5).tolist()), *prompts_of(3, seed=1)]
    limits = [40, 8, 12, 40, 20, 5, 8, 12]
    for _ in range(2):
        completions = engine.generate(prompts, params, token_limits=limits)
        assert tokens_of(completions) == tokens_of(plain.generate(prompts, params, token_limits=limits))
    assert depth is None or engine.stats.drafted_tokens > 0


@pytest.mark.parametrize("verification", ["match", "gumbel"])
def test_a_draft_model_that_diverged_costs_its_drafts_alone(verification: Any) -> None:
    small = tiny_model("llama", vocab_size=VOCABULARY)
    torch.nn.init.constant_(small.model.norm.weight, math.nan)
    settings = {"drafter": "model", "draft_model": small, "num_draft_tokens": 3, "verification": verification}
    engine = GenerationEngine(target(), speculation=Speculation(**settings))
    plain = GenerationEngine(target(), speculation=Speculation(**settings | {"num_draft_tokens": 0}))
    params = SamplingParams(max_new_tokens=12, n=2)
    prompts = prompts_of(3)
    assert tokens_of(engine.generate(prompts, params)) == tokens_of(plain.generate(prompts, params))
    assert engine.stats.drafted_tokens > 0


def test_a_step_of_learning_without_a_finite_gradient_is_left_out() -> None:
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


def test_weights_that_were_learnt_are_spread_over_ranks_that_draft_alike() -> None:
    spread: list[Any] = []
    model = tiny_model("llama", vocab_size=VOCABULARY)
    Distillation(model, learning_rate=1e-2, spread=spread.extend).learn([((5, 6), (7, 8))])
    assert [tensor.data_ptr() for tensor in spread] == [weight.data_ptr() for weight in model.parameters()]


def test_a_draft_model_learns_though_all_goes_on_in_inference_mode() -> None:
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


def test_responses_are_kept_for_others_only_where_somebody_asks() -> None:
    drafters = [HistoryDrafter(), HistoryDrafter()]
    drafters[1].has_listeners = True
    for drafter in drafters:
        engine = GenerationEngine(target(), speculation=Speculation(), drafter=drafter)
        done = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, n=2))
    assert drafters[0].news() == []
    assert sorted(drafters[1].news()) == sorted(((5, 6, 7), completion.token_ids) for completion in done)
    assert drafters[1].news() == []


def test_history_knows_whether_most_prompts_were_met_before() -> None:
    drafter = HistoryDrafter()
    drafter.receive_news([((5, 6, 7), (1, 2)), ((5, 6), (3,))])

    def samples(*prompts: tuple[int, ...]) -> list[Sample]:
        return [Sample(2 * i + j, i, prompt, 8, key=0) for i, prompt in enumerate(prompts) for j in range(2)]

    assert drafter.has_seen_prompts(samples((5, 6, 7), (5, 6)))
    assert drafter.has_seen_prompts(samples((5, 6, 7), (5, 6), (5,)))
    assert not drafter.has_seen_prompts(samples((5, 6, 7), (5,)))
    assert not drafter.has_seen_prompts([])
    assert not NgramDrafter().has_seen_prompts(samples((5, 6, 7)))


def test_a_draft_model_that_learns_drafts_better_and_changes_no_token() -> None:
    small = tiny_model("llama", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    before = {name: weight.clone() for name, weight in small.state_dict().items()}
    learning = Speculation(drafter="model", draft_model=small, draft_learning_rate=1e-2, num_draft_tokens=3)
    engine, plain = GenerationEngine(target(), speculation=learning), GenerationEngine(target())
    prompts, rates = prompts_of(24), []
    for seed in range(5):  # the same prompts, so that little data is enough
        params = SamplingParams(max_new_tokens=24, n=6, seed=seed, temperature=0.2)
        assert tokens_of(engine.generate(prompts, params)) == tokens_of(plain.generate(prompts, params))
        rates.append(engine.stats.generated_tokens / engine.stats.row_steps)
    # A model with random weights hits one token in 32.
    assert rates[0] < 1.2
    assert rates[-1] > rates[0] + 0.3
    assert all(torch.equal(weight, before[name]) for name, weight in small.state_dict().items())  # a copy learns


def test_distillation_learns_from_the_last_responses_and_from_them_alone() -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    distillation = Distillation(model, learning_rate=1e-2, most_tokens=64 * 30)
    losses = []
    for seed in range(12):
        rows = markov_text(96, 40, seed=seed).tolist()
        # The first third, which is too much, is noise that nobody could learn.
        noise = [(tuple(row[:10]), tuple(reversed(row[10:]))) for row in rows[:32]]
        losses.append(distillation.learn([*noise, *((tuple(row[:10]), tuple(row[10:])) for row in rows[32:])]))
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.3)  # random weights know nothing
    assert losses[-1] < losses[0] - 0.5
    assert distillation.learn([]) is None


def test_settings_show_what_is_not_as_by_default_and_of_a_model_its_class_alone() -> None:
    assert repr(Speculation()) == "Speculation()"
    shown = repr(Speculation(drafter="model", draft_model=tiny_model("llama"), num_draft_tokens=3))
    assert shown == "Speculation(drafter='model', num_draft_tokens=3, draft_model=LlamaForCausalLM(...))"


# ---- what cannot work
def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(GenerationError, match=r"vocabulary of 128 tokens and the target one of 32; .* tokenizer"):
        GenerationEngine(target(), speculation=Speculation(drafter="model", draft_model=tiny_model("llama")))


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_drafter_of_all_or_no_blocks_is_refused(count: int) -> None:
    with pytest.raises(GenerationError, match=f"draft_blocks={count} must lie between 1 and 1, below .* 2"):
        first_blocks(target(), count)


def test_a_model_of_one_block_has_no_first_ones() -> None:
    one = tiny_model("llama", num_hidden_layers=1)
    with pytest.raises(GenerationError, match=r"two blocks at least .* LlamaForCausalLM has 1; draft by 'history'"):
        GenerationEngine(one, speculation=Speculation(drafter="blocks", draft_blocks=1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": "eagle"}, "drafter='eagle' must be one of 'ngram', 'history', 'model', 'blocks', 'none'"),
        ({"verification": "lenient"}, "verification='lenient' must be one of 'match', 'gumbel', 'reject'"),
        ({"num_draft_tokens": -1}, "num_draft_tokens=-1 must be at least 0"),
        ({"max_draft_tokens": 0}, "max_draft_tokens=0 must be at least 1"),
        ({"drafter": "model"}, "drafter='model' needs draft_model"),
        (
            {"draft_model": "small"},
            "drafter='history' has no use for draft_model; leave it out, or set drafter='model'",
        ),
        ({"drafter": "blocks"}, "drafter='blocks' needs draft_blocks"),
        ({"draft_learning_rate": 1e-4}, "drafter='history' has no use for draft_learning_rate=0.0001"),
        ({"drafter": "model", "draft_model": "m", "draft_learning_rate": 0.0}, "must be a finite number above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        Speculation(**settings)


def test_a_draft_model_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match=f"draft_model='{tmp_path}' could not be loaded"):
        GenerationEngine(target(), speculation=Speculation(drafter="model", draft_model=tmp_path))
