"""The message of a rank that waits names the rank that it waits for, its call and its line of code."""

from __future__ import annotations

from lightning_realloc.runtime.messages.watchdog import RankState, describe_stall

WAITING = RankState("actor.train, waiting for all ranks", 61.2, 2.0, "runner.py:3 in run", waits_for=(0, 1))
WORKING = RankState("actor.generate", 70.0, 1.5, "reward.py:12 in slow", waits_for=None)


def test_the_rank_that_works_is_named_with_its_call_and_line() -> None:
    message = describe_stall(0, {0: WAITING, 1: WORKING, 2: WAITING})

    assert message == (
        "rank 0 has waited 61 s in actor.train, waiting for all ranks (runner.py:3 in run) for rank 1, which has been "
        "in actor.generate for 70 s (reward.py:12 in slow, usually at most 1.5 s)"
    )


def test_a_rank_that_does_not_answer_is_named_before_ranks_that_work() -> None:
    message = describe_stall(0, {0: WAITING, 1: WORKING, 2: None})

    assert message is not None
    assert "for rank 2, which does not answer: it is stopped, or its host is lost; and for rank 1, which has" in message


def test_ranks_that_wait_for_each_other_are_all_listed() -> None:
    saving = RankState("save_checkpoint", 60.0, 0.0, "user.py:9 in hook", waits_for=())

    message = describe_stall(1, {0: saving, 1: WAITING})

    assert message is not None
    assert "all other ranks wait, too: rank 0 has been in save_checkpoint for 60 s (user.py:9 in hook)" in message
    assert "trainer.is_global_zero" in message


def test_a_rank_that_works_itself_says_nothing() -> None:
    assert describe_stall(1, {0: WAITING, 1: WORKING}) is None
