"""Which generations need no word between ranks: those like others that were over before a move could have paid.

A report costs a rank up to a millisecond, which is much where a whole call takes a tenth of a second. All ranks see the
same of a call, and so agree on the next ones.
"""

from __future__ import annotations

from collections.abc import Hashable

MOST_IN_A_ROW = 8
"""Calls behind which one is looked at again, at most: lengths change while a policy learns."""


class ShortCallPredictor:
    """Calls by kind: after a short one the next of its kind is taken to be short as well, then two, four, and eight."""

    def __init__(self) -> None:
        """Know no call."""
        self._in_a_row: dict[Hashable, int] = {}
        """Calls to be taken for short after the last one that was looked at."""
        self._left: dict[Hashable, int] = {}
        """Of these, those to come."""

    def predict(self, kind: Hashable) -> bool:
        """Whether the call that begins now is taken to be short."""
        left = self._left.get(kind, 0)
        self._left[kind] = max(left - 1, 0)
        return left > 0

    def look_at(self, kind: Hashable, *, was_short: bool) -> None:
        """Learn what a call came to that was not taken to be short."""
        in_a_row = min(2 * self._in_a_row.get(kind, 0) or 1, MOST_IN_A_ROW) if was_short else 0
        self._in_a_row[kind] = self._left[kind] = in_a_row
