"""Tables of the cache's pages: the pages of each slot's sequence. Pure: page numbers and prefix ids, no tokens.

A property test holds four invariants. A page is free or in a table, never both. Two tables share a page only if both
sequences are equal up to its end and nobody writes into it any more. A partly filled page is in one table only. A
prefix id finds a page that still holds this prefix.
"""

from __future__ import annotations

from collections.abc import Sequence


class PageTables:
    """The pages of every slot, and those that are free.

    A freed page keeps its name until it is given out again, so a sequence that begins alike may find it. Given out are
    pages without a name first, then those never used, then the one that was freed longest ago.
    """

    def __init__(self, num_pages: int, page_size: int, *, num_slots: int) -> None:
        """Begin with all pages free; ``page_size`` in positions."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.tables: list[list[int]] = [[] for _ in range(num_slots)]
        """Pages of each slot, that of its first positions first."""
        self.num_touched = 0
        """Pages that were ever given out: those below this number."""
        self.changed: set[int] = set()
        """Slots whose table changed since the owner of this set emptied it."""
        self._num_users = [0] * num_pages
        self._blank: list[int] = []
        self._named: dict[int, None] = {}
        """Free pages with a name, in the order in which they were freed."""
        self._name_of: dict[int, int] = {}
        self._page_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody needs."""
        return len(self._blank) + len(self._named) + self.num_pages - self.num_touched

    def pages_for(self, length: int) -> int:
        """Return how many pages so many positions take."""
        return -(-length // self.page_size)

    def missing(self, slot: int, length: int) -> int:
        """Return how many pages a slot lacks to hold so many positions."""
        return max(0, self.pages_for(length) - len(self.tables[slot]))

    def num_idle(self, pages: Sequence[int]) -> int:
        """Return how many of these pages are free."""
        return sum(not self._num_users[page] for page in pages)

    def grow(self, slot: int, length: int) -> None:
        """Give a slot the pages that it lacks for so many positions."""
        for _ in range(self.missing(slot, length)):
            page = self._take()
            self._num_users[page] = 1
            self.tables[slot].append(page)
            self.changed.add(slot)

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Let the sequence of an empty slot begin with these pages, full ones that nobody writes into."""
        assert not self.tables[slot], f"slot {slot} holds pages already"
        for page in pages:
            if not self._num_users[page]:
                del self._named[page]
            self._num_users[page] += 1
        self.tables[slot] = list(pages)
        self.changed.add(slot)

    def clear(self, slot: int) -> None:
        """Take a slot's pages back. The last ones are given out first: beginnings are found again more often."""
        for page in reversed(self.tables[slot]):
            self._num_users[page] -= 1
            if not self._num_users[page]:
                if page in self._name_of:
                    self._named[page] = None
                else:
                    self._blank.append(page)
        self.tables[slot] = []
        self.changed.add(slot)

    def swap(self, first: int, second: int) -> None:
        """Exchange the pages of two slots."""
        tables = self.tables
        tables[first], tables[second] = tables[second], tables[first]
        self.changed.update((first, second))

    def publish(self, slot: int, names: Sequence[int]) -> None:
        """Say what the first pages of a slot hold, or will once the next forward is over."""
        for page, name in zip(self.tables[slot], names, strict=False):
            if page not in self._name_of and name not in self._page_of:
                self._name_of[page] = name
                self._page_of[name] = page

    def find(self, names: Sequence[int]) -> list[int]:
        """Return the pages of as many of these names, from the first on, as there are pages of."""
        found = []
        for name in names:
            page = self._page_of.get(name)
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
        assert self._named, f"all {self.num_pages} pages are in use"
        page = next(iter(self._named))
        del self._named[page]
        del self._page_of[self._name_of.pop(page)]
        return page
