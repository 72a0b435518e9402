"""Is it known what drafts come to, where what can be foreseen comes in runs? Beside drafting through the same texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

import pytest

from lightning_realloc.generation.acceptance import AcceptanceRates, DepthOutcome, DepthProfile
from lightning_realloc.generation.drafting import Chance, Drafter
from lightning_realloc.generation.foresight import Foresight
from lightning_realloc.generation.samples import Sample
from lightning_realloc.generation.verification import NO_DRAFT, Draft

DEPTH = 8
RIGHT, WRONG = 1, 0
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
        place, right = len(sample.token_ids), TEXTS[sample.sample_id]
        length = limit if self._guesses else num_right(right, place, limit)
        tokens = [RIGHT if right[place + i] else WRONG for i in range(length)]
        return Draft(tokens, ["any"] * length) if length else NO_DRAFT


def foreseen(drafter: Drafter) -> list[DepthOutcome]:
    """Return what is learnt while nothing is verified, and every sample passes every place of its text."""
    samples = [Sample(i, i, (RIGHT,), NUM_PLACES, key=i) for i in range(len(TEXTS))]
    foresight, rates, profile = Foresight(drafter, DEPTH), AcceptanceRates(), DepthProfile(DEPTH)
    foresight.begin()
    for step in range(NUM_PLACES - 2 * DEPTH):
        if foresight.is_due(step):
            foresight.look(step, samples, rates)
        foresight.rest()
        for sample in samples:
            sample.append(RIGHT, 0.0)
        for outcome in foresight.take_outcomes():
            outcome.teach(rates, profile)
    return profile.outcomes()


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
def test_every_depth_is_foreseen(guesses: bool) -> None:
    outcomes = foreseen(Seer(guesses=guesses))
    for depth in (1, 2, 4, DEPTH):
        assert outcomes[depth - 1].tokens == pytest.approx(tokens_per_step(depth), rel=0.05)


def test_places_that_no_draft_would_begin_at_look_better_than_those_where_they_do() -> None:
    # Why drafts are not foreseen from any place: the longer a run, the more of its places are seen.
    everywhere = fmean(num_right(right, place, DEPTH) + 1 for right in TEXTS for place in range(NUM_PLACES - DEPTH))
    assert everywhere > 1.15 * tokens_per_step(DEPTH)


@pytest.mark.parametrize("in_use", [1, 2, 4])
def test_one_depth_teaches_what_the_others_come_to(in_use: int) -> None:
    outcomes = drafted(in_use)
    for depth in (1, 2, 4, DEPTH):
        assert outcomes[depth - 1].tokens == pytest.approx(tokens_per_step(depth), rel=0.05)


def test_what_is_foreseen_is_told_once() -> None:
    sample = Sample(0, 0, (RIGHT,), NUM_PLACES, key=0)
    foresight = Foresight(Seer(guesses=True), DEPTH)
    told = []
    for step in range(40):
        if foresight.is_due(step):
            foresight.look(step, [sample], AcceptanceRates())
        sample.append(RIGHT, 0.0)
        told += foresight.take_outcomes()
    sample.finish_reason = "stop"
    told += foresight.take_outcomes()
    assert len(told) == 3  # one for each sixteen steps
    assert not foresight.take_outcomes()


@pytest.mark.parametrize(("looked_s", "least", "most"), [(0.0, 750, 750), (0.001, 750, 750), (1.0, 66, 72)])
def test_what_looking_up_takes_is_half_a_percent_of_plain_steps(looked_s: float, least: int, most: int) -> None:
    sample = Sample(0, 0, (RIGHT,), NUM_PLACES, key=0)
    foresight = Foresight(Seer(guesses=True), DEPTH)
    num_due = 0  # of 48 the seconds do not count
    for step in range(4000):
        if due := foresight.is_due(step):
            foresight.look(step, [sample], AcceptanceRates())
        foresight.rest()
        sample.append(RIGHT, 0.0)
        foresight.spend(looked_s if due else 0.0, 1.0)
        num_due += due
    assert least <= num_due <= most


def test_samples_that_got_other_tokens_meanwhile_are_not_followed() -> None:
    sample = Sample(0, 0, (RIGHT,), NUM_PLACES, key=0)
    foresight = Foresight(Seer(guesses=True), DEPTH)
    foresight.look(0, [sample], AcceptanceRates())
    for _ in range(3):  # by a verified draft
        sample.append(RIGHT, 0.0)
    foresight.look(1, [sample], AcceptanceRates())
    for _ in range(2 * DEPTH):
        sample.append(RIGHT, 0.0)
    assert not foresight.take_outcomes()
