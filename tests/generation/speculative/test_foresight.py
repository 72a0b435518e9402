"""Is it known what drafts come to, where what can be foreseen comes in runs? Beside drafting through the same texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

import pytest

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.speculative.acceptance import AcceptanceRates, DepthOutcome, DepthProfile
from lightning_realloc.generation.speculative.draft_step import DraftStep
from lightning_realloc.generation.speculative.drafting import Chance, Drafter
from lightning_realloc.generation.speculative.foresight import DraftOutcome, Foresight
from lightning_realloc.generation.speculative.verify import NO_DRAFT, Draft

DEPTH = 8
RIGHT, WRONG, OTHER = 1, 0, 2
NUM_PLACES = 8_000


def text(seed: int, *, begins: float = 0.3, goes_on: float = 0.85) -> list[bool]:
    """Return which tokens can be foreseen: one behind another such token more often than not."""
    chance = random.Random(seed)
    right = [False]
    while len(right) < NUM_PLACES:
        right.append(chance.random() < (goes_on if right[-1] else begins))
    return right


TEXTS = [text(seed) for seed in range(4)]


def num_right(right: Sequence[bool], place: int, most: int) -> int:
    """Return how many tokens in a row can be foreseen from here."""
    return next((i for i in range(most) if not right[place + i]), most)


def tokens_per_step(depth: int) -> float:
    """Return what drafting so deep comes to: the reference."""
    num_tokens = num_steps = 0
    for right in TEXTS:
        place = 0
        while place < NUM_PLACES - DEPTH:
            place += num_right(right, place, depth) + 1
            num_steps += 1
        num_tokens += place
    return num_tokens / num_steps


class Seer(Drafter):
    """Names what can be foreseen; where something cannot, it names another token, or nothing from there on."""

    def __init__(self, *, guesses: bool) -> None:
        self._guesses = guesses

    def propose(
        self, running: Sequence[Sample], limits: Sequence[int], chance: Chance, least_survivals: Sequence[float]
    ) -> list[Draft]:
        return [self._draft(sample, limit) for sample, limit in zip(running, limits, strict=True)]

    def _draft(self, sample: Sample, limit: int) -> Draft:
        place, right = len(sample.token_ids), TEXTS[sample.prompt_number]
        length = limit if self._guesses else num_right(right, place, limit)
        tokens = [RIGHT if right[place + i] else WRONG for i in range(length)]
        return Draft(tokens, ["any"] * length) if length else NO_DRAFT


class Always(Drafter):
    """Names the token that can be foreseen, as often as it may."""

    def propose(
        self, running: Sequence[Sample], limits: Sequence[int], chance: Chance, least_survivals: Sequence[float]
    ) -> list[Draft]:
        return [Draft([RIGHT] * limit, ["any"] * limit) for limit in limits]


def foreseen(drafter: Drafter, in_use: int) -> list[float]:
    """Return the tokens per step that are told while nothing is verified, and every sample passes every place.

    By depth, as the mean of many times: each is told from a few hundred drafts alone.
    """
    samples = [Sample(i, i, (RIGHT,), NUM_PLACES, key=i) for i in range(len(TEXTS))]
    foresight, rates, profile = Foresight(drafter, DEPTH), AcceptanceRates(), DepthProfile(DEPTH)
    foresight.depth = in_use
    foresight.begin()
    told: list[list[float]] = []
    for step in range(NUM_PLACES - 2 * DEPTH):
        if foresight.is_due(step):
            for outcome in foresight.look(step, samples, rates):
                outcome.teach(rates, profile)
            told.append([outcome.tokens for outcome in profile.outcomes()])
        for sample in samples:
            sample.append(RIGHT if TEXTS[sample.prompt_number][step] else OTHER, 0.0)
    return [fmean(tokens) for tokens in zip(*told[20:], strict=True)]


def drafted(depth: int) -> list[DepthOutcome]:
    """Return what is learnt while drafts of so many tokens are verified, and deeper ones made."""
    profile = DepthProfile(DEPTH)
    for right in TEXTS:
        place, resumed = 0, False
        while place < NUM_PLACES - DEPTH:
            num_tokens = num_right(right, place, depth) + 1
            stood = num_right(right, place, num_tokens)
            profile.learn(DEPTH, stood, depth=DEPTH, room=num_tokens, resumed=resumed)
            place, resumed = place + num_tokens, num_tokens > depth
    return profile.outcomes()


@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize(("in_use", "depths"), [(1, (1, 2, 4, 8)), (2, (1, 2, 4, 8)), (4, (4, 8)), (8, (8,))])
def test_the_depth_in_use_is_foreseen_and_those_that_are_deeper(
    in_use: int, depths: tuple[int, ...], guesses: bool
) -> None:
    tokens = foreseen(Seer(guesses=guesses), in_use)
    for depth in depths:
        assert tokens[depth - 1] == pytest.approx(tokens_per_step(depth), rel=0.05)


def test_places_that_no_draft_would_begin_at_look_better_than_those_where_they_do() -> None:
    # Why drafts are not foreseen from any place: the longer a run, the more of its places are seen.
    everywhere = fmean(num_right(right, place, DEPTH) + 1 for right in TEXTS for place in range(NUM_PLACES - DEPTH))
    assert everywhere > 1.15 * tokens_per_step(DEPTH)


@pytest.mark.parametrize("in_use", [1, 2, 4])
def test_one_depth_teaches_what_the_others_come_to(in_use: int) -> None:
    outcomes = drafted(in_use)
    for depth in (1, 2, 4, DEPTH):
        assert outcomes[depth - 1].tokens == pytest.approx(tokens_per_step(depth), rel=0.05)


def look(foresight: Foresight, sample: Sample, step: int) -> list[DraftOutcome]:
    """Look, if it is time to, and let the sample get a token that can be foreseen."""
    told = foresight.look(step, [sample], AcceptanceRates()) if foresight.is_due(step) else []
    sample.append(RIGHT, 0.0)
    return told


@pytest.mark.parametrize("seed", range(4))
def test_drafts_begin_where_those_before_them_would_have_ended(seed: int) -> None:
    right, depth = TEXTS[seed], 2
    sample = Sample(0, seed, (RIGHT,), 72, key=0)
    foresight = Foresight(Seer(guesses=True), DEPTH)
    foresight.depth = depth
    foresight.look(0, [sample], AcceptanceRates())
    for place in range(72):
        sample.append(RIGHT if right[place] else OTHER, 0.0)
    sample.finish_reason = "length"
    told = foresight.finish(sample, AcceptanceRates())
    begins, place = [], 8  # the last 64 of them are gone through
    while place < 72:
        begins.append(place)
        place += min(num_right(right, place, depth), 72 - place - 1) + 1
    assert [outcome.num_stood() for outcome in told] == [
        min(num_right(right, place, DEPTH), 72 - place - 1) for place in begins[1:]
    ]
    assert [outcome.resumed for outcome in told] == [num_right(right, place, depth) == depth for place in begins[:-1]]


def test_what_the_sample_got_since_is_not_known_before_it_is_looked_up() -> None:
    class Onlooker(Seer):
        def propose(
            self, running: Sequence[Sample], limits: Sequence[int], chance: Chance, least_survivals: Sequence[float]
        ) -> list[Draft]:
            (copy,) = running
            assert copy is not sample and copy.sample_id < 0
            assert copy.token_ids == sample.token_ids[: len(copy.token_ids)]
            return super().propose(running, limits, chance, least_survivals)

    sample = Sample(0, 0, (RIGHT,), NUM_PLACES, key=0)
    foresight = Foresight(Onlooker(guesses=True), DEPTH)
    assert sum(len(look(foresight, sample, step)) for step in range(400)) > 50


def test_a_turn_s_end_ends_a_draft_and_what_is_said_to_the_model_is_passed() -> None:
    sample = Sample(0, 0, (RIGHT,), NUM_PLACES, key=0)
    foresight = Foresight(Always(), DEPTH)
    foresight.depth = DEPTH
    looks = []
    for _ in range(4):
        for _ in range(5):
            sample.append(RIGHT, 0.0)
        looks.append(foresight.look(0, [sample], AcceptanceRates()))
        sample.extend([OTHER] * 4)
    # The first look chooses the sample. Each turn is known to be over at the next look, and then told in one draft, but
    # that it begins behind a turn's end, where it is not known what was drafted before.
    assert looks == [[], [], [], []]
    foresight.depth = 1
    told = foresight.look(0, [sample], AcceptanceRates())
    assert [(len(outcome.tokens), outcome.resumed) for outcome in told] == [(3, True), (1, True)]


def test_no_draft_is_told_twice() -> None:
    sample = Sample(0, 0, (RIGHT,), NUM_PLACES, key=0)
    foresight = Foresight(Always(), DEPTH)
    foresight.depth = DEPTH
    num_tokens = 0
    for step in range(2000):
        if foresight.is_due(step):
            num_tokens += sum(len(outcome.tokens) for outcome in foresight.look(step, [sample], AcceptanceRates()))
        foresight._saved_s = 0.0
        sample.append(RIGHT, 0.0)
    assert 0.5 * 2000 < num_tokens < 2000


def test_other_samples_take_the_place_of_those_that_run_no_more() -> None:
    samples = [Sample(i, 0, (RIGHT,), NUM_PLACES, key=i) for i in range(4)]
    foresight = Foresight(Always(), DEPTH)
    foresight.look(0, samples[:2], AcceptanceRates())
    foresight.look(16, samples[2:], AcceptanceRates())
    for sample in samples[2:]:
        for _ in range(30):
            sample.append(RIGHT, 0.0)
    assert foresight.look(32, samples[2:], AcceptanceRates())


@pytest.mark.parametrize(("looked_s", "least", "most"), [(0.0, 130, 135), (0.001, 130, 135), (1.0, 26, 30)])
def test_what_looking_up_takes_is_its_share_of_plain_steps(looked_s: float, least: int, most: int) -> None:
    sample = Sample(0, 0, (RIGHT,), NUM_PLACES, key=0)
    foresight = Foresight(Seer(guesses=True), DEPTH)
    num_due = 0  # of 16 the seconds do not count
    for step in range(4000):
        due = foresight.is_due(step)
        look(foresight, sample, step)
        foresight.spend(looked_s if due else 0.0, 1.0)
        num_due += due
    assert least <= num_due <= most


def test_samples_that_are_over_are_replaced_and_forgotten() -> None:
    class Forgetful(Seer):
        def __init__(self) -> None:
            super().__init__(guesses=True)
            self.known: set[int] = set()

        def propose(
            self, running: Sequence[Sample], limits: Sequence[int], chance: Chance, least_survivals: Sequence[float]
        ) -> list[Draft]:
            self.known |= {sample.sample_id for sample in running}
            return super().propose(running, limits, chance, least_survivals)

        def forget(self, sample: Sample) -> None:
            self.known.discard(sample.sample_id)

    drafter = Forgetful()
    foresight = Foresight(drafter, DEPTH)
    num_told = 0
    for _ in range(20):
        sample = Sample(0, 0, (RIGHT,), NUM_PLACES, key=0)
        for step in range(64):
            num_told += len(look(foresight, sample, foresight._next + step % 2))
            assert len(drafter.known) <= 2
        sample.finish_reason = "stop"
        num_told += len(foresight.finish(sample, AcceptanceRates()))
        assert not drafter.known
    assert num_told > 20


def short(number: int, length: int = 12) -> Sample:
    """Return a response that is over after ``length`` tokens of a text."""
    sample = Sample(number, number % len(TEXTS), (RIGHT,), length, key=number)
    for place in range(length):
        sample.append(RIGHT if TEXTS[sample.prompt_number][place] else OTHER, 0.0)
    sample.finish_reason = "length"
    return sample


def test_short_responses_are_replayed_as_if_all_of_them_had_been_drafted_for() -> None:
    foresight = Foresight(Seer(guesses=True), DEPTH)
    foresight.depth = 2
    sample = short(0)
    told = foresight.finish(sample, AcceptanceRates())
    right, place, expected = TEXTS[0], 0, []
    while place < 12:
        limit = min(DEPTH, 12 - place - 1)
        expected.append((place, limit, min(num_right(right, place, limit), 2)))
        place += expected[-1][-1] + 1
    assert [outcome.limit for outcome in told] == [limit for _, limit, _ in expected]
    assert [min(outcome.num_stood(), 2) for outcome in told] == [stood for *_, stood in expected]
    assert [outcome.resumed for outcome in told] == [None, *(stood == 2 for *_, stood in expected[:-1])]


def test_no_more_short_responses_are_replayed_than_seconds_allow() -> None:
    foresight = Foresight(Seer(guesses=True), DEPTH)
    foresight._num_times = {False: 1000, True: 1000}  # of which the first ones do not count
    told = [bool(foresight.finish(short(number), AcceptanceRates())) for number in range(100)]
    assert sum(told) == 64 // 12  # until it is known what they took
    foresight.spend(1.0, 1.0)
    assert not foresight.finish(short(0), AcceptanceRates())
    foresight.spend(0.0, 1000.0)
    assert foresight.finish(short(0), AcceptanceRates())
    foresight.spend(0.0, 1000.0)
    assert not foresight.finish(short(0, 65), AcceptanceRates())  # who is long is replayed while it runs


def test_where_most_to_draft_from_comes_while_a_sample_runs_its_replay_says_nothing() -> None:
    drafter = Seer(guesses=True)
    drafter.exchanges = True
    foresight = Foresight(drafter, DEPTH)
    foresight.begin(acquainted=False)
    assert not foresight.finish(short(0), AcceptanceRates())
    foresight.begin(acquainted=True)
    assert foresight.finish(short(1), AcceptanceRates())


def test_what_ends_without_drafts_says_nothing_where_others_were_drafted_for() -> None:
    foresight = Foresight(Seer(guesses=True), DEPTH)
    foresight.begin()
    assert foresight.heeds_end_of(short(0)) and foresight.finish(short(0), AcceptanceRates())
    foresight.rest()
    assert not foresight.heeds_end_of(short(1)) and not foresight.finish(short(1), AcceptanceRates())
    foresight.begin()
    assert foresight.finish(short(2), AcceptanceRates())


def test_looks_are_free_again_for_prompts_that_were_met_before_whatever_was_spent() -> None:
    foresight = Foresight(Seer(guesses=True), DEPTH)

    def num_looks() -> int:
        sample, num_due = Sample(0, 0, (RIGHT,), NUM_PLACES, key=0), 0
        for step in range(500):
            due = foresight.is_due(step)
            look(foresight, sample, step)
            foresight.spend(10.0 if due else 0.0, 1.0)
            num_due += due
        return num_due

    assert [num_looks(), num_looks()] == [17, 0]
    foresight.begin(acquainted=True)
    assert num_looks() >= 16
    assert num_looks() == 0


def test_a_draft_of_which_less_was_verified_is_told_by_what_came_later_up_to_what_the_model_did_not_choose() -> None:
    sample = Sample(0, 0, (1,), 100, key=0)
    sample.grow([7, 8], [0.0, 0.0])
    draft = Draft((9, 10, 11, 12, 13), ("any",) * 5)
    step = DraftStep(1, [sample], depth=2, drafts=[draft], limits=[6], begins=[2], emitted=[[9, 10, 11]])
    sample.grow([9, 10, 11], [0.0] * 3)
    assert step.outcome(0, None).num_stood() == 3
    sample.grow([12], [0.0])
    outcome = step.outcome(0, None)
    assert outcome.num_stood() == 4 and list(outcome.tokens) == [9, 10, 11, 12]
    sample.extend([13])  # the environment's
    sample.grow([14], [0.0])
    assert list(step.outcome(0, None).tokens) == [9, 10, 11, 12]
