"""Conversations of samples that move between ranks: the environment is asked on the rank where a sample began.

A rank sends its questions about other ranks' samples to these, and takes in messages between two steps and while it
waits for a peer. A sample whose question is open does not move. Deadlines and the bound on concurrent answers are those
of the rank that asks the environment, which also answers its questions to models of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import Any

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation.loop.environment import (
    Agree,
    Answer,
    Conversation,
    Conversations,
    Environment,
    Question,
    Turn,
)
from lightning_realloc.generation.rebalance.peers import Peers
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.environment_waits import WaitMeter
from lightning_realloc.runtime.messages.mailbox import MAX_PAUSE_S, FrameKind


class HomeConversations(Conversations):
    """Asks the environment about this rank's own samples, wherever they are.

    Args:
        peers: Ranks that samples move to and come from.
    """

    def __init__(
        self,
        environment: Environment,
        settings: Conversation | None,
        *,
        vocabulary: int,
        clock: Callable[[], float],
        agree: Agree | None = None,
        waits: WaitMeter | None = None,
        place: Callable[[ModelInput], ModelInput] | None = None,
        peers: Peers,
    ) -> None:
        super().__init__(
            environment, settings, vocabulary=vocabulary, clock=clock, agree=agree, waits=waits, place=place
        )
        self._peers = peers
        self._of_peers = Conversations(environment, settings, vocabulary=vocabulary, clock=clock, bound=self._may_run)
        """Questions of peers, by their number."""
        if self._partners is not None:
            self._partners.wake = self._wake
        self._askers: list[tuple[int, int]] = []
        """Rank that asked each of the peers' questions, and the sample's index there."""
        self._home_of: Callable[[int], int] = lambda index: peers.rank
        self._num_sent = 0

    @contextmanager
    def serving(self, home_of: Callable[[int], int]) -> Iterator[None]:
        """Enclose the steps of a call, in which samples move. ``home_of`` returns the rank where a sample began.

        No message is under way at the end: the ranks have returned their samples after the last one.
        """
        self._home_of = home_of
        self._peers.answer_questions = self._serve
        try:
            yield
        finally:
            self._peers.answer_questions = None
            self._of_peers.close()
            self._take(FrameKind.QUESTION)  # of ranks whose budget was spent before the answer
            self._take(FrameKind.ANSWER)

    def wait(self, most_s: float) -> None:
        """Return once there is an answer, a deadline passes, or ``most_s`` seconds have passed."""
        for _ in range(max(1, ceil(most_s / MAX_PAUSE_S))):
            self.exchange()
            if not self._received:
                super().wait(MAX_PAUSE_S)
            if self._received:
                return

    def exchange(self) -> None:
        """Take in messages of peers, and send the answers to their questions that are there, without waiting."""
        away = (home for index in self._asked if (home := self._home_of(index)) != self._peers.rank)
        self._peers.mailbox.poll(next(away, None))
        for asker, (index, turn) in self._take(FrameKind.QUESTION):
            self._askers.append((asker, index))
            self._of_peers.ask_about(len(self._askers) - 1, turn)
        for answer in self._of_peers.answers():
            asker, index = self._askers[answer.index]
            self._send(asker, FrameKind.ANSWER, replace(answer, index=index))
        for _, answer in self._take(FrameKind.ANSWER):
            if answer.index in self._asked:  # else this rank's budget is spent
                self._received.append((self._asked[answer.index], answer))

    def _serve(self) -> None:
        """Take in messages, and answer questions to models of the run, while this rank generates nothing."""
        self.exchange()
        if self._partners is not None:
            self._partners.answer()

    def _begin(self, index: int, question: Question, turn: Turn) -> None:
        home = self._home_of(index)
        if home == self._peers.rank:
            super()._begin(index, question, turn)
        else:
            self._send(home, FrameKind.QUESTION, (index, turn))

    def _ready(self) -> list[Answer]:
        self.exchange()
        return super()._ready()

    def _send(self, to: int, kind: FrameKind, content: object) -> None:
        peers, self._num_sent = self._peers, self._num_sent + 1
        peers.mailbox.send([to], kind, peers.run, peers.call, encode_message(content), part=self._num_sent)

    def _take(self, kind: FrameKind) -> list[tuple[int, Any]]:
        """Return the messages of a kind that have arrived, with their senders."""
        frames = self._peers.mailbox.take(kind, self._peers.run, self._peers.call)
        return [(source, decode_message(content)) for source, content in frames]
