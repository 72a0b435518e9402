"""Are tokens priced by the seconds they save, and does drafting rest where it loses and go on where it pays?"""

from __future__ import annotations

import pytest

from lightning_realloc.generation.speculative.draft_worth import Payoff, chances_to_be_last, token_worths


def test_tokens_of_samples_alike_share_a_plain_step() -> None:
    # Ten seconds, one of them for each row: the fixed six are shared by four.
    assert token_worths([1.0] * 4, plain_s=10.0, row_s=1.0) == pytest.approx([2.5] * 4)


def test_a_token_of_the_last_sample_saves_the_step_and_others_save_their_row() -> None:
    ahead, last = token_worths([0.0, 1.0], plain_s=10.0, row_s=1.0)
    assert (ahead, last) == pytest.approx((1.0, 9.0))


def test_worths_come_to_a_plain_step_and_grow_with_what_is_left() -> None:
    worths = token_worths(chances_to_be_last([3.0, 30.0, 25.0, 28.0]), plain_s=7.0, row_s=0.5)
    assert sum(worths) == pytest.approx(7.0)
    assert worths[0] < worths[2] < worths[3] < worths[1]


def test_samples_alike_may_all_be_the_last_and_those_far_ahead_may_not() -> None:
    assert chances_to_be_last([20.0] * 4) == [1.0] * 4
    assert chances_to_be_last([1.0, 1.0, 400.0]) == pytest.approx([0.0, 0.0, 1.0], abs=1e-3)


def share_of_rests(payoff: Payoff, num_rows: int, gained_s: float, steps: int) -> float:
    """Return the share of steps in which drafting rests where every step with drafts gains so much in one second."""
    rests = 0
    for _ in range(steps):
        if payoff.rests(num_rows):
            rests += 1
        else:
            payoff.learn(num_rows, gained_s, 1.0)
    return rests / steps


def test_plain_steps_come_first() -> None:
    payoff = Payoff()
    assert share_of_rests(payoff, 4, 2.0, steps=12) == 1.0
    assert not payoff.rests(4)
    assert not payoff.rests(32)  # another number of samples needs no second comparison


@pytest.mark.parametrize("gained_s", [1.1, 1.5, 3.0])
def test_drafting_that_pays_hardly_ever_rests(gained_s: float) -> None:
    payoff = Payoff()
    share_of_rests(payoff, 8, gained_s, steps=100)
    assert share_of_rests(payoff, 8, gained_s, steps=5000) < 0.06


def test_steps_that_are_told_of_late_do_not_lengthen_the_rest_that_the_first_of_them_decided() -> None:
    payoff = Payoff()
    while payoff.rests(8):
        pass
    for _ in range(64):
        payoff.learn(8, 0.5, 1.0)
    num_rests = 0
    while payoff.rests(8):
        num_rests += 1
    assert 0 < num_rests <= 32


def test_what_is_forgiven_is_tried_at_once_and_what_gained_is_not_forgotten() -> None:
    losing, gaining = Payoff(), Payoff()
    share_of_rests(losing, 8, 0.5, steps=200)
    share_of_rests(gaining, 8, 1.5, steps=200)
    assert losing.rests(8) and not losing.pays(8) and gaining.pays(8)
    losing.forgive(8)
    gaining.forgive(8)
    losing.forgive(32)  # nothing is known of so many samples
    assert not losing.rests(8)
    assert gaining.pays(8)


@pytest.mark.parametrize("gained_s", [0.98, 0.9, 0.5])
def test_drafting_in_vain_loses_less_than_one_percent(gained_s: float) -> None:
    payoff = Payoff()
    share_of_rests(payoff, 8, gained_s, steps=1000)
    tried = 1.0 - share_of_rests(payoff, 8, gained_s, steps=5000)
    assert 0.0 < tried * (1.0 - gained_s) < 0.01


def test_drafting_is_taken_up_again_once_it_pays() -> None:
    payoff = Payoff()
    share_of_rests(payoff, 8, 0.9, steps=2000)
    share_of_rests(payoff, 8, 1.5, steps=1000)
    assert share_of_rests(payoff, 8, 1.5, steps=1000) < 0.06


def test_many_samples_do_not_speak_for_few() -> None:
    payoff = Payoff()
    share_of_rests(payoff, 64, 0.5, steps=500)
    assert share_of_rests(payoff, 2, 2.0, steps=100) == 0.0


def test_after_a_trial_that_gains_the_next_rest_is_short() -> None:
    payoff = Payoff()
    share_of_rests(payoff, 8, 0.5, steps=5000)
    while payoff.rests(8):
        pass
    for _ in range(8):
        payoff.learn(8, 1.5, 1.0)
    assert sum(payoff.rests(8) for _ in range(500)) == 32


def waits(payoff: Payoff, num_rows: int, gained_s: float, num_pauses: int) -> list[int]:
    """Return after how many steps with drafts each of the next pauses comes."""
    steps = [0]
    while len(steps) <= num_pauses:
        if payoff.rests(num_rows):
            while payoff.rests(num_rows):
                payoff.save(num_rows, 1.0)
            payoff.save(num_rows, 1.0)
            steps.append(0)
        payoff.learn(num_rows, gained_s, 1.0)
        steps[-1] += 1
    return steps[:num_pauses]


def test_the_first_pauses_come_soon_and_again_where_drafting_begins_anew() -> None:
    payoff = Payoff()
    while payoff.rests(8):
        payoff.save(8, 1.0)
    first = waits(payoff, 8, 1.03, num_pauses=6)
    assert first == sorted(first) and first[0] < 0.2 * first[-1] and first[-1] == first[-2]
    for _ in range(20):  # the plan says that nothing pays
        payoff.save(8, 1.0)
    assert waits(payoff, 8, 1.03, num_pauses=1)[0] == pytest.approx(first[0], abs=16)


def test_drafting_that_pays_for_sure_is_not_interrupted_soon() -> None:
    payoff = Payoff()
    while payoff.rests(8):
        payoff.save(8, 1.0)
    assert waits(payoff, 8, 1.5, num_pauses=1)[0] > 1000


def num_tries(payoff: Payoff, *, steps: int, plain_s: float = 1.0, gained_s: float) -> int:
    """Return how many of so many steps are tries, if all that may be are; each takes three plain ones' seconds."""
    tries = 0
    for _ in range(steps):
        if payoff.saved_s > 0.0:
            payoff.take_try(gained_s, 3.0 * plain_s)
            tries += 1
        else:
            payoff.save(8, plain_s)
    return tries


@pytest.mark.parametrize("plain_s", [0.001, 1.0])
def test_tries_in_vain_lose_their_share_in_the_long_run(plain_s: float) -> None:
    payoff = Payoff()
    # Each loses two plain steps' seconds, which 667 plain steps pay for.
    assert num_tries(payoff, steps=60_000, plain_s=plain_s, gained_s=plain_s) == pytest.approx(90, abs=5)


@pytest.mark.parametrize("num_free", [0, 20])
def test_what_tries_that_are_allowed_lose_does_not_count(num_free: int) -> None:
    payoff = Payoff()
    payoff.saved_s = -5.0
    payoff.allow(num_free)
    tries = 0
    while payoff.saved_s >= 0.0:
        payoff.take_try(1.0, 2.0)
        tries += 1
    assert tries == num_free + 1
    assert payoff.saved_s == pytest.approx(-1.0)


def test_of_a_try_that_loses_more_than_it_gains_the_rest_counts() -> None:
    payoff = Payoff()
    payoff.allow(20)
    payoff.take_try(1.0, 4.5)
    assert payoff.saved_s == pytest.approx(-2.5)


def test_what_drafting_gained_for_prompts_met_before_says_nothing_of_others() -> None:
    payoff = Payoff()
    while payoff.rests(8):
        payoff.save(8, 1.0)
    for _ in range(40):
        if not payoff.rests(8):
            payoff.learn(8, 0.5, 1.0)
    assert payoff._record(8).rest and not payoff.pays(8)
    payoff.turn_to(acquainted=True)
    assert not payoff.rests(8)  # what plain steps take is known
    for _ in range(8):
        payoff.learn(8, 1.5, 1.0)
    assert payoff.pays(8)
    payoff.turn_to(acquainted=False)
    assert payoff.rests(8) and not payoff.pays(8)


def test_a_step_that_stands_for_others_counts_as_all_of_them() -> None:
    one, others = Payoff(), Payoff()
    one.save(8, 2.0, num_steps=25)
    for _ in range(25):
        others.save(8, 2.0)
    assert one.saved_s == pytest.approx(others.saved_s) == pytest.approx(0.003 * 50)
    assert one._record(8).num_plain == others._record(8).num_plain == 25


def test_tries_that_gain_cost_nothing() -> None:
    assert num_tries(Payoff(), steps=100, gained_s=4.0) == 99


def test_whether_drafting_pays_is_what_the_last_trials_say_and_this_one_so_far() -> None:
    payoff = Payoff()
    while payoff.rests(8):
        pass
    assert not payoff.pays(8)
    for _ in range(8):
        payoff.learn(8, 1.5, 1.0)
    assert payoff.pays(8)
    payoff.learn(8, 0.9, 1.0)
    assert not payoff.pays(8)
