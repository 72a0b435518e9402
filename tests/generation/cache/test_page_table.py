"""Invariants of page tables, checked on simulated pages that record their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.generation.cache.page_table import PageTables, PrefixIndex
from lightning_realloc.generation.cache.paged_cache import blocks_of

PAGE_SIZE = 3


class Pages:
    """Page tables with the tokens in their pages, and the expected sequence of each slot."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.tables = PageTables(num_pages, PAGE_SIZE, num_slots=num_slots)
        self.sequences: list[list[int]] = [[] for _ in range(num_slots)]
        self._names = PrefixIndex(PAGE_SIZE)
        self._held: dict[tuple[int, int], int] = {}

    def begin(self, slot: int, tokens: Sequence[int]) -> int:
        """Start a sequence in a slot from pages that hold its prefix; return the length of that prefix."""
        self.clear(slot)
        names: list[int] = []
        self._names.extend(names, tokens)
        found = self.tables.find(names)
        if self.tables.pages_for(len(tokens)) - len(found) + self.tables.num_idle(found) > self.tables.num_free:
            return 0
        self.tables.share(slot, found)
        self.sequences[slot] = list(tokens[: len(found) * PAGE_SIZE])
        self.extend(slot, tokens[len(found) * PAGE_SIZE :])
        self.tables.publish(slot, names)
        return len(found) * PAGE_SIZE

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Append tokens to a sequence, if there are enough pages."""
        own = self.sequences[slot]
        if self.tables.missing(slot, len(own) + len(tokens)) > self.tables.num_free:
            return
        self.tables.grow(slot, len(own) + len(tokens))
        for token in tokens:
            page, offset = self.tables.tables[slot][len(own) // PAGE_SIZE], len(own) % PAGE_SIZE
            users = [table for table in self.tables.tables if page in table]
            assert len(users) == 1, "what is written into is one slot's own"
            self._held[page, offset] = token
            own.append(token)

    def clear(self, slot: int) -> None:
        self.tables.clear(slot)
        self.sequences[slot] = []

    def swap(self, first: int, second: int) -> None:
        self.tables.swap(first, second)
        own = self.sequences
        own[first], own[second] = own[second], own[first]

    def check(self) -> None:
        for table, sequence in zip(self.tables.tables, self.sequences, strict=True):
            assert len(table) == -(-len(sequence) // PAGE_SIZE), "a slot has the pages that it needs"
            held = [self._held[table[place // PAGE_SIZE], place % PAGE_SIZE] for place in range(len(sequence))]
            assert held == sequence
        used = {page for table in self.tables.tables for page in table}
        assert len(used) + self.tables.num_free == self.tables.num_pages, "a page is free or in use"
        assert all(page < self.tables.num_touched for page in used)


SLOTS = st.integers(0, 3)
TOKENS = st.lists(st.integers(0, 1), max_size=10)
"""Few different tokens, so that sequences share prefixes."""
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), SLOTS, TOKENS),
        st.tuples(st.just("extend"), SLOTS, TOKENS),
        st.tuples(st.just("clear"), SLOTS),
        st.tuples(st.just("swap"), SLOTS, SLOTS),
    ),
    max_size=40,
)


@given(num_pages=st.integers(1, 14), actions=ACTIONS)
def test_slots_hold_their_sequences_while_pages_are_shared_freed_and_reused(
    num_pages: int, actions: list[tuple[object, ...]]
) -> None:
    pages = Pages(num_pages, 4)
    for name, *arguments in actions:
        getattr(pages, str(name))(*arguments)
        pages.check()


def test_a_sequence_reuses_the_full_pages_of_a_finished_one() -> None:
    pages = Pages(8, 2)
    pages.begin(0, [1, 2, 3, 4, 5, 6, 7])
    pages.clear(0)
    assert pages.begin(1, [1, 2, 3, 4, 5, 6, 8]) == 6
    assert pages.begin(0, [1, 2, 3, 4, 5, 9]) == 3
    assert pages.begin(0, [4, 5, 6]) == 0  # the same tokens, but after others
    pages.check()


def test_pages_that_cannot_be_found_again_are_reused_first() -> None:
    pages = Pages(4, 2)
    pages.begin(0, [1, 2, 3, 4, 5, 6, 7])  # pages 0, 1 and, without a name, 2
    pages.clear(0)
    pages.begin(1, [9])
    assert pages.tables.tables[1] == [2]
    pages.extend(1, [9] * 4)
    assert pages.tables.tables[1] == [2, 3]  # never used
    pages.extend(1, [9] * 3)
    assert pages.tables.tables[1] == [2, 3, 1]  # the last freed page before the first one
    assert pages.begin(0, [1, 2, 3]) == 3


@given(widths=st.lists(st.integers(1, 9), max_size=12), most=st.integers(1, 40))
def test_rows_are_read_in_blocks_that_fit_the_buffer(widths: list[int], most: int) -> None:
    blocks = blocks_of(widths, most)
    assert [row for first, stop, _ in blocks for row in range(first, stop)] == list(range(len(widths)))
    for first, stop, width in blocks:
        assert width == max(widths[first:stop])
        assert (stop - first) * width <= most or stop - first == 1
