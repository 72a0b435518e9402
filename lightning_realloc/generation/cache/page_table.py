"""Tables of the cache's pages, and the index of prefixes that sequences share. Pure: numbers and tokens, no tensors.

A property test holds four invariants. A page is free or in a table, never both. Two tables share a page only if both
sequences are equal up to its end and nobody writes into it any more. A partly filled page is in one table only. A
prefix id finds a page that still holds this prefix.
"""

from __future__ import annotations

from collections.abc import Sequence


class PageTables:
    """The pages of every slot, and the free pages.

    A freed page keeps its prefix id until it is reused, so a later sequence with the same prefix finds it. Pages
    without an id are reused first, then pages that were never used, then those freed longest ago.
    """

    def __init__(self, num_pages: int, page_size: int, *, num_slots: int) -> None:
        """Begin with all pages free; ``page_size`` in positions."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.tables: list[list[int]] = [[] for _ in range(num_slots)]
        """Pages of each slot, in the order of positions."""
        self.num_touched = 0
        """Number of pages that were ever used; their numbers are below it."""
        self.changed: set[int] = set()
        """Slots whose table has changed since the reader last emptied this set."""
        self._num_users = [0] * num_pages
        self._blank: list[int] = []
        self._cached: dict[int, None] = {}
        """Free pages with a prefix id, in the order in which they were freed."""
        self._id_of: dict[int, int] = {}
        self._page_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._blank) + len(self._cached) + self.num_pages - self.num_touched

    def pages_for(self, length: int) -> int:
        """Return the number of pages for ``length`` positions."""
        return -(-length // self.page_size)

    def missing(self, slot: int, length: int) -> int:
        """Return the number of pages that a slot lacks to hold ``length`` positions."""
        return max(0, self.pages_for(length) - len(self.tables[slot]))

    def num_idle(self, pages: Sequence[int]) -> int:
        """Return the number of free pages among these."""
        return sum(not self._num_users[page] for page in pages)

    def grow(self, slot: int, length: int) -> None:
        """Give a slot the pages that it lacks for ``length`` positions."""
        for _ in range(self.missing(slot, length)):
            page = self._take()
            self._num_users[page] = 1
            self.tables[slot].append(page)
            self.changed.add(slot)

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Begin the sequence of an empty slot with full pages that nobody writes into."""
        assert not self.tables[slot], f"slot {slot} holds pages already"
        for page in pages:
            if not self._num_users[page]:
                del self._cached[page]
            self._num_users[page] += 1
        self.tables[slot] = list(pages)
        self.changed.add(slot)

    def assign(self, slot: int, pages: Sequence[int]) -> None:
        """Set a slot's pages, in tables that only follow those of another rank."""
        self.tables[slot] = list(pages)
        self.num_touched = max([self.num_touched, *(page + 1 for page in pages)])
        self.changed.add(slot)

    def clear(self, slot: int) -> None:
        """Free a slot's pages. The last ones are reused first, because sequences share first pages more often."""
        for page in reversed(self.tables[slot]):
            self._num_users[page] -= 1
            if not self._num_users[page]:
                if page in self._id_of:
                    self._cached[page] = None
                else:
                    self._blank.append(page)
        self.tables[slot] = []
        self.changed.add(slot)

    def swap(self, first: int, second: int) -> None:
        """Exchange the pages of two slots."""
        tables = self.tables
        tables[first], tables[second] = tables[second], tables[first]
        self.changed.update((first, second))

    def publish(self, slot: int, ids: Sequence[int]) -> None:
        """Set the prefix ids of a slot's first pages, whose content is there after the next forward."""
        for page, prefix_id in zip(self.tables[slot], ids, strict=False):
            if page not in self._id_of and prefix_id not in self._page_of:
                self._id_of[page] = prefix_id
                self._page_of[prefix_id] = page

    def find(self, ids: Sequence[int]) -> list[int]:
        """Return the pages of the longest prefix, given the ids of its pages."""
        found = []
        for prefix_id in ids:
            page = self._page_of.get(prefix_id)
            if page is None:
                break
            found.append(page)
        return found

    def _take(self) -> int:
        if self._blank:
            return self._blank.pop()
        if self.num_touched < self.num_pages:
            self.num_touched += 1
            return self.num_touched - 1
        assert self._cached, f"all {self.num_pages} pages are in use"
        page = next(iter(self._cached))
        del self._cached[page]
        del self._page_of[self._id_of.pop(page)]
        return page


class PrefixIndex:
    """Ids of prefixes: pages get equal ids if they, and all pages before them in a sequence, hold equal tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}
        """(id of the page before or -1, tokens of the page) -> id."""

    def extend(self, ids: list[int], tokens: Sequence[int]) -> None:
        """Append the ids of the whole pages of ``tokens``, which follow the pages that have ids."""
        size = self.page_size
        for begin in range(0, len(tokens) - size + 1, size):
            # Numbers instead of hashes, because two contents could share a chain of hashes.
            key = (ids[-1] if ids else -1, tuple(tokens[begin : begin + size]))
            ids.append(self._ids.setdefault(key, len(self._ids)))
