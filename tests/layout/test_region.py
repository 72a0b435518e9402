"""Regions intersect and tile like the sets of indices that they represent."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Region, tiles

intervals = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda pair: (min(pair), max(pair)))
regions = st.tuples(intervals, intervals).map(lambda dims: Region(tuple(a for a, _ in dims), tuple(b for _, b in dims)))


def indices(region: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(region.starts, region.stops, strict=True))))


@settings(max_examples=100, deadline=None)
@given(regions, regions)
def test_regions_intersect_and_contain_like_sets(first: Region, second: Region) -> None:
    common = first.intersect(second)
    assert (set() if common is None else indices(common)) == indices(first) & indices(second)
    assert first.contains(second) == (indices(second) <= indices(first))
    assert first.numel == len(indices(first))


@settings(max_examples=100, deadline=None)
@given(st.lists(regions, max_size=4))
def test_tiling_means_every_element_exactly_once(parts: list[Region]) -> None:
    counted = sorted(index for part in parts for index in indices(part))
    assert tiles(parts, (4, 4)) == (counted == list(itertools.product(range(4), range(4))))


def test_a_box_cut_into_pieces_is_tiled_until_one_is_missing_or_doubled() -> None:
    parts = [Region((0, 0), (2, 3)), Region((2, 0), (5, 3)), Region((0, 3), (4, 4)), Region((4, 3), (5, 4))]
    assert tiles(parts, (5, 4))
    assert not tiles(parts[1:], (5, 4))
    assert not tiles([*parts, parts[0]], (5, 4))
    assert not tiles([parts[0], parts[0], *parts[2:]], (5, 4))
    assert not tiles(parts, (5, 5))


def test_a_scalar_has_one_element() -> None:
    scalar = Region.whole(())
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert tiles([scalar], ())
    assert not tiles([scalar, scalar], ())
    assert not tiles([], ())


def test_a_region_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"0 <= start <= stop.*starts=\(2,\), stops=\(1,\)"):
        Region((2,), (1,))
    with pytest.raises(LayoutError):
        Region((0,), (1, 1))
