"""Waiting for an environment costs no slot: seconds of whole calls, by a clock that only steps and waits move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation.cache.page_table import PageTables
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.plain_decoding import Decoding
from lightning_realloc.generation.core.sample import Sample, StopRule
from lightning_realloc.generation.core.step import Emitted, ForwardStep, StepExecutor
from lightning_realloc.generation.loop.environment import Answer
from lightning_realloc.generation.loop.run import Budget, GenerationRun
from lightning_realloc.generation.schedule.paged_scheduler import PagedScheduler
from lightning_realloc.generation.schedule.scheduler import Scheduler
from lightning_realloc.generation.schedule.slot_plan import Prompt
from tests.generation.fake_executor import CopyingExecutor

PROMPT, ANSWER = 8, 4
"""Tokens of every prompt, and of every answer."""
PAGE_SIZE = 16


@dataclass(frozen=True)
class Episode:
    """The model's turns by their tokens, and the seconds between them."""

    turns: tuple[int, ...]
    waits: tuple[float, ...]

    def sample(self, index: int) -> Sample:
        """Return a sample whose tokens count up from a thousand times its index."""
        prompt = tuple(range(1000 * index, 1000 * index + PROMPT))
        return Sample(index, index, ModelInput(prompt), sum(self.turns) + ANSWER * len(self.waits) + 1, key=0)

    def ends(self, index: int) -> list[int]:
        """Return the tokens that end the sample's turns."""
        begins = range(len(self.turns))
        return [1000 * index + PROMPT - 1 + sum(self.turns[: turn + 1]) + ANSWER * turn for turn in begins]


@dataclass
class Clock:
    """Seconds of a call."""

    now: float = 0.0


class SimulatedConversations:
    """An environment that answers an episode's turns after its waits, and ends it after its last turn."""

    def __init__(self, clock: Clock, episodes: Sequence[Episode]) -> None:
        self._clock, self._episodes = clock, episodes
        self._due: list[tuple[float, int, tuple[int, ...] | None]] = []

    def clock(self) -> float:
        return self._clock.now

    @property
    def waiting(self) -> bool:
        return bool(self._due)

    def mark_idle(self, is_idle: bool) -> None:
        pass

    def ask(self, index: int, sample: Sample) -> bool:
        sample.finish_reason = None
        waits, begin = self._episodes[index].waits, sample.last_token + 1
        if sample.turn <= len(waits):
            answer = tuple(range(begin, begin + ANSWER))
            heappush(self._due, (self._clock.now + waits[sample.turn - 1], index, answer))
        else:
            heappush(self._due, (self._clock.now, index, None))
        return True

    def answers(self) -> list[Answer]:
        found = []
        while self._due and self._due[0][0] <= self._clock.now:
            _, index, tokens = heappop(self._due)
            found.append(Answer(index, None if tokens is None else ModelInput(tokens)))
        return found

    def wait(self, most_s: float) -> None:
        self._clock.now = max(self._clock.now, self._due[0][0])

    def close(self) -> None:
        self._due.clear()


@dataclass(eq=False)
class TimedExecutor(StepExecutor):
    """Counts on without a cache. A step of 16 rows takes 10 ms, and each token that it reads a third of a row."""

    clock: Clock
    tables: PageTables | None = None
    used: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and rows of each step; sequences that it reads are rows, too."""
    replays_steps, was_usual, capture_s, cache_bytes = False, True, 0.0, 0

    def submit(self, step: ForwardStep) -> None:
        self._step = step

    def collect(self) -> list[Emitted]:
        rows, prefills = self._step.rows, self._step.prefills
        seconds = 0.0036 + 0.0004 * len(rows) + 0.00013 * sum(len(prefill.tokens) for prefill in prefills)
        read = {slot for prefill in prefills for slot in prefill.slots}
        self.used.append((seconds, len({*range(len(rows)), *read})))
        self.clock.now += seconds
        return [([row.tokens[0] + 1], [-1.0]) for row in rows]

    def move(self, source: int, target: int, length: int) -> None:
        if self.tables is not None:
            self.tables.swap(source, target)

    swap = move


def generate(
    episodes: Sequence[Episode], executor: StepExecutor, clock: Clock, *, num_slots: int, num_kept: int,
    most_read: int = 64, tables: PageTables | None = None,
) -> tuple[GenerationRun, list[tuple[bool, int]]]:  # fmt: skip
    """Generate all episodes; return the run, and for each step whether samples had to wait and the slots in use."""
    samples = [episode.sample(index) for index, episode in enumerate(episodes)]
    queue = [Prompt(index, PROMPT - 1, (index,)) for index in range(len(samples))]
    if tables is None:
        scheduler = Scheduler(queue, num_slots=num_slots, num_kept=num_kept, max_prefill_tokens=most_read)
    else:
        scheduler = PagedScheduler(queue, samples=samples, tables=tables, num_slots=num_slots, num_kept=num_kept)
    ends = frozenset(end for index, episode in enumerate(episodes) for end in episode.ends(index))
    stop = StopRule(token_ids=ends, strings=(), tokenizer=None)
    conversations: Any = SimulatedConversations(clock, episodes)
    budget = Budget(None, None, lambda: 0.0, lambda: True)
    run = GenerationRun(
        executor, scheduler, samples, SamplingParams(), stop, Decoding(), conversations, budget, max_pause_s=math.inf
    )
    found = []
    with run:
        while run.has_work:
            num_steps = run.stats().num_steps
            run.submit_step()
            seen = bool(scheduler.num_waiting), len(scheduler.slots)
            run.collect_step()
            if run.stats().num_steps > num_steps:
                found.append(seen)
    return run, found


EPISODES = st.lists(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=4).map(
        lambda parts: Episode(tuple(turn for turn, _ in parts), tuple(0.01 * wait for _, wait in parts[:-1]))
    ),
    min_size=1,
    max_size=8,
)


@given(EPISODES, st.integers(1, 4), st.integers(0, 3), st.integers(1, 20))
def test_episodes_are_the_same_in_any_number_of_slots(
    episodes: list[Episode], num_slots: int, num_kept: int, most_read: int
) -> None:
    clock = Clock()

    class Ticking(CopyingExecutor):
        def collect(self) -> list[Emitted]:
            clock.now += 0.01
            return super().collect()

    executor = Ticking()
    run, found = generate(episodes, executor, clock, num_slots=num_slots, num_kept=num_kept, most_read=most_read)
    for index, (sample, episode) in enumerate(zip(run.samples, episodes, strict=True)):
        assert sample.token_ids == list(range(sample.prompt[-1] + 1, episode.ends(index)[-1] + 1))
        assert sample.finish_reason == "environment" and sample.turn == len(episode.turns)
    assert max(len(step.rows) for step in executor.steps) <= num_slots
    assert max(used for _, used in found) <= num_slots + num_kept


def drawn_episodes(count: int) -> list[Episode]:
    """Return episodes of two to four turns of 40 to 120 tokens, that is 0.4 to 1.2 s, and waits of 0.1 to 2 s."""
    rng = Random(1)
    episodes = []
    for _ in range(count):
        turns = tuple(rng.randint(40, 120) for _ in range(rng.randint(2, 4)))
        episodes.append(Episode(turns, tuple(rng.uniform(0.1, 2.0) for _ in turns[1:])))
    return episodes


@pytest.mark.parametrize(
    ("num_kept", "pages", "most_ratio"),
    [(16, False, 1.3), (48, True, 1.15)],
    ids=["as many kept as run", "pages of as many bytes"],
)
def test_a_call_takes_little_longer_than_the_model_alone(num_kept: int, *, pages: bool, most_ratio: float) -> None:
    episodes = drawn_episodes(64)
    alone, clock = Clock(), Clock()
    at_once = [Episode(episode.turns, (0.0,) * len(episode.waits)) for episode in episodes]
    generate(at_once, TimedExecutor(alone), alone, num_slots=16, num_kept=num_kept)
    longest = max(episode.sample(0).max_length for episode in episodes)
    tables = PageTables(2 * 16 * -(-longest // PAGE_SIZE), PAGE_SIZE, num_slots=64) if pages else None
    executor = TimedExecutor(clock, tables)
    _, found = generate(episodes, executor, clock, num_slots=16, num_kept=num_kept, tables=tables)
    slowest_s = max(sum(episode.waits) for episode in episodes)
    assert clock.now <= most_ratio * max(alone.now, slowest_s)
    short = [(seconds, busy) for (seconds, busy), (others, _) in zip(executor.used, found, strict=True) if others]
    assert sum(seconds * busy for seconds, busy in short) >= 0.95 * 16 * sum(seconds for seconds, _ in short)
