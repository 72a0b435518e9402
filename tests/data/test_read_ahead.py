"""Reading ahead: order, errors in place, bounded depth, and a thread that ends with the iterator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lightning_realloc.data.stream_blocks import read_ahead


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Check that the reading thread has ended."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_items_come_in_order_and_at_most_the_given_number_is_read_ahead() -> None:
    begun: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            begun.append(number)
            yield number

    ahead = read_ahead(items, 3)
    assert begun == []  # nothing is read before the first request
    assert [next(ahead) for _ in range(10)] == list(range(10))
    time.sleep(0.05)
    # Three are waiting and one is being read.
    assert len(begun) <= 10 + 3 + 1
    ahead.close()
    assert list(read_ahead(items, 1)) == list(range(100))


def test_an_error_while_reading_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ArithmeticError("overflow")

    ahead = read_ahead(items, 8)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ArithmeticError, match="overflow"):
        next(ahead)


def test_the_next_item_is_read_while_the_last_one_is_processed() -> None:
    read = [threading.Event() for _ in range(5)]

    def items() -> Iterator[int]:
        for number, event in enumerate(read):
            event.set()
            yield number

    for number in read_ahead(items, 2):
        assert all(event.wait(10) for event in read[number : number + 2])
