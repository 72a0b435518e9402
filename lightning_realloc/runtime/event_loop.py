"""An asyncio event loop in a background thread, for asynchronous reward functions and environments."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

MAX_THREADS = 1024
"""Threads of this process at which no function is called in another one: those that hang add up, until none starts."""

T = TypeVar("T")


class EventLoop:
    """An asyncio loop in its own thread. All batches share it, because connections belong to a loop.

    The thread starts with the first coroutine, and ends with :meth:`close` or with the process. A forked process starts
    its own.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def runs_here(self) -> bool:
        """Whether the caller is a coroutine of this loop."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:  # no loop runs in this thread
            return False

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return its future."""
        if self._loop is None or self._process != os.getpid():
            self._process, self._loop = os.getpid(), asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel running coroutines and end the thread; the next coroutine starts a new one."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
