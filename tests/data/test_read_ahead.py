"""Reading ahead: items in order, errors in place, bounded depth, and a thread that ends with the iterator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lightning_realloc.data.streams import read_ahead


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Check that the reading thread has ended."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_items_come_in_order_and_no_more_are_read_than_asked_for() -> None:
    begun: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            begun.append(number)
            yield number

    ahead = read_ahead(items, 3)
    assert begun == []  # nobody has asked yet
    assert [next(ahead) for _ in range(10)] == list(range(10))
    time.sleep(0.05)
    # Three wait, and one is on its way to them.
    assert len(begun) <= 10 + 3 + 1
    ahead.close()
    assert list(read_ahead(items, 1)) == list(range(100))


def test_what_reading_raises_is_raised_behind_what_was_read() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ArithmeticError("overflow")

    ahead = read_ahead(items, 8)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ArithmeticError, match="overflow"):
        next(ahead)


def test_the_next_is_read_while_the_last_one_is_worked_on() -> None:
    read = [threading.Event() for _ in range(5)]

    def items() -> Iterator[int]:
        for number, event in enumerate(read):
            event.set()
            yield number

    for number in read_ahead(items, 2):
        assert all(event.wait(10) for event in read[number : number + 2])
