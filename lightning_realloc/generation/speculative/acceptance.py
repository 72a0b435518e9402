"""How often drafted tokens stood, of late: by what they were drafted from, and by how far ahead.

Pure: outcomes are told, never measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

_MEMORY = 0.99
_PRIOR_WEIGHT = 2.0
_START = 1.0
"""Chance of a drafted token nothing is known about: drafts must not be cut off for what was never seen to fall."""
DEPTH_MEMORY = 0.999
"""Longer than that of kinds: of two depths that are about as good, the better one is told by small differences."""
LOOK_UP_MEMORY = 0.997
"""The same of looked-up drafts, many of which are told of: in a new epoch they may be better all at once."""
_MOST_WEIGHT = 1e6
"""Of a draft, before all counts are scaled back: once in some thousands of drafts."""
_DEPTH_PRIOR_WEIGHT = 4.0
_POOLED_WEIGHT = 8.0
"""Drafts that those of all places count as, in what those of one kind are taken to come to."""
_FIRST_CHANCE = 0.6
"""That of the first drafted token, before anything is known; hopeful, so that it is tried."""


class AcceptanceRates:
    """How often drafted tokens of each kind stood, of late."""

    def __init__(self) -> None:
        """Know nothing: every kind is taken to stand."""
        self._counts: dict[object, tuple[float, float]] = {}
        """Stood and tried, older ones counting less."""
        self._all = (_START * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
        self._chances: dict[object, float] = {}
        """As last learnt."""

    def __call__(self, kind: object) -> float:
        """Return the chance that a token of this kind stands, given that those before it do."""
        chance = self._chances.get(kind)
        return self._all[0] / self._all[1] if chance is None else chance

    def learn(self, kinds: Sequence[object], stood: int) -> None:
        """Take the outcome of a draft whose first ``stood`` tokens stood; those behind the first fallen say nothing."""
        all_stood, all_tried = self._all
        for index, kind in enumerate(kinds[: stood + 1]):
            has_stood = index < stood
            own_stood, own_tried = self._counts.get(kind, (0.0, 0.0))
            own_stood, own_tried = _MEMORY * own_stood + has_stood, _MEMORY * own_tried + 1.0
            all_stood, all_tried = _MEMORY * all_stood + has_stood, _MEMORY * all_tried + 1.0
            self._counts[kind] = own_stood, own_tried
            self._chances[kind] = (own_stood + _PRIOR_WEIGHT * all_stood / all_tried) / (own_tried + _PRIOR_WEIGHT)
        self._all = all_stood, all_tried


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

    What can be foreseen comes in runs. So drafts that go on where the one before was cut off, all of it right, stand
    further than those behind a token that was not foreseen, and they are told apart: deeper drafts make fewer of them,
    and looking at every place of a response, as if each began a draft, would see each run as often as it is long. (The
    inspection paradox of renewal theory: Feller, "An Introduction to Probability Theory and Its Applications" II, I.4.)

    What a depth was never tried for is taken to stand as often as the depth before it: a hope that trying corrects. So
    is, by and by, what was tried long ago: every draft makes the counts of all depths and kinds fade. With counts that
    faded only where drafts went on, a draft model that had got better than its drafts were deep was never tried deeper
    again; and where nearly all drafts stood at once, what the few others had come to before told of half of them.
    """

    def __init__(self, max_depth: int, *, memory: float = DEPTH_MEMORY) -> None:
        """Know nothing of depths up to ``max_depth``; each draft counts ``memory`` times as much as the next one."""
        self._memory = memory
        self._weight = 1.0
        """Of the last draft: later ones count more, which is as if all earlier counts faded with each."""
        self._counts = {resumed: _Counts(max_depth) for resumed in (False, True, None)}
        """Of drafts behind a token that was not foreseen, of those that go on where the one before was cut off, and of
        those of which that is not known."""

    def learn(self, length: int, stood: int, *, depth: int, room: int, resumed: bool | None = None) -> None:
        """Take the outcome of a draft that might have had ``depth`` tokens.

        Args:
            length: Tokens that it had.
            stood: Its first tokens that stood.
            depth: Tokens that it might have had.
            room: Tokens that the sample got: of what was drafted behind those nothing is known.
            resumed: Whether the sample's draft before it had as many tokens as it might, and all stood;
                None if that is not known.
        """
        self._fade()
        self._counts[resumed].learn(length, stood, depth=depth, known=min(depth, room), weight=self._weight)

    def _fade(self) -> None:
        """Take that another draft was made."""
        self._weight /= self._memory
        if self._weight > _MOST_WEIGHT:
            for counts in self._counts.values():
                counts.scale(1.0 / self._weight)
            self._weight = 1.0

    def num_tried(self, depth: int) -> float:
        """Return how many drafts were right so far that their token at this depth might stand, of the last ones."""
        return sum(sum(counts.tried[depth:]) for counts in self._counts.values()) / self._weight

    def outcomes(self) -> list[DepthOutcome]:
        """Return what drafts of at most 1, 2, 3 … tokens come to."""
        pooled, fresh, resumed = (_Reckoning(_FIRST_CHANCE) for _ in range(3))
        outcomes, unit = [], self._weight
        counts = self._counts
        counted = zip(_by_depth(*counts.values()), _by_depth(counts[False]), _by_depth(counts[True]), strict=True)
        for depth, (of_all, of_fresh, of_resumed) in enumerate(counted, start=1):
            pooled.extend(of_all, depth, pooled, prior=_DEPTH_PRIOR_WEIGHT * unit, unit=unit)
            fresh.extend(of_fresh, depth, pooled, prior=_POOLED_WEIGHT * unit, unit=unit)
            resumed.extend(of_resumed, depth, pooled, prior=_POOLED_WEIGHT * unit, unit=unit)
            # The share of steps whose draft is resumed, if each kind is so often followed by a resumed one.
            share = fresh.survival / (1.0 - resumed.survival + fresh.survival)
            tokens = _mixed(fresh.tokens, resumed.tokens, share)
            variance = max(_mixed(fresh.squares, resumed.squares, share) - tokens * tokens, 0.0)
            outcomes.append(DepthOutcome(tokens, variance, _mixed(fresh.drafted, resumed.drafted, share)))
        return outcomes


class _Counts:
    """What became of drafts that began at places of one kind.

    A draft counts once, where it ended, and not at every depth up to there: drafts are learnt from far more often than
    asked about.
    """

    def __init__(self, max_depth: int) -> None:
        """Know of no draft of up to ``max_depth`` tokens."""
        self.stood, self.tried, self.reached, self.might = self.ends = [[0.0] * (max_depth + 1) for _ in range(4)]
        """By number of tokens, from 0: drafts of which so many stood; so many are known to have stood or fallen; that
        had so many; that might have had so many."""

    def scale(self, factor: float) -> None:
        """Multiply all counts."""
        for counts in self.ends:
            counts[:] = [factor * count for count in counts]

    def learn(self, length: int, stood: int, *, depth: int, known: int, weight: float) -> None:
        """Count a draft of ``length`` tokens, of ``depth`` at most, whose first ``stood`` stood, of ``known`` ones."""
        tried = min(stood + 1, known)
        self.stood[min(stood, tried)] += weight
        self.tried[tried] += weight
        self.reached[min(length, depth)] += weight
        self.might[depth] += weight


@dataclass(slots=True)
class _Reckoning:
    """What drafts of one kind come to, up to a depth."""

    chance: float
    """Of the token at that depth to stand, if those before it do."""
    survival: float = 1.0
    """Chance that all tokens up to it stand."""
    reach: float = 1.0
    """Share of drafts that have a token there."""
    tokens: float = 1.0
    squares: float = 1.0
    """Expected number of tokens of a step, and of its square."""
    drafted: float = 0.0

    def extend(self, counted: tuple[float, ...], depth: int, like: _Reckoning, *, prior: float, unit: float) -> None:
        """Take in one depth more: as ``like`` where nothing was counted.

        ``prior``, ``unit``: how much the chance of that and its reach count beside what was counted.
        """
        stood, tried, reached, might = counted
        self.chance = (stood + prior * like.chance) / (tried + prior)
        self.survival *= self.chance
        self.reach = min(self.reach, (reached + unit * like.reach) / (might + unit))
        self.tokens += self.survival
        self.squares += self.survival * (2 * depth + 1)
        self.drafted += self.reach


def _by_depth(*kinds: _Counts) -> Iterator[tuple[float, ...]]:
    """Yield for each depth, from 1: how many tokens stood there and how many were tried, of all drafts that were right
    up to it; how many drafts had a token there and how many might have."""
    of_all = zip(*(counts.ends for counts in kinds), strict=True)
    return zip(*map(_sums_from_behind, of_all), strict=True)


def _sums_from_behind(ends: Sequence[Sequence[float]]) -> list[float]:
    """Return how many drafts, of all kinds, ended at 1 or later, at 2 or later, and so on."""
    together: list[float] = [sum(counts) for counts in zip(*ends, strict=True)]
    return list(accumulate(together[:0:-1]))[::-1]


def _mixed(first: float, second: float, share: float) -> float:
    """Return the mean of two, of which the second has this share."""
    return first + share * (second - first)
