"""Asynchronous environments, and bounds on the answers that are computed at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time

import pytest

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Conversation, SamplingParams, Turn
from lightning_realloc.generation.loop.asking import call
from lightning_realloc.generation.loop.environment import EVENT_LOOP
from lightning_realloc.runtime import event_loop
from tests.generation.dialogues import PROMPTS, SAMPLED, check_same, engine_of, exact_model, expected, tool

EVERY_TOKEN_STOPS = SamplingParams(max_new_tokens=30, stop_token_ids=tuple(range(128)))


async def async_tool(turn: Turn) -> list[int] | None:
    """Answer like `tool`, after other answers had their turn."""
    await asyncio.sleep(0.001)
    return tool(turn)


class AsyncTool:
    """An object that answers like `async_tool`."""

    async def __call__(self, turn: Turn) -> list[int] | None:
        """Return the answer."""
        return await async_tool(turn)


def makes_coroutine(turn: Turn) -> object:
    """Return an answer to await, from a plain function."""
    return async_tool(turn)


@pytest.mark.parametrize("environment", [async_tool, AsyncTool(), makes_coroutine])
@pytest.mark.parametrize("most", [1, 256])
def test_asynchronous_answers_equal_those_of_a_function(environment: object, most: int) -> None:
    settings = Conversation(max_turns=100, max_concurrent=most)
    completions = engine_of(exact_model(), max_slots=3).generate(
        PROMPTS,
        SAMPLED,
        environment=environment,
        conversation=settings,  # type: ignore[arg-type]
    )
    check_same(completions, expected(SAMPLED))


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_answers_than_max_concurrent_are_computed_at_a_time(most: int) -> None:
    lock, running, peak = threading.Lock(), 0, 0

    def environment(turn: Turn) -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    engine_of(exact_model(), max_slots=8).generate(
        [[9, i] for i in range(8)],
        EVERY_TOKEN_STOPS,
        environment=environment,
        conversation=Conversation(max_concurrent=most),
    )
    assert peak == most


def test_a_turn_that_waits_for_others_has_no_deadline_yet() -> None:
    def environment(turn: Turn) -> None:
        time.sleep(0.15)

    completions = engine_of(exact_model(), max_slots=8).generate(
        [[9, i] for i in range(8)],
        EVERY_TOKEN_STOPS,
        environment=environment,
        conversation=Conversation(max_concurrent=1, deadline_s=1.0),  # all eight take 1.2 s
    )
    assert [one.finish_reason for one in completions] == ["environment"] * 8


def test_a_function_that_hangs_takes_no_place_of_others() -> None:
    released = threading.Event()

    def environment(turn: Turn) -> None:
        if turn.sample_id == 0:
            released.wait(10)

    completions = engine_of(exact_model(), max_slots=8).generate(
        [[9, i] for i in range(4)],
        EVERY_TOKEN_STOPS,
        environment=environment,
        conversation=Conversation(max_concurrent=1, deadline_s=1.0),
    )
    released.set()
    assert [one.finish_reason for one in completions] == ["failure", "environment", "environment", "environment"]


def test_a_call_leaves_no_task_behind() -> None:
    cancelled: list[int] = []

    async def environment(turn: Turn) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(turn.sample_id)
            raise

    completions = engine_of(exact_model()).generate(
        [[9], [8]], EVERY_TOKEN_STOPS, environment=environment, conversation=Conversation(deadline_s=0.05)
    )
    assert {one.finish_reason for one in completions} == {"failure"}

    async def others() -> int:
        await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - 1

    assert EVENT_LOOP.submit(others()).result(5) == 0 and sorted(cancelled) == [0, 1]


def leaves() -> None:
    """End the thread that runs it."""
    raise SystemExit(3)


def stops() -> None:
    """Raise what a future does not take."""
    raise StopIteration("end")


@pytest.mark.parametrize(("function", "kind"), [(leaves, SystemExit), (stops, RuntimeError)])
def test_errors_that_end_threads_reach_the_caller(function: object, kind: type[BaseException]) -> None:
    async def caught() -> BaseException | None:
        try:
            await call(function)  # type: ignore[arg-type]
        except BaseException as error:
            return error
        return None

    assert isinstance(EVENT_LOOP.submit(caught()).result(5), kind)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_an_event_loop_of_its_own() -> None:
    async def answer() -> int:
        return 7

    assert EVENT_LOOP.submit(answer()).result(5) == 7
    child = os.fork()
    if not child:
        os._exit(EVENT_LOOP.submit(answer()).result(5))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert EVENT_LOOP.submit(answer()).result(5) == 7


def test_max_concurrent_is_at_least_one() -> None:
    with pytest.raises(GenerationError, match="max_concurrent=0 must be at least 1"):
        Conversation(max_concurrent=0)


def test_functions_that_hang_are_named_before_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hanging() -> None:
        released.wait()

    async def calls() -> None:
        for _ in range(4):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(call(hanging), 0.01)

    monkeypatch.setattr(event_loop, "MAX_THREADS", threading.active_count() + 3)
    try:
        with pytest.raises(RuntimeError, match="and 3 of them are earlier calls of this function, which run on after"):
            asyncio.run(calls())
    finally:
        released.set()
