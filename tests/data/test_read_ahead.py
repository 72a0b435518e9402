"""Reading ahead: order, errors in place, one item ahead, and a thread that ends with the iterator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lightning_realloc.data.streams.stream_blocks import read_ahead


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Check that the reading thread has ended."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_items_come_in_order_and_at_most_one_is_read_ahead() -> None:
    begun: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            begun.append(number)
            yield number

    ahead = read_ahead(items)
    assert begun == []  # nothing is read before the first request
    assert [next(ahead) for _ in range(10)] == list(range(10))
    time.sleep(0.05)
    assert len(begun) <= 10 + 1
    ahead.close()
    assert list(read_ahead(items)) == list(range(100))


def test_an_error_while_reading_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ArithmeticError("overflow")

    ahead = read_ahead(items)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ArithmeticError, match="overflow"):
        next(ahead)


def test_the_next_item_is_read_while_the_last_one_is_processed() -> None:
    read = [threading.Event() for _ in range(5)]

    def items() -> Iterator[int]:
        for number, event in enumerate(read):
            event.set()
            yield number

    for number in read_ahead(items):
        assert all(event.wait(10) for event in read[number : number + 2])
