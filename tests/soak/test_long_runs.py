"""Memory maps are counted without those that malloc makes on a busy machine."""

from __future__ import annotations

from tests.soak.long_runs import count_maps

MAPS = """\
555c12298000-555c1350e000 rw-p 00000000 00:00 0                          [heap]
7feeb4000000-7feeb408a000 rw-p 00000000 00:00 0
7feeb408a000-7feeb8000000 ---p 00000000 00:00 0
7feec0bf9000-7feec0ffa000 rw-s 00000000 00:01 3002                       /memfd:lightning_realloc (deleted)
7feec1000000-7feec1001000 ---p 00000000 00:00 0
7feec1001000-7feec1801000 rw-p 00000000 00:00 0
"""


def test_maps_of_arenas_do_not_count_and_those_of_stacks_and_files_do() -> None:
    assert count_maps(MAPS.splitlines()) == 4
