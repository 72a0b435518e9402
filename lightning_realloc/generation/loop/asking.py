"""Call functions from an event loop: asynchronous ones in it, others in threads; within limits that can stand still."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from lightning_realloc.runtime import event_loop


class Pause:
    """Time in which an environment waits for a model of the run, which no limit on the environment counts.

    It is open inside its context, which several tasks may enter at the same time.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_open = 0
        self._since = self._before = 0.0
        self._left_s: dict[asyncio.Timeout, float | None] = {}
        """Limits, with their seconds left while the pause is open; None: they have no end."""

    @property
    def is_open(self) -> bool:
        """Whether the environment waits now."""
        return self._num_open > 0

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._before + (self._clock() - self._since if self.is_open else 0.0)

    def __enter__(self) -> None:
        if not self.is_open:
            self._since = self._clock()
            for limit in self._left_s:
                self._stop(limit)
        self._num_open += 1

    def __exit__(self, *error: object) -> None:
        self._num_open -= 1
        if not self.is_open:
            self._before += self._clock() - self._since
            for limit, left_s in self._left_s.items():
                if left_s is not None and not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time() + left_s)

    @asynccontextmanager
    async def stopping(self, limit: asyncio.Timeout) -> AsyncIterator[None]:
        """Let a limit stand still while the pause is open."""
        self._left_s[limit] = None
        if self.is_open:
            self._stop(limit)
        try:
            yield
        finally:
            del self._left_s[limit]

    def _stop(self, limit: asyncio.Timeout) -> None:
        end = limit.when()
        self._left_s[limit] = None if end is None else end - asyncio.get_running_loop().time()
        if not limit.expired():
            limit.reschedule(None)


_PAUSE: ContextVar[Pause | None] = ContextVar("pause", default=None)


def begin_pause(pause: Pause) -> Pause:
    """Make a pause that of the running task, and of tasks that it starts; return it."""
    _PAUSE.set(pause)
    return pause


def current_pause() -> Pause:
    """Return the pause of the running task."""
    return _PAUSE.get() or begin_pause(Pause(time.monotonic))


def stopwatch() -> Callable[[], float]:
    """Return a function that returns the seconds since now, without those of the task's pause."""
    pause, begin = current_pause(), time.monotonic()
    before = pause.seconds
    return lambda: time.monotonic() - begin - (pause.seconds - before)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Like ``asyncio.timeout``; time in which the environment waits for a model of the run does not count."""
    pause = current_pause()
    async with asyncio.timeout(seconds if math.isfinite(seconds) else None) as limit, pause.stopping(limit):
        yield limit


async def call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Return the result of a function: await it if it is asynchronous, else run it in a thread.

    Each call has a thread of its own, because a thread cannot be stopped: a function that hangs must not hold one that
    others wait for. If the caller stops waiting, the function runs on and its result is dropped.

    Raises:
        RuntimeError: if too many functions run, most of which nobody waits for any more.
    """
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        return await function(*arguments, **named)
    result = await _in_thread(function, arguments, named)
    return await result if inspect.isawaitable(result) else result


async def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    name = f"environment: {getattr(function, '__name__', function)}"
    if threading.active_count() >= event_loop.MAX_THREADS:
        still = sum(thread.name == name for thread in threading.enumerate())
        raise RuntimeError(
            f"{event_loop.MAX_THREADS} threads are the most that run at a time, and {still} of them are earlier calls "
            f"of this function, which run on after their deadline; bound its own time, as by a timeout of its "
            f"connection"
        )
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(*arguments, **named)
        except StopIteration as raised:  # no future takes one
            error = RuntimeError(f"StopIteration({raised})")
        except BaseException as raised:  # also SystemExit, which would end the thread silently
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed: nobody waits for the result
            return

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
