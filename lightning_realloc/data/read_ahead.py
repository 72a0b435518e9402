"""What comes next is read while others work on what came: an iterator in a thread of its own. The order stays."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from queue import Full, Queue
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")

_LOOK_AGAIN_S = 0.1
"""Between two looks of a reader that is ahead enough at whether anybody still wants to have what it reads."""
_LEAVE_S = 5.0
"""How long a reader that nobody listens to any more may take for what it is reading."""


def read_ahead(items: Callable[[], Iterator[T]], num_ahead: int) -> Generator[T]:
    """Yield what an iterator yields, while a thread reads up to ``num_ahead`` further items of it.

    The iterator is made and read in that thread alone. What it raises is raised here where its next item would have
    come. The thread ends with the iterator, or when this generator is closed.
    """
    read: Queue[tuple[T] | BaseException | None] = Queue(num_ahead)
    is_over = Event()
    thread = Thread(target=_read, args=(items, read, is_over), daemon=True, name="read-ahead")
    thread.start()
    try:
        while (item := read.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        is_over.set()
        thread.join(_LEAVE_S)


def _read(items: Callable[[], Iterator[T]], read: Queue[tuple[T] | BaseException | None], is_over: Event) -> None:
    try:
        for item in items():
            if not _hand_over((item,), read, is_over):
                return
        _hand_over(None, read, is_over)
    except BaseException as error:
        _hand_over(error, read, is_over)


def _hand_over(
    item: tuple[T] | BaseException | None, read: Queue[tuple[T] | BaseException | None], is_over: Event
) -> bool:
    """Wait until there is room for an item; return whether it is still wanted."""
    while not is_over.is_set():
        with suppress(Full):
            read.put(item, timeout=_LOOK_AGAIN_S)
            return True
    return False
