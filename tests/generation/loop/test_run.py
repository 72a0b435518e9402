"""The generation loop on an executor without a model: every token is read once, in order, whatever the schedule."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.plain_decoding import Decoding
from lightning_realloc.generation.core.sample import Sample, StopRule
from lightning_realloc.generation.core.step import Draft
from lightning_realloc.generation.loop.run import Budget, GenerationRun
from lightning_realloc.generation.schedule.scheduler import Scheduler
from lightning_realloc.generation.schedule.slot_plan import Prompt
from lightning_realloc.generation.speculative.config import Speculation
from lightning_realloc.generation.speculative.drafter import Drafter
from lightning_realloc.generation.speculative.speculator import Speculator
from tests.generation.fake_executor import CopyingExecutor


class Counting(Drafter):
    """Drafts the next numbers, every third of them wrong."""

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> Sequence[Draft]:
        """Return drafts up to the limits."""
        return [
            Draft(tuple(sample.last_token + 1 + i + (i % 3 == 2) for i in range(limit)))
            for sample, limit in zip(running, limits, strict=True)
        ]


def make_run(
    prompts: Sequence[int], limits: Sequence[int], executor: CopyingExecutor, *, n: int = 1, num_slots: int = 2,
    most_read: int = 64, decoding: Decoding | None = None, tokens: int | None = None,
) -> GenerationRun:  # fmt: skip
    """Return a run of prompts of these lengths; the tokens of prompt i count up from 100 i."""
    samples = [
        Sample(index * n + k, index, ModelInput(tuple(range(100 * index, 100 * index + length))), limit, key=0)
        for index, (length, limit) in enumerate(zip(prompts, limits, strict=True))
        for k in range(n)
    ]
    waiting = [Prompt(i, length - 1, tuple(range(i * n, i * n + n))) for i, length in enumerate(prompts)]
    scheduler = Scheduler(waiting, num_slots=num_slots, max_prefill_tokens=most_read)
    stop = StopRule(token_ids=frozenset({40}), strings=(), tokenizer=None, min_new_tokens=0)
    budget, params = Budget(tokens, None, lambda: 0.0, lambda: True), SamplingParams(n=n)
    decoding = decoding or Decoding()
    return GenerationRun(executor, scheduler, samples, params, stop, decoding, None, budget, max_pause_s=math.inf)


def counting_decoding(depth: int) -> Speculator:
    return Speculator(Speculation(drafter="none", num_draft_tokens=depth), Counting(), clock=lambda: 0.0)


def run_to_end(run: GenerationRun) -> list[Sample]:
    with run:
        while run.has_work:
            run.step()
    return run.samples


def check_counted_on(samples: Sequence[Sample]) -> None:
    for sample in samples:
        begin = sample.prompt[-1] + 1
        assert sample.token_ids == list(range(begin, begin + sample.max_new_tokens))
        assert sample.finish_reason == "length" and sample.logprobs == [-1.0] * sample.max_new_tokens


ASKED = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=6)
"""Lengths of prompts and of responses."""


@given(ASKED, st.integers(1, 3), st.integers(1, 5), st.integers(1, 20), st.booleans())
def test_every_sample_gets_its_own_tokens_in_any_schedule(
    asked: list[tuple[int, int]], n: int, num_slots: int, most_read: int, drafts: bool
) -> None:
    decoding, executor = counting_decoding(3) if drafts else Decoding(), CopyingExecutor()
    prompts, limits = zip(*asked, strict=True)
    run = make_run(prompts, limits, executor, n=n, num_slots=num_slots, most_read=most_read, decoding=decoding)
    check_counted_on(run_to_end(run))
    stats = run.stats()
    assert stats.generated_tokens == sum(limits) * n and stats.num_steps == len(executor.steps)
    assert stats.row_steps == sum(len(step.rows) for step in executor.steps)
    assert max(len(step.rows) for step in executor.steps) <= num_slots
    if drafts:  # a draft ends before the last token, so no accepted token is cut off
        assert stats.generated_tokens == stats.row_steps + stats.accepted_tokens


@given(st.lists(ASKED, min_size=2, max_size=4), st.integers(1, 3), st.booleans())
def test_runs_that_take_turns_can_have_a_step_in_flight_each(
    asked: list[list[tuple[int, int]]], num_slots: int, drafts: bool
) -> None:
    pipe: deque[tuple[CopyingExecutor, bytes]] = deque()
    runs = []
    for own in asked:
        prompts, limits = zip(*own, strict=True)
        decoding = counting_decoding(3) if drafts else Decoding()
        runs.append(make_run(prompts, limits, CopyingExecutor(pipe), num_slots=num_slots, decoding=decoding))
    in_flight: deque[GenerationRun] = deque()
    most_in_flight = 0
    with ExitStack() as begun:
        for run in runs:
            begun.enter_context(run)
        while in_flight or any(run.has_work for run in runs):
            for run in runs:
                if in_flight and in_flight[0] is run:
                    in_flight.popleft().collect_step()
                if run.has_work:
                    run.submit_step()
                    in_flight.append(run)
                    most_in_flight = max(most_in_flight, len(pipe))
    assert most_in_flight == len(runs)
    for run in runs:
        check_counted_on(run.samples)


def test_a_stop_token_ends_a_sample_in_the_middle_of_its_draft_and_a_budget_the_call() -> None:
    executor = CopyingExecutor()
    (sample,) = run_to_end(make_run([39], [9], executor, decoding=counting_decoding(2)))
    assert sample.token_ids == [39, 40] and sample.finish_reason == "stop"
    assert len(executor.steps) == 1  # it reads the prompt, and then its last token with the draft 39, 40
    samples = run_to_end(make_run([3, 3], [9, 9], CopyingExecutor(), tokens=6))
    assert [s.token_ids for s in samples] == [[3, 4, 5], [103, 104, 105]]
    assert [s.finish_reason for s in samples] == ["unfinished"] * 2


class Ending(Decoding):
    """Plain decoding that records its ends."""

    def __init__(self) -> None:
        self.ended: list[bool] = []

    def end(self, *, has_failed: bool = False) -> None:
        self.ended.append(has_failed)


@pytest.mark.parametrize("failing", [None, "begin", "make_room", "submit", "collect"])
def test_whatever_has_begun_ends_once(failing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    if failing is not None:
        monkeypatch.setattr(CopyingExecutor, failing, fail)
    executor, decoding = CopyingExecutor(), Ending()
    run = make_run([3], [2], executor, n=2, decoding=decoding)
    with nullcontext() if failing is None else pytest.raises(ZeroDivisionError):
        run_to_end(run)
    assert decoding.ended == [failing is not None]
    assert executor.ended == ([] if failing == "begin" else [failing is not None])
