"""Call functions from an event loop: asynchronous ones in it, others in threads."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from lightning_realloc.runtime import event_loop


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
