"""Draft depths follow the workload, in simulated steps on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation.core.noise import sample_key
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.step import NO_DRAFT, Draft, Emitted
from lightning_realloc.generation.speculative.config import Speculation
from lightning_realloc.generation.speculative.drafter import Drafter
from lightning_realloc.generation.speculative.speculator import Speculator
from tests.generation.markov import VOCABULARY
from tests.generation.speculative.drafters import RandomDrafter

LOOK_UP_S = 0.001
NEW_TOKENS = 120


def token_at(place: int) -> int:
    """Return the token that the simulated target draws."""
    return 1 + place % 50


class Foreteller(Drafter):
    """Drafts the right token with a given frequency, on a simulated clock."""

    def __init__(self, *, costs_a_forward: bool = False) -> None:
        self.costs_a_forward = costs_a_forward
        self.now_s = 0.0
        self.right = 0.0
        """Share of drafted tokens that are right."""
        self.unread = 0
        """Tokens of all samples that it has not read."""
        self.num_read = 0
        self.read_s = 0.05
        """Seconds to read one token."""
        self.prepare_s = 0.0
        """Seconds of preparation before every step with drafts."""
        self.num_prepared = 0
        """Steps with a preparation."""
        self.acquainted = False
        """Whether it has seen the prompts of the next generation."""

    def has_seen_prompts(self, samples: Sequence[Sample]) -> bool:
        return self.acquainted

    def prepare(self, running: Sequence[Sample]) -> None:
        self.num_prepared += 1
        self.now_s += self.prepare_s

    def num_unread(self, running: Sequence[Sample]) -> int:
        return self.unread if self.costs_a_forward else 0

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> list[Draft]:
        drafts = []
        for sample, limit in zip(running, limits, strict=True):
            places = range(len(sample.token_ids), len(sample.token_ids) + limit)
            is_right = [(37 * place + 11 * sample.sample_id) % 100 < 100 * self.right for place in places]
            tokens = [token_at(place) if right else 0 for place, right in zip(places, is_right, strict=True)]
            drafts.append(Draft(tokens) if tokens else NO_DRAFT)
        if self.costs_a_forward:
            self.now_s += 0.2 * max(limits) + self.read_s * self.unread
            self.num_read += self.unread
            self.unread = 0
        else:
            self.now_s += LOOK_UP_S * sum(limits)
        return drafts


def take_right_tokens(sample: Sample, draft: Draft) -> Emitted:
    """Add the token of each position to a sample, up to the first one that was not drafted; return them."""
    tokens = []
    for drafted in (*draft.tokens, None):
        token = token_at(len(sample.token_ids))
        sample.append(token, 0.0)
        tokens.append(token)
        if drafted != token or len(sample.token_ids) == sample.max_new_tokens:
            break
    return tokens, [0.0] * len(tokens)


@dataclass
class Pretence:
    """Generations of simulated steps that take ``step_s(tokens)`` seconds."""

    drafter: Foreteller
    step_s: Callable[[int], float]
    max_draft_tokens: int = 8
    num_samples: int = 4
    num_prompt_tokens: int = 0
    """Prompt tokens of all samples, which a draft model has to read."""
    fewer_each: int = 0
    """Difference in length between one sample and the next, in tokens."""

    def __post_init__(self) -> None:
        speculation = Speculation(drafter="none", max_draft_tokens=self.max_draft_tokens)
        self.speculator = Speculator(speculation, self.drafter, clock=lambda: self.drafter.now_s)

    def generate(self) -> tuple[float, float]:
        """Return the seconds of one generation, and the tokens per sample and step."""
        params, drafter = SamplingParams(max_new_tokens=NEW_TOKENS), self.drafter
        lengths = [NEW_TOKENS - self.fewer_each * i for i in range(self.num_samples)]
        samples = [Sample(i, i, ModelInput((1,)), length, key=i) for i, length in enumerate(lengths)]
        self.speculator.begin(samples, params, self.num_samples)
        begin, row_steps, running = drafter.now_s, 0, samples
        drafter.unread = self.num_prompt_tokens
        while running:
            drafts = self.speculator.propose(running, (), is_tail=True)
            drafter.now_s += self.step_s(len(running) + sum(map(len, drafts)))
            self.speculator.verified(list(map(take_right_tokens, running, drafts)))
            row_steps += len(running)
            drafter.unread += len(running)  # drafted tokens need not be read
            for sample in running:
                if len(sample.token_ids) == sample.max_new_tokens:
                    sample.finish_reason = "length"
                    self.speculator.finished(sample)
            self.speculator.end_step(is_typical=True)
            running = [sample for sample in running if sample.finish_reason is None]
        self.speculator.end()
        return drafter.now_s - begin, sum(lengths) / row_steps


def flat(tokens: int) -> float:
    """Return the seconds of a step that hardly depend on the number of tokens."""
    return 1.0 + 0.01 * tokens


def gentle(tokens: int) -> float:
    """Return the seconds of a step in which sixteen tokens take twice as long as none."""
    return 1.0 + 0.06 * tokens


def steep(tokens: int) -> float:
    """Return the seconds of a step that are nearly proportional to the number of tokens."""
    return 0.05 + 0.25 * tokens


def leap(tokens: int) -> float:
    """Return the seconds of a step that jump beyond a hundred tokens, as if those do not fit into a cache."""
    return flat(tokens) + (6.0 if tokens > 100 else 0.0)


@pytest.mark.parametrize("max_draft_tokens", [1, 8])
def test_drafts_that_are_always_accepted_are_as_long_as_possible(max_draft_tokens: int) -> None:
    drafter = Foreteller()
    drafter.right = 1.0
    pretence = Pretence(drafter, flat, max_draft_tokens)
    pretence.generate()
    assert pretence.generate()[1] > 0.8 * (1 + max_draft_tokens)


def drafted_lengths(
    pretence: Pretence, agree: Callable[[Sequence[float]], Sequence[float]], shares: Sequence[float]
) -> list[list[int]]:
    """Return the draft lengths of every step, in one generation for each share of right tokens."""
    drafter = pretence.drafter
    speculation = Speculation(drafter="none", max_draft_tokens=pretence.max_draft_tokens)
    lengths: list[list[int]] = []

    class Noting(Speculator):
        def propose(self, *arguments: Any, **named: Any) -> Sequence[Sequence[int]]:
            drafts = super().propose(*arguments, **named)
            lengths.append([len(draft) for draft in drafts])
            return drafts

    pretence.speculator = Noting(speculation, drafter, agree=agree, clock=lambda: drafter.now_s)
    for drafter.right in shares:
        pretence.generate()
    return lengths


@pytest.mark.parametrize("costs_a_forward", [False, True])
def test_ranks_that_use_the_seconds_of_one_rank_draft_the_same_lengths(costs_a_forward: bool) -> None:
    shares = [0.0] * 4 + [0.9] * 6
    told: list[list[float]] = []

    def first(numbers: Sequence[float]) -> Sequence[float]:
        told.append(list(numbers))
        return told[-1]

    def other(numbers: Sequence[float]) -> Sequence[float]:
        agreed = next(heard)
        assert len(agreed) == len(numbers)
        return agreed

    slow = Pretence(Foreteller(costs_a_forward=costs_a_forward), gentle, num_samples=8, fewer_each=14)
    lengths = drafted_lengths(slow, first, shares)
    assert any(map(any, lengths))
    heard = iter(told)
    fast = Pretence(Foreteller(costs_a_forward=costs_a_forward), lambda _: 0.003, num_samples=8, fewer_each=14)
    assert drafted_lengths(fast, other, shares) == lengths
    assert next(heard, None) is None


def test_drafts_that_are_never_accepted_cost_one_percent_at_most() -> None:
    drafter = Foreteller()
    pretence = Pretence(drafter, steep)
    for _ in range(3):
        pretence.generate()
    seconds = [pretence.generate()[0] for _ in range(10)]
    assert sum(seconds) < 1.01 * 10 * NEW_TOKENS * steep(4)


def test_drafting_begins_soon_once_drafts_would_be_accepted() -> None:
    # As in the second epoch over the same prompts: drafts that were wrong for long are suddenly right.
    drafter = Foreteller()
    pretence = Pretence(drafter, flat)
    for _ in range(6):
        pretence.generate()
    assert pretence.generate()[1] < 1.2
    drafter.right = 0.95
    rates = [pretence.generate()[1] for _ in range(8)]
    assert rates[2] > 2.5 and rates[-1] > 4.0


@pytest.mark.parametrize("known_before", [0, 60])
def test_drafting_begins_at_once_for_seen_prompts_and_not_for_others(known_before: int) -> None:
    drafter = Foreteller()
    pretence = Pretence(drafter, gentle)
    for _ in range(known_before):
        pretence.generate()
    for _ in range(3):
        drafter.acquainted, drafter.right = True, 0.95
        pretence.generate()  # it measures the acceptance
        assert pretence.generate()[1] > 2.5
        drafter.acquainted, drafter.right = False, 0.0
        if known_before:
            assert pretence.generate()[1] < 1.01
        else:
            pretence.generate()


def test_drafting_stops_soon_once_drafts_are_no_longer_accepted() -> None:
    drafter = Foreteller()
    drafter.right = 0.95
    pretence = Pretence(drafter, steep)
    for _ in range(3):
        pretence.generate()
    drafter.right = 0.0
    pretence.generate()
    assert pretence.generate()[0] < 1.1 * NEW_TOKENS * steep(4)


def test_preparation_counts_as_a_cost_of_drafting() -> None:
    drafter = Foreteller()
    drafter.right, drafter.prepare_s = 1.0, 4.0  # at most three tokens a step, in about the time of five plain steps
    pretence = Pretence(drafter, flat, max_draft_tokens=2)
    plain_s = NEW_TOKENS * flat(4)
    for _ in range(4):
        pretence.generate()
    drafter.num_prepared = 0
    seconds, _ = pretence.generate()
    assert seconds < 1.1 * plain_s
    assert drafter.num_prepared <= 4  # steps without drafts have no preparation


def test_a_draft_model_that_does_not_pay_reads_few_of_the_tokens_it_missed() -> None:
    drafter = Foreteller(costs_a_forward=True)
    pretence = Pretence(drafter, steep)
    for _ in range(2):
        pretence.generate()
    drafter.num_read = 0
    seconds = [pretence.generate()[0] for _ in range(10)]
    assert drafter.num_read < 0.02 * 10 * 4 * NEW_TOKENS
    assert sum(seconds) < 1.01 * 10 * NEW_TOKENS * steep(4)


@pytest.mark.parametrize("right", [0.3, 0.9])
def test_a_draft_model_that_just_fails_to_pay_is_rarely_probed(right: float) -> None:
    # Catching up costs more than a probe gains: 500 tokens of prompts first, then 16 in every plain step.
    drafter = Foreteller(costs_a_forward=True)
    drafter.right, drafter.read_s = right, 0.05
    pretence = Pretence(drafter, gentle, num_samples=16, num_prompt_tokens=500)
    for _ in range(2):
        pretence.generate()
    drafter.num_read = 0
    seconds = [pretence.generate()[0] for _ in range(10)]
    assert sum(seconds) < 1.01 * 10 * NEW_TOKENS * gentle(16)
    assert drafter.num_read < 0.05 * 10 * 16 * NEW_TOKENS


@pytest.mark.parametrize(("costs_a_forward", "share"), [(False, 0.6), (True, 0.8)])
def test_where_costs_jump_between_two_depths_the_shallower_one_is_found(costs_a_forward: bool, share: float) -> None:
    # Drafts of eight or four tokens for 32 samples are far too expensive. With two tokens a step takes 1.5 times as
    # long as a plain one. On a line from plain steps to those of four, two tokens would cost more than they save.
    drafter = Foreteller(costs_a_forward=costs_a_forward)
    drafter.right, drafter.read_s = 0.9, 0.0001
    pretence = Pretence(drafter, leap, num_samples=32)
    plain_s = NEW_TOKENS * leap(32)
    assert pretence.generate()[0] < 1.1 * plain_s
    assert pretence.generate()[0] < share * plain_s


CHARGED = pytest.mark.xfail(
    strict=True,
    reason="one drafted token is 1.05 times as fast here: less than MIN_GAIN above the charge of SPREAD_OF_LAST for 16 "
    "samples that end together, which keeps samples of unequal texts from losing more by drafts than they gain",
)


@pytest.mark.parametrize(
    ("costs_a_forward", "right", "slowness"),
    [
        (False, 0.9, 2.0),
        pytest.param(True, 0.8, 1.9, marks=CHARGED),
        pytest.param(True, 0.8, 2.1, marks=CHARGED),
        pytest.param(True, 0.85, 1.9, marks=pytest.mark.exhaustive),
        pytest.param(True, 0.85, 2.1, marks=pytest.mark.exhaustive),
        pytest.param(True, 0.9, 2.1, marks=pytest.mark.exhaustive),
        (True, 0.9, 2.2),
    ],
)
def test_drafts_that_pay_are_found_although_verification_was_slow_at_first(
    costs_a_forward: bool, right: float, slowness: float
) -> None:
    # As in a first generation, which compiles kernels and has cold caches. Reading missed tokens takes as long as
    # probes may lose in about ten generations.
    drafter = Foreteller(costs_a_forward=costs_a_forward)
    drafter.right, drafter.read_s = right, 0.005  # prompts take as long as one plain step
    pretence = Pretence(
        drafter, lambda tokens: gentle(tokens) * (slowness if tokens > 16 else 1.0), num_samples=16,
        num_prompt_tokens=400,
    )  # fmt: skip
    pretence.generate()
    slowness = 1.0
    rates = [pretence.generate()[1] for _ in range(40)]
    assert sorted(rates[-4:])[1] > 2.0 * right, rates  # one of them may contain a period of plain steps


def test_prompts_that_are_quick_to_read_do_not_prevent_drafting() -> None:
    drafter = Foreteller(costs_a_forward=True)
    drafter.right, drafter.read_s = 1.0, 0.0005
    pretence = Pretence(drafter, flat, num_prompt_tokens=8000)  # in 4 s; 120 plain steps take 125 s
    for _ in range(3):
        pretence.generate()
    assert all(pretence.generate()[1] > 4.0 for _ in range(3))


def test_prompts_that_take_longer_than_drafts_save_are_not_read() -> None:
    drafter = Foreteller(costs_a_forward=True)
    drafter.right = 1.0
    pretence = Pretence(drafter, flat, num_prompt_tokens=8000)  # in 400 s
    for _ in range(6):
        pretence.generate()
    assert pretence.generate() == (pytest.approx(NEW_TOKENS * flat(4)), 1.0)


def test_a_probe_of_half_the_depth_reads_no_prompts_that_cost_more_than_it_saves() -> None:
    drafter = Foreteller(costs_a_forward=True)
    drafter.right, drafter.read_s = 0.9, 0.0001
    pretence = Pretence(drafter, flat, num_samples=8)
    pretence.generate()
    pretence.num_prompt_tokens, drafter.num_read = 5_000_000, 0  # in 500 s; 120 plain steps take 130 s
    for _ in range(3):
        pretence.generate()
    assert drafter.num_read == 0


def test_a_draft_model_that_pays_is_used() -> None:
    drafter = Foreteller(costs_a_forward=True)
    drafter.right = 1.0
    pretence = Pretence(drafter, flat)
    pretence.generate()
    seconds, rate = pretence.generate()
    assert rate > 4.0
    assert seconds < 0.8 * NEW_TOKENS * flat(4)


@pytest.mark.parametrize("right", [0.3, 0.5])
def test_a_draft_model_that_has_improved_drafts_deeper(right: float) -> None:
    # As for a model that learns from rollouts: earlier rejections at a depth must not exclude that depth for ever.
    drafter = Foreteller(costs_a_forward=True)
    drafter.right, drafter.read_s = right, 0.0005
    pretence = Pretence(drafter, gentle)
    for _ in range(6):
        pretence.generate()
    assert pretence.generate()[1] < 2.0
    drafter.right = 1.0
    assert max(pretence.generate()[1] for _ in range(12)) > 6.0


class Lawgiver(Foreteller):
    """Drafts with the distributions of its tokens, and counts how many of them are kept at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.right = 1.0
        self.kept: WeakSet[Tensor] = WeakSet()
        self.most_kept = 0

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> list[Draft]:
        drafts = []
        for draft in super().propose(running, limits):
            laws = [torch.zeros(2) for _ in draft.tokens]
            self.kept.update(laws)
            drafts.append(Draft(draft.tokens, laws=laws))
        self.most_kept = max(self.most_kept, len(self.kept))
        return drafts


def test_learning_keeps_no_distributions() -> None:
    drafter = Lawgiver()
    pretence = Pretence(drafter, flat)
    pretence.generate()
    assert pretence.generate()[1] > 4.0
    assert 0 < drafter.most_kept <= 3 * 4 * 8  # three steps of 4 samples with 8 tokens each


def test_drafting_is_probed_only_in_steps_without_prefills_until_it_pays() -> None:
    # Other steps are not measured: useless drafting would last as long as prompts are queued.
    now_s = 0.0
    speculator = Speculator(Speculation(drafter="none"), RandomDrafter(VOCABULARY), clock=lambda: now_s)
    samples = [Sample(i, i, ModelInput((5,)), 10_000, sample_key(0, i)) for i in range(4)]
    speculator.begin(samples, SamplingParams(), 4)

    def num_drafted(being_read: set[int]) -> int:
        nonlocal now_s
        drafts = speculator.propose(samples, being_read, is_tail=True)
        now_s += 10.0
        speculator.verified([([*draft.tokens, 1], [0.0] * (len(draft) + 1)) for draft in drafts])
        speculator.end_step(is_typical=not being_read)
        return sum(map(len, drafts))

    assert not any(num_drafted(set()) for _ in range(7))
    assert not any(num_drafted({3}) for _ in range(100))
    assert sum(num_drafted(set()) for _ in range(40))
    assert sum(num_drafted({3}) for _ in range(40))
