"""How many calls are made without a word after those that were short?"""

from __future__ import annotations

from lightning_realloc.generation.rebalance.short_calls import MOST_IN_A_ROW, ShortCallPredictor


def runs_of_silence(calls: ShortCallPredictor, kind: str, *, num_calls: int, is_short: bool = True) -> list[int]:
    """Return how many calls were taken to be short before each that was looked at."""
    runs, silent = [], 0
    for _ in range(num_calls):
        if calls.predict(kind):
            silent += 1
        else:
            runs.append(silent)
            silent = 0
            calls.look_at(kind, was_short=is_short)
    return runs


def test_the_more_calls_were_short_the_more_are_taken_to_be() -> None:
    assert runs_of_silence(ShortCallPredictor(), "a", num_calls=39) == [0, 1, 2, 4, 8, MOST_IN_A_ROW, MOST_IN_A_ROW]


def test_a_long_call_begins_anew() -> None:
    calls = ShortCallPredictor()
    runs_of_silence(calls, "a", num_calls=11)  # looked at: the first, third, sixth and eleventh
    assert runs_of_silence(calls, "a", num_calls=9, is_short=False) == [8]
    assert runs_of_silence(calls, "a", num_calls=3, is_short=False) == [0, 0, 0]
    assert runs_of_silence(calls, "a", num_calls=6) == [0, 1, 2]


def test_kinds_know_nothing_of_each_other() -> None:
    calls = ShortCallPredictor()
    runs_of_silence(calls, "a", num_calls=11)
    assert not calls.predict("b")
    assert calls.predict("a")
