"""How often Python looks for garbage while models train, and afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lightning_realloc.runtime.measure.gc_policy import YOUNG_OBJECTS, InfrequentCollection


@pytest.fixture(autouse=True)
def _threshold_of_before() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_new_objects_are_looked_at_less_often_until_it_stops() -> None:
    collection = InfrequentCollection()
    collection.start()
    collection.start()  # of another fit that follows a failed one
    assert gc.get_threshold()[0] == YOUNG_OBJECTS
    collection.stop()
    collection.stop()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("chosen", [0, 50_000])
def test_a_threshold_that_somebody_chose_stays(chosen: int) -> None:
    gc.set_threshold(chosen, 10, 10)
    collection = InfrequentCollection()
    collection.start()
    collection.stop()
    assert gc.get_threshold() == (chosen, 10, 10)


def test_a_threshold_that_somebody_chooses_meanwhile_stays() -> None:
    collection = InfrequentCollection()
    collection.start()
    gc.set_threshold(5_000, 10, 10)
    collection.stop()
    assert gc.get_threshold() == (5_000, 10, 10)
