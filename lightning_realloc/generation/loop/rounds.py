"""Conversations in rounds, for engines that generate whole turns: each round generates all turns that can begin.

The environment answers a turn while other turns of its round are generated. Between rounds, late answers are waited for
as long as the last round took, counted from the first answer. A sample whose answer comes later joins a later round. So
no sample waits long for the slowest environment, and rounds of few samples are rare.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Protocol

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.environment import Agree, Conversations, check_environment
from lightning_realloc.generation.loop.requests import Requests
from lightning_realloc.generation.loop.run import Budget
from lightning_realloc.generation.loop.streaming import CallNotifier
from lightning_realloc.runtime.messages.environment_waits import WaitMeter


class TurnCompletion(Protocol):
    """Generates one turn of some samples."""

    def __call__(self, samples: Sequence[Sample], on_ended: Callable[[Sequence[Sample]], None]) -> None:
        """Give each sample the tokens of its current turn and a finish reason.

        The model reads the prompt and the whole response so far. Each sample is passed to ``on_ended`` once, as soon as
        its turn has ended; the environment may then be asked.
        """


class Rounds:
    """The samples of one call, and their environment.

    Args:
        samples: Samples to complete, in the order in which their turns should begin.
        requests: Arguments of the call, with its environment.
        notifier: Reports finished samples.
        waits: Measures how samples wait; None: nothing reads it.
        agree: As of `Conversations`; of a tensor-parallel group, all ranks begin the same rounds.
        asks: Whether this rank asks the environment.
        place: As of `Conversations`.
        budget: Ends the call; samples are then "unfinished". ``complete_turns`` ends by it, too, and spends it. None:
            all samples are finished.

    Raises:
        GenerationError: for an environment or a conversation that cannot be used.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        requests: Requests,
        notifier: CallNotifier,
        *,
        waits: WaitMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
        agree: Agree | None = None,
        asks: bool = True,
        place: Callable[[ModelInput], ModelInput] | None = None,
        budget: Budget | None = None,
    ) -> None:
        check_environment(requests.environment, requests.conversation)
        self._samples, self._notifier = samples, notifier
        self._clock = clock if agree is None else lambda: agree([clock()])[0]
        self._may_be_unfinished = budget is not None
        self._budget = budget or Budget(None, None, clock, lambda: True)
        self._conversations: Conversations | None = None
        if requests.environment is not None:
            self._conversations = Conversations(
                requests.environment,
                requests.conversation,
                vocabulary=requests.vocabulary,
                clock=clock,
                agree=agree,
                asks=asks,
                waits=waits,
                place=place,
            )
        self._index_of = {sample.sample_id: index for index, sample in enumerate(samples)}

    def run(self, complete_turns: TurnCompletion) -> None:
        """Generate rounds until every sample is finished, or the budget is spent. Some may have a finish reason."""
        ready = [sample for sample in self._samples if sample.finish_reason is None]
        ended = [sample for sample in self._samples if sample.finish_reason is not None]
        if self._conversations is None:
            self._notifier.report(ended)
            complete_turns(ready, self._notifier.report)
        else:
            with closing(self._conversations) as conversations:
                self._end_turns(ended)
                self._run_rounds(conversations, ready, complete_turns)
        if self._may_be_unfinished:
            for sample in self._samples:
                sample.finish_reason = sample.finish_reason or "unfinished"

    def _run_rounds(self, conversations: Conversations, ready: list[Sample], complete_turns: TurnCompletion) -> None:
        round_s = 0.0
        while ready or conversations.waiting:
            if ready:
                begin = self._clock()
                complete_turns(ready, self._end_turns)
                round_s = self._clock() - begin
            ready = self._next_round(conversations, most_s=round_s)
            if self._budget.is_spent():
                self._take_answers(conversations)
                return

    def _end_turns(self, ended: Sequence[Sample]) -> None:
        """Ask the environment about turns that ended by the stop rule; the other samples are finished."""
        assert self._conversations is not None
        for sample in ended:
            if sample.finish_reason == "stop":
                self._conversations.ask(self._index_of[sample.sample_id], sample)
        self._notifier.report([sample for sample in ended if sample.finish_reason is not None])

    def _next_round(self, conversations: Conversations, *, most_s: float) -> list[Sample]:
        """Return the samples whose next turn can begin; wait for others up to ``most_s`` after the first answer."""
        ready: set[int] = set()
        end = math.inf
        while True:
            ready |= self._take_answers(conversations)
            if ready:
                end = min(end, self._clock() + most_s)
            left_s = min(end - self._clock(), self._budget.seconds_left())
            if not conversations.waiting or left_s <= 0 or self._budget.is_spent():
                conversations.mark_idle(False)
                return [self._samples[index] for index in sorted(ready)]
            conversations.mark_idle(True)
            conversations.wait(left_s)

    def _take_answers(self, conversations: Conversations) -> set[int]:
        """Add answers to their samples, finish those that the environment ended or failed, and return the others."""
        going_on = set()
        for answer in conversations.answers():
            sample = self._samples[answer.index]
            sample.finish_reason = answer.give_to(sample)
            if sample.finish_reason is None:
                going_on.add(answer.index)
            else:
                self._notifier.report([sample])
        return going_on
