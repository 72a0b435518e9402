"""How often drafted tokens stood, of late: by what they were drafted from, and by how far ahead.

Pure: outcomes are told, never measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MEMORY = 0.99
_PRIOR_WEIGHT = 2.0
_START = 1.0
"""Chance of a drafted token nothing is known about: drafts must not be cut off for what was never seen to fall."""
_DEPTH_MEMORY = 0.999
"""Longer than that of kinds: of two depths that are about as good, the better one is told by small differences."""
_DEPTH_PRIOR_WEIGHT = 4.0
_FIRST_CHANCE = 0.6
"""That of the first drafted token, before anything is known; hopeful, so that it is tried."""


class AcceptanceRates:
    """How often drafted tokens of each kind stood, of late."""

    def __init__(self) -> None:
        """Know nothing: every kind is taken to stand."""
        self._counts: dict[object, list[float]] = {}
        """Stood and tried, older ones counting less."""
        self._all = [_START * _PRIOR_WEIGHT, _PRIOR_WEIGHT]
        self._chances: dict[object, float] = {}
        """As last learnt."""

    def __call__(self, kind: object) -> float:
        """Return the chance that a token of this kind stands, given that those before it do."""
        chance = self._chances.get(kind)
        return self._all[0] / self._all[1] if chance is None else chance

    def learn(self, kinds: Sequence[object], stood: int) -> None:
        """Take the outcome of a draft whose first ``stood`` tokens stood; those behind the first fallen say nothing."""
        for index, kind in enumerate(kinds[: stood + 1]):
            counts = self._counts.get(kind)
            if counts is None:
                counts = self._counts[kind] = [0.0, 0.0]
            won = index < stood
            _count((counts, self._all), won, _MEMORY)
            overall = self._all[0] / self._all[1]
            self._chances[kind] = (counts[0] + _PRIOR_WEIGHT * overall) / (counts[1] + _PRIOR_WEIGHT)


class DepthOutcome(NamedTuple):
    """What one sample's step comes to where drafts have so many tokens at most."""

    tokens: float
    """Expected: the drafted ones that stand, and one more."""
    variance: float
    """Of that number."""
    drafted: float
    """Expected tokens of the draft."""


class DepthProfile:
    """How far drafts reach and how far they stand, by depth: the place of a token in its draft, from 1.

    What a depth was never tried for is taken to stand as often as the depth before it: a hope that trying corrects.
    """

    def __init__(self, max_depth: int) -> None:
        """Know nothing of depths up to ``max_depth``."""
        self._stood = [[0.0, 0.0] for _ in range(max_depth)]
        """By depth: how often a token stood, of the times that all before it did, and these times."""
        self._reached = [[0.0, 0.0] for _ in range(max_depth)]
        """By depth: how many drafts had a token there, of those that might have had one, and these."""

    def learn(self, length: int, stood: int, *, depth: int, room: int) -> None:
        """Take the outcome of a draft that might have had ``depth`` tokens.

        Args:
            length: Tokens that it had.
            stood: Its first tokens that stood.
            depth: Tokens that it might have had.
            room: Tokens that the sample got: of what was drafted behind those nothing is known.
        """
        _count(self._reached[: min(length, depth)], True, _DEPTH_MEMORY)
        _count(self._reached[length:depth], False, _DEPTH_MEMORY)
        known = min(depth, room)
        _count(self._stood[: min(stood, known)], True, _DEPTH_MEMORY)
        _count(self._stood[stood : min(stood + 1, known)], False, _DEPTH_MEMORY)

    def outcomes(self) -> list[DepthOutcome]:
        """Return what drafts of at most 1, 2, 3 … tokens come to."""
        outcomes = []
        chance, reach, survival = _FIRST_CHANCE, 1.0, 1.0
        tokens = squares = 1.0
        drafted = 0.0
        for depth, (stood, reached) in enumerate(zip(self._stood, self._reached, strict=True), start=1):
            chance = (stood[0] + _DEPTH_PRIOR_WEIGHT * chance) / (stood[1] + _DEPTH_PRIOR_WEIGHT)
            survival *= chance
            tokens += survival
            squares += survival * (2 * depth + 1)
            reach = min(reach, (reached[0] + reach) / (reached[1] + 1.0))
            drafted += reach
            outcomes.append(DepthOutcome(tokens, max(squares - tokens * tokens, 0.0), drafted))
        return outcomes


def _count(pairs: Iterable[list[float]], won: bool, memory: float) -> None:
    """Add to how often each was won and tried; what was there counts ``memory`` times as much from now on."""
    for pair in pairs:
        pair[0] = memory * pair[0] + won
        pair[1] = memory * pair[1] + 1.0
