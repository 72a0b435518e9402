"""Degrees and layouts: parsing, printing, groups, errors."""

from __future__ import annotations

import itertools
import pickle
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import AXES, Coordinate, Layout, ParallelDims, format_ranks, parse_ranks
from tests.layout.examples import layouts


def test_the_text_of_a_layout_reads_back_as_the_same_layout() -> None:
    for text in ("fsdp2.tp2@0-3", "dp2.tp2@0,2,1,3", "pp2.dp2.fsdp2.tp2@0-7,16-23", "dp1@5", "tp2@2-3"):
        assert str(Layout.parse(text)) == text


@settings(max_examples=50, deadline=None)
@given(layouts())
def test_any_layout_survives_text_and_pickle(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


def test_degrees_and_coordinates_have_the_same_axes_and_the_guide_explains_each() -> None:
    guide = (Path(__file__).parents[2] / "docs/layouts-and-plans.md").read_text()
    degrees = tuple(field.name for field in fields(ParallelDims))
    of_ranks = tuple(name for name in degrees if name != "vpp")  # which divides the blocks of a stage
    assert of_ranks[: len(AXES)] == AXES
    assert tuple(re.findall(r"(?m)^\| `(\w+)` \|", guide.partition("| axis |")[2].partition("\n\n")[0])) == degrees
    assert set(Layout.parse("dp1")._spans) > set(of_ranks), "a degree without a coordinate divides others' ranks"


def test_a_degree_that_divides_the_ranks_of_other_axes_is_read_and_printed() -> None:
    dims = ParallelDims.parse("fsdp2.tp2.ep2")
    assert (dims, dims.size, str(dims)) == (ParallelDims(fsdp=2, tp=2, ep=2), 4, "fsdp2.tp2.ep2")
    # Divisors of fsdp, then its products with divisors of dp.
    assert ParallelDims(dp=6, fsdp=4).expert_degrees == (1, 2, 4, 8, 12, 24)
    assert ParallelDims(dp=4).expert_degrees == (1, 2, 4)
    for text, words in (
        ("ep2.fsdp2", "write 'fsdp2.ep2'"),
        ("ep2.tp2", "ep=2 must divide fsdp=1"),  # the rule that the right order breaks, too
        ("fsdp2.vpp2", "pp=1 has one stage"),
        ("ep0", "ep=0 must be"),
        ("zz2", ", ".join(("pp", "vpp", *AXES[1:], "ep"))),
        (
            "ep2",
            r"ep=2 must divide fsdp=1, .* that divides dp\*fsdp=1; leave ep out, or use .* as in fsdp2.ep2",
        ),
        ("dp3.fsdp4.ep6", r"use ep in \(1, 2, 4, 12\)"),
    ):
        with pytest.raises(LayoutError, match=words):
            ParallelDims.parse(text)


@settings(max_examples=50, deadline=None)
@given(layouts())
def test_the_ranks_are_in_row_major_order_of_their_coordinates(layout: Layout) -> None:
    coordinates = itertools.product(*(range(degree) for degree in layout.dims.degrees))
    assert [layout.coordinate(rank) for rank in layout.ranks] == list(coordinates)


def test_a_layout_without_ranks_takes_the_first_ranks() -> None:
    assert Layout.parse("fsdp2.tp2").ranks == (0, 1, 2, 3)
    assert Layout.parse("fsdp2.tp2", world_size=4).ranks == (0, 1, 2, 3)
    assert Layout.parse("tp2@2,3", world_size=4).ranks == (2, 3)
    assert str(ParallelDims()) == "dp1"


def test_tensor_parallel_neighbours_are_adjacent_in_the_list_of_ranks() -> None:
    # pp2.dp2.tp2 over 0..7: rank = 4 * pp + 2 * dp + tp.
    layout = Layout.parse("pp2.dp2.tp2")
    assert layout.coordinate(6) == Coordinate(pp=1, dp=1)
    assert layout.group(6, "tp") == (6, 7)
    assert layout.group(6, "dp", "fsdp") == (4, 6)
    assert layout.group(6, "pp") == (2, 6)
    assert (layout.tensor_group(6), layout.batch_group(6)) == ((6, 7), (4, 6))
    assert layout.group(6) == (6,)
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups(*AXES) == (tuple(range(8)),)


def test_groups_follow_the_order_of_the_ranks() -> None:
    assert Layout.parse("dp2.tp2@0,2,1,3").groups("tp") == ((0, 2), (1, 3))
    assert Layout.parse("dp2.tp2@0,2,1,3").groups("dp") == ((0, 1), (2, 3))


@settings(max_examples=50, deadline=None)
@given(layouts(), st.sets(st.sampled_from(AXES)))
def test_groups_are_those_of_each_rank_in_the_order_of_their_first(layout: Layout, axes: set[str]) -> None:
    assert layout.groups(*axes) == tuple(dict.fromkeys(layout.group(rank, *axes) for rank in layout.ranks))


def test_the_data_parallel_index_counts_fsdp_fastest() -> None:
    layout = Layout.parse("dp2.fsdp2.tp2")
    assert layout.data_parallel_size == 4
    assert [layout.data_parallel_index(rank) for rank in layout.ranks] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_ranks_print_as_runs_and_read_back() -> None:
    assert format_ranks((0, 1, 2, 8, 6, 7)) == "0-2,8,6-7"
    assert parse_ranks("0-2, 8,6-7") == (0, 1, 2, 8, 6, 7)


@pytest.mark.parametrize(
    ("text", "world_size", "words"),
    [
        ("zero3", None, ["unknown layout 'zero3'", ", ".join(AXES), "fsdp2.tp2"]),
        ("fsdp", None, ["unknown layout", "'fsdp'", "write degrees"]),
        ("", None, ["unknown layout ''", "write degrees"]),
        ("tp2.tp2", None, ["tp twice"]),
        ("tp2.dp2", None, ["outermost first", "write 'dp2.tp2'"]),
        ("tp0", None, ["tp=0", "at least 1"]),
        ("fsdp2.tp2@0-2", None, ["multiply to 4", "3 ranks", "change a degree"]),
        ("fsdp4@0,1,1,2", None, ["[1]", "more than once", "list each once"]),
        ("fsdp2@3-2", None, ["runs backwards", "one by one"]),
        ("fsdp2@a,b", None, ["'a'", "not a rank", "@0-3"]),
        ("fsdp4", 8, ["multiply to 4", "8 ranks", "fsdp4@0-3"]),
        ("fsdp2@3-4", 4, ["rank 4", "only 4 ranks (0-3)", "start more processes"]),
    ],
)
def test_a_wrong_layout_is_refused_with_rule_values_and_way_out(
    text: str, world_size: int | None, words: list[str]
) -> None:
    with pytest.raises(LayoutError) as refusal:
        Layout.parse(text, world_size=world_size)
    for word in words:
        assert word in str(refusal.value)


def test_a_rank_or_axis_outside_the_layout_is_refused() -> None:
    layout = Layout.parse("tp2@2-3")
    assert 2 in layout and 0 not in layout
    with pytest.raises(LayoutError, match=r"rank 0 is not part of layout tp2@2-3"):
        layout.coordinate(0)
    with pytest.raises(LayoutError, match=r"unknown axis 'zz'"):
        layout.group(2, "zz")
    with pytest.raises(LayoutError, match=r"0 or more"):
        Layout(ParallelDims(), (-1,))
