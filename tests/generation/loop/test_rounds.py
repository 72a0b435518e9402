"""Which turns share a round, and the deadline of answers that come during one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation import Completion, Conversation, Environment, SamplingParams, Turn
from lightning_realloc.generation.core.noise import sample_key
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.requests import Requests
from lightning_realloc.generation.loop.rounds import Rounds
from lightning_realloc.generation.loop.streaming import CallNotifier
from lightning_realloc.runtime.messages.environment_waits import WaitMeter

OnEnded = Callable[[Sequence[Sample]], None]


class Call:
    """A call whose turns are one token each; it records the samples of every round, and those that finish."""

    def __init__(
        self, environment: Environment, *, count: int = 2, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.samples = [Sample(i, i, ModelInput((9,)), 20, sample_key(0, i)) for i in range(count)]
        self.rounds: list[list[int]] = []
        self.finished: list[int] = []
        requests = Requests(
            128, {}, (), SamplingParams(), environment=environment, conversation=Conversation(deadline_s=10.0)
        )
        self.waits = WaitMeter()
        notifier = CallNotifier(self.samples, self._finish, _completion)
        self._rounds = Rounds(self.samples, requests, notifier, waits=self.waits, clock=clock)

    def _finish(self, completion: Completion) -> None:
        self.finished.append(completion.sample_id)

    def run(self, during_round: Callable[[int], None] = lambda number: None) -> None:
        """Complete the samples; ``during_round`` is called with a round's number after its turns have ended."""

        def complete_turns(samples: Sequence[Sample], on_ended: OnEnded) -> None:
            self.rounds.append([sample.sample_id for sample in samples])
            for sample in samples:
                sample.append(7, -1.0)
                sample.finish_reason = "stop"
                on_ended([sample])
            during_round(len(self.rounds))

        self._rounds.run(complete_turns)


def _completion(sample: Sample) -> Completion:
    return sample.completion(0)


def test_an_answer_that_comes_later_than_a_round_takes_joins_a_later_round() -> None:
    second_round = threading.Event()

    def environment(turn: Turn) -> list[int] | None:
        if turn.sample_id == 1 and turn.number == 1:
            assert second_round.wait(10)
        return [5] if turn.number == 1 else None

    call = Call(environment)

    def during_round(number: int) -> None:
        if number == 2:
            second_round.set()

    call.run(during_round)
    assert call.rounds == [[0, 1], [0], [1]]
    assert [sample.token_ids for sample in call.samples] == [[7, 5, 7]] * 2
    assert sorted(call.finished) == [0, 1]


def test_a_round_waits_for_answers_that_come_within_the_time_of_the_last_round() -> None:
    seconds = [0.0]

    def environment(turn: Turn) -> list[int] | None:
        time.sleep(0.01 * turn.sample_id)
        return [5] if turn.number < 3 else None

    def during_round(number: int) -> None:
        seconds[0] += 1.0  # between rounds this clock stands still

    call = Call(environment, count=3, clock=lambda: seconds[0])
    call.run(during_round)
    assert call.rounds == [[0, 1, 2]] * 3
    assert all(sample.turn == 3 and sample.finish_reason == "environment" for sample in call.samples)


def test_the_time_between_two_rounds_is_waiting_and_samples_wait_during_rounds_too() -> None:
    def environment(turn: Turn) -> list[int] | None:
        time.sleep(0.05)
        return [5] if turn.number < 2 else None

    call = Call(environment, count=1)
    call.run(lambda number: time.sleep(0.01))
    waits = call.waits.waits()
    assert waits is not None
    sample_s = sum(waits.samples.means) * waits.samples.bin_s
    assert sample_s >= 0.1 and waits.idle_s > 0.0  # two answers, each of which begins during a round of 10 ms or more
    assert sample_s - waits.idle_s > 0.015


def test_a_deadline_that_passes_during_a_round_ends_the_sample_although_its_answer_is_there() -> None:
    seconds, is_asked, may_answer = [0.0], threading.Event(), threading.Event()

    def environment(turn: Turn) -> list[int] | None:
        is_asked.set()
        assert may_answer.wait(10)
        return [5]

    def during_round(number: int) -> None:
        assert is_asked.wait(10)
        seconds[0] = 11.0
        may_answer.set()
        time.sleep(0.03)

    call = Call(environment, count=1, clock=lambda: seconds[0])
    call.run(during_round)
    assert call.rounds == [[0]] and call.samples[0].finish_reason == "failure"
    assert "did not answer turn 1 within deadline_s=10.0" in str(call.samples[0].error)


def test_an_error_of_the_engine_leaves_no_question_open() -> None:
    is_asked, cancelled = threading.Event(), threading.Event()

    async def environment(turn: Turn) -> None:
        is_asked.set()
        try:
            await asyncio.sleep(10)
        finally:
            cancelled.set()

    def during_round(number: int) -> None:
        assert is_asked.wait(10)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Call(environment, count=1).run(during_round)
    assert cancelled.wait(5)
