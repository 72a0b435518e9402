"""Ranks of a tensor-parallel group, simulated one after the other, take the same answers in the same step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Conversation, GenerationEngine, SamplingParams, Speculation, Turn
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.environment import Answer, Conversations, Environment
from tests.generation.dialogues import GREEDY, tool
from tests.models import tiny_model


class SimulatedGroup:
    """Two ranks, of which the first one runs first: it leaves its numbers for the second."""

    def __init__(self) -> None:
        self.sent: deque[list[float]] = deque()
        self.num_sent = 0

    def first(self, numbers: Sequence[float]) -> Sequence[float]:
        self.num_sent += 1
        self.sent.append(list(numbers))
        return numbers

    def second(self, numbers: Sequence[float]) -> Sequence[float]:
        received = self.sent.popleft()
        assert len(received) == len(numbers)  # a broadcast needs equally many
        return received


def group_of(
    environment: Environment, *, now_s: Sequence[Callable[[], float]] = (lambda: 0.0, lambda: 0.0)
) -> tuple[SimulatedGroup, list[Conversations]]:
    """Return a group, and the conversations of its ranks, each with a clock of its own."""
    group = SimulatedGroup()
    first, second = now_s
    settings = Conversation(deadline_s=1.0)
    return group, [
        Conversations(environment, settings, vocabulary=128, clock=first, agree=group.first),
        Conversations(environment, settings, vocabulary=128, clock=second, agree=group.second, asks=False),
    ]


def ask(ranks: Sequence[Conversations], index: int) -> None:
    """Ask on both ranks about a sample that has one token."""
    for conversations in ranks:
        sample = Sample(100 + index, 0, ModelInput((5, 6)), 20, key=0)
        sample.append(10 + index, -1.0)
        conversations.ask(index, sample)


def answers_of(ranks: Sequence[Conversations], count: int) -> list[Answer]:
    """Return the answers, one step after another, until there are so many; both ranks receive the same in each step."""
    received: list[Answer] = []
    while len(received) < count:
        for conversations in ranks:
            conversations.wait(0.05)
        first, second = (conversations.answers() for conversations in ranks)
        assert first == second
        assert ranks[0].waiting == ranks[1].waiting and set(ranks[0].asked) == set(ranks[1].asked)
        received += first
    return received


def test_every_rank_takes_the_answers_of_the_first_which_asks_alone() -> None:
    asked: list[int] = []

    def environment(turn: Turn) -> list[int] | None:
        asked.append(turn.sample_id)
        if turn.sample_id == 101:
            raise ValueError("no “tool”")
        return None if turn.sample_id == 102 else [turn.token_ids[-1], 127]

    _, ranks = group_of(environment)
    for index in (0, 1, 2):
        ask(ranks, index)
    received = {answer.index: answer for answer in answers_of(ranks, 3)}
    assert received[0] == Answer(0, ModelInput((10, 127))) and received[2] == Answer(2)
    assert "ValueError(no “tool”)" in str(received[1].error)
    assert sorted(asked) == [100, 101, 101, 102]  # the one that raises is asked again
    assert not any(conversations.waiting for conversations in ranks)


def test_ranks_send_nothing_while_no_question_is_open() -> None:
    group, ranks = group_of(lambda turn: None)
    assert [conversations.answers() for conversations in ranks] == [[], []] and group.num_sent == 0
    ask(ranks, 0)
    answers_of(ranks, 1)
    before = group.num_sent
    assert [conversations.answers() for conversations in ranks] == [[], []] and group.num_sent == before > 0


@pytest.mark.parametrize("late_rank", [0, 1])
def test_the_clock_of_the_first_rank_judges_deadlines(late_rank: int) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()
    now_s = [0.0, 0.0]

    def environment(turn: Turn) -> list[int]:
        is_asked.set()
        may_answer.wait(10)
        return [7]

    _, ranks = group_of(environment, now_s=(lambda: now_s[0], lambda: now_s[1]))
    ask(ranks, 0)
    assert is_asked.wait(10)
    now_s[late_rank] = 2.0  # the deadline is one second
    if late_rank:
        may_answer.set()
    (answer,) = answers_of(ranks, 1)
    may_answer.set()
    if late_rank:
        assert answer == Answer(0, ModelInput((7,)))
    else:
        assert "did not answer turn 1 within deadline_s=1.0" in str(answer.error)


def test_a_tensor_parallel_model_needs_agree_for_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_realloc.generation.engine.tensor_parallel_group", lambda model: object())
    engine = GenerationEngine(tiny_model("llama"), speculation=Speculation(num_draft_tokens=4))
    with pytest.raises(GenerationError, match=r"the same answers .* pass GenerationEngine\(agree=...\), which gives"):
        engine.generate([[5]], GREEDY, environment=tool)


def test_a_slow_environment_keeps_a_group_in_no_long_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_realloc.generation.engine.MAX_GROUP_PAUSE_S", 0.01)
    released, num_agreed = threading.Event(), 0

    def agree(numbers: Sequence[float]) -> Sequence[float]:
        nonlocal num_agreed
        num_agreed += 1
        if num_agreed == 5:  # while the environment has not answered
            released.set()
        return numbers

    def environment(turn: Turn) -> None:
        assert released.wait(10)

    params = SamplingParams(max_new_tokens=30, stop_token_ids=tuple(range(128)))
    (completion,) = GenerationEngine(tiny_model("llama"), agree=agree).generate([[5]], params, environment=environment)
    assert (completion.finish_reason, completion.error) == ("environment", None)
