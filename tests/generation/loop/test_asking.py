"""Time limits of environments, which stand still while a model of the run answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from lightning_realloc.generation.loop.asking import current_pause, stopwatch, time_limit


async def wait_for_models(seconds: float) -> None:
    """Wait as for the reply of a model."""
    with current_pause():
        await asyncio.sleep(seconds)


async def limited(*parts: Coroutine[Any, Any, Any], limit_s: float = 0.1) -> float:
    """Run parts at the same time within a limit; return the seconds that count."""
    elapsed_s = stopwatch()
    async with time_limit(limit_s):
        await asyncio.gather(*parts)
    return elapsed_s()


def test_a_limit_stands_still_while_a_model_answers() -> None:
    waits = wait_for_models(0.5), wait_for_models(0.45), asyncio.sleep(0.02)
    assert asyncio.run(limited(*waits, limit_s=0.4)) < 0.4
    assert asyncio.run(limited(asyncio.sleep(0.02), limit_s=float("inf"))) >= 0.02


async def wait_and_work(seconds: float) -> None:
    """Work on after a reply."""
    await wait_for_models(0.05)
    await asyncio.sleep(seconds)


def test_time_after_the_reply_counts_on() -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(limited(wait_and_work(10.0)))
    assert 0.14 < time.monotonic() - begin < 10.0  # 0.05 s of the model, and a limit of 0.1 s


def test_a_limit_that_begins_while_a_model_answers_stands_still_too() -> None:
    async def both() -> None:
        waiting = asyncio.create_task(wait_for_models(0.5))
        await asyncio.sleep(0.01)
        async with time_limit(0.4):
            await waiting

    async def in_one_pause() -> None:
        current_pause()  # of both tasks
        await both()

    asyncio.run(in_one_pause())
