"""The functions that the benchmark of watching times exist."""

from __future__ import annotations

import pytest

from benchmarks.watching import CHECKS, WATCHED, owner_of

PLACES = [place for places in (WATCHED | CHECKS).values() for place in places]


@pytest.mark.parametrize("place", PLACES)
def test_every_watched_function_exists(place: str) -> None:
    owner, name = owner_of(place)
    assert callable(getattr(owner, name, None)), place
