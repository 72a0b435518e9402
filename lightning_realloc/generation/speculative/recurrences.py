"""Where the end of a text stood before in it, or in others like it: what followed there may follow here.

As compressors find what they can copy, every place is chained to the one before it that stands behind the same tokens
(hash chains, RFC 1951, section 4): a token more is two entries, whatever the lengths of contexts that are told apart.
Places are chained by the three tokens before them, and by the one before them for where those three never stood.
"""

from __future__ import annotations

from collections.abc import Sequence

ORDERS = (8, 4, 3, 2, 1)
"""Lengths of context that are told apart, the longest first."""
_STEM = 3
"""Tokens by which places are chained."""
_MOST_PLACES = 32
"""Places that are looked at along a chain, the latest ones: what follows common tokens is told well by so many."""
_MOST_FOUND = 64
"""Contexts whose places are kept: samples of a prompt are at about the same place of their responses."""
NO_TOKEN = -1
"""Stands between texts, which no token's context crosses."""


class NgramIndex:
    """Texts, and the places in them that stand behind the same tokens."""

    def __init__(self) -> None:
        """Hold no text."""
        self._tokens = [NO_TOKEN] * ORDERS[0]  # before the first token, so that there are contexts of every length
        # Numbers and tuples of numbers alone, which the garbage collector does not visit; 0: no such place.
        self._behind_stem: dict[tuple[int, ...], int] = {}
        """The last place behind these three tokens."""
        self._before_stem = [0] * ORDERS[0]
        """By place: the one before it that is behind the same three tokens."""
        self._behind_token: dict[int, int] = {}
        self._before_token = [0] * ORDERS[0]

    def copy(self) -> NgramIndex:
        """Return the same texts once more, to go on with in another way."""
        other = NgramIndex()
        other._tokens = self._tokens.copy()
        other._behind_stem, other._before_stem = self._behind_stem.copy(), self._before_stem.copy()
        other._behind_token, other._before_token = self._behind_token.copy(), self._before_token.copy()
        return other

    @property
    def num_tokens(self) -> int:
        """Number of tokens, if this is one text."""
        return len(self._tokens) - ORDERS[0]

    def begin(self, context: Sequence[int]) -> None:
        """Begin another text, behind tokens that are not known to follow what is before them."""
        self._tokens += (NO_TOKEN, *context)
        places = [0] * (1 + len(context))
        self._before_stem += places
        self._before_token += places

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with the last text."""
        behind_stem, before_stem = self._behind_stem, self._before_stem
        behind_token, before_token = self._behind_token, self._before_token
        first, second, third = self._tokens[-_STEM:]
        for place, token in enumerate(tokens, start=len(self._tokens)):
            stem = first, second, third
            before_stem.append(behind_stem.get(stem, 0))
            behind_stem[stem] = place
            before_token.append(behind_token.get(third, 0))
            behind_token[third] = place
            first, second, third = second, third, token
        self._tokens += tokens

    def find(self, context: list[int]) -> tuple[int, Branch | None]:
        """Return the places behind the longest end of ``context`` that is known, the latest ones first.

        And its length, as one of `ORDERS`, or 0 and None where there is no such place; ``context`` has as many tokens
        as the longest of them.
        """
        own = self._tokens
        if place := self._behind_stem.get(tuple(context[-_STEM:]), 0):
            order, places = _STEM, _chain(place, self._before_stem)
            for longer in (4, 8):
                end = context[-longer:]
                behind = [place for place in places if own[place - longer : place] == end]
                if not behind:
                    break
                order, places = longer, behind
            return order, Branch(own, places)
        if place := self._behind_token.get(context[-1], 0):
            places = _chain(place, self._before_token)
            behind = [place for place in places if own[place - 2] == context[-2]]
            return (2, Branch(own, behind)) if behind else (1, Branch(own, places))
        return 0, None


class Branch:
    """Places that stand behind the same tokens, and what follows there: as of the text when it was found."""

    __slots__ = ("_known", "_places", "_tokens", "followers")

    def __init__(self, tokens: list[int], places: list[int]) -> None:
        """Look at these places of a text, one at least."""
        self._tokens = tokens
        self._places = places
        self._known: dict[int, Branch | None] | None = None
        self.followers: tuple[int, ...] = (
            (tokens[places[0]],) if len(places) == 1 else tuple(sorted([tokens[place] for place in places]))
        )
        """The tokens at these places, sorted."""

    def behind(self, token: int) -> Branch | None:
        """Return the places behind those of them where this token stands, but for ends of texts; None: there are none.

        Once found, they are kept: samples that were looked up together mostly go on together.
        """
        if self._known is None:
            self._known = {}
        if token not in self._known:
            own, stop = self._tokens, len(self._tokens) - 1
            here = [place for place in self._places if own[place] == token and place < stop]
            places = [place + 1 for place in here if own[place + 1] != NO_TOKEN]
            self._known[token] = Branch(own, places) if places else None
        return self._known[token]


class SharedNgramIndex(NgramIndex):
    """The same of texts that many samples are looked up in: what one of them found the others find at once."""

    def __init__(self) -> None:
        """Hold no text."""
        super().__init__()
        self._found: dict[tuple[int, ...], tuple[int, Branch | None]] = {}
        """By context, since the last text came."""

    def add(self, context: Sequence[int], text: Sequence[int]) -> None:
        """Take in a text, and what is before it."""
        self._found.clear()
        self.begin(context)
        self.extend(text)

    def find(self, context: list[int]) -> tuple[int, Branch | None]:
        """As of any text."""
        key = tuple(context)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            found = self._found[key] = super().find(context)
        return found


def _chain(place: int, before: Sequence[int]) -> list[int]:
    """Return a place and those that are chained to it."""
    places: list[int] = []
    while place and len(places) < _MOST_PLACES:
        places.append(place)
        place = before[place]
    return places
