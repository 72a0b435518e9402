"""What drafts would have come to, had they been verified: looked up now and then while none are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_realloc.generation.acceptance import AcceptanceRates, DepthProfile
from lightning_realloc.generation.draft_worth import COST_OF_TRYING
from lightning_realloc.generation.drafting import Chance, Drafter
from lightning_realloc.generation.samples import Sample
from lightning_realloc.generation.verification import Draft

_EVERY = 16
"""Steps without drafts after which some are made that are not verified."""
_OFTEN = 16
"""Times in a row. Then `_SELDOM` times as many steps pass: tiny models' take as long as a few look-ups."""
_SELDOM = 4
_FREE = 16
"""Times, the first ones, whose seconds do not count: that drafts would stand should be known soon."""
_PHASES = 3
"""Steps in a row: a token is drafted, then what begins behind it, then what begins behind the token after that."""


class DraftOutcome(NamedTuple):
    """A draft and what came in its place."""

    draft: Draft
    tokens: Sequence[int]
    """That the sample got from where the draft began."""
    limit: int
    """Tokens that the draft might have had."""
    resumed: bool | None
    """Whether the sample's draft before it was cut off and all of it stood; None if that is not known."""

    def teach(self, rates: AcceptanceRates, profile: DepthProfile) -> None:
        """Tell how many tokens stood; of those behind what the sample got nothing is known."""
        known = min(len(self.draft), len(self.tokens))
        stood = 0
        while stood < known and self.draft.tokens[stood] == self.tokens[stood]:
            stood += 1
        rates.learn(self.draft.kinds[:known], stood)
        profile.learn(len(self.draft), stood, depth=self.limit, room=len(self.tokens), resumed=self.resumed)


class _Probe(NamedTuple):
    """A draft of one token; behind it, the next draft begins, as if it had been verified."""

    sample: Sample
    place: int
    """Number of tokens that the sample had."""
    draft: Draft

    def age(self) -> int:
        """Return how many tokens the sample got since."""
        return len(self.sample.token_ids) - self.place

    def stood(self) -> bool:
        """Whether the sample got this token."""
        return bool(self.draft) and self.sample.token_ids[self.place] == self.draft.tokens[0]


class _Foreseen(NamedTuple):
    """A draft that is not verified."""

    sample: Sample
    place: int
    limit: int
    draft: Draft
    resumed: bool

    def outcome(self) -> DraftOutcome | None:
        """Return what came in its place, once it is known whether it stood."""
        tokens = self.sample.token_ids[self.place : self.place + self.limit + 1]
        might_stand = len(tokens) <= len(self.draft) and tokens == list(self.draft.tokens[: len(tokens)])
        if might_stand and self.sample.finish_reason is None:
            return None
        return DraftOutcome(self.draft, tokens, self.limit, self.resumed)


class Foresight:
    """Drafts for some samples that nothing is drafted for, and tells what that would have come to.

    Those samples pass every place of their responses, and not only those where drafts begin. So each is first given one
    token: where that falls, the next draft begins behind it, and where it stands, behind the token after it.
    """

    def __init__(self, drafter: Drafter, max_draft_tokens: int) -> None:
        """Know nothing."""
        self._drafter = drafter
        self._max_draft_tokens = max_draft_tokens
        self._num_in_a_row = 0
        self._num_times = 0
        self._saved_s = 0.0
        """What may be spent still, of the share that trying may take; less than nothing where more was spent."""
        self._probes: list[_Probe] = []
        self._foreseen: list[_Foreseen] = []

    def begin(self) -> None:
        """Start a generation."""
        self._probes.clear()
        self._foreseen.clear()

    def rest(self) -> None:
        """Take that drafts are verified: behind them, it is looked often again."""
        self._num_in_a_row = 0

    def is_due(self, step: int) -> bool:
        """Whether there is something to look up in this step without drafts."""
        phase = step % self._every()
        if not phase:
            return self._saved_s >= 0.0
        return phase < _PHASES and any(probe.age() == phase for probe in self._probes)

    def spend(self, looked_s: float, passed_s: float) -> None:
        """Take the seconds of a step without drafts, and those of looking up in it."""
        self._saved_s += COST_OF_TRYING * passed_s
        if self._num_times > _FREE:
            self._saved_s -= looked_s

    def look(self, step: int, samples: Sequence[Sample], chance: Chance) -> None:
        """Draft a token for these samples, or what begins behind such tokens of late."""
        phase = step % self._every()
        if phase:
            self._follow([probe for probe in self._probes if probe.age() == phase], phase, chance)
        else:
            self._num_in_a_row += 1
            self._num_times += 1
            drafts = self._propose(samples, [1] * len(samples), chance)
            self._probes = [_Probe(sample, len(sample.token_ids), draft)
                            for sample, draft in zip(samples, drafts, strict=True)]  # fmt: skip

    def take_outcomes(self) -> list[DraftOutcome]:
        """Return what is known by now, once."""
        outcomes = [(seen, seen.outcome()) for seen in self._foreseen]
        self._foreseen = [seen for seen, outcome in outcomes if outcome is None]
        return [outcome for _, outcome in outcomes if outcome is not None]

    def _follow(self, probes: Sequence[_Probe], phase: int, chance: Chance) -> None:
        resumed = phase > 1
        due = [probe.sample for probe in probes if probe.stood() == resumed and probe.sample.finish_reason is None]
        limits = limits_of(due, self._max_draft_tokens)
        drafts = self._propose(due, limits, chance)
        self._foreseen += [_Foreseen(sample, len(sample.token_ids), limit, draft, resumed)
                           for sample, limit, draft in zip(due, limits, drafts, strict=True)]  # fmt: skip

    def _propose(self, samples: Sequence[Sample], limits: Sequence[int], chance: Chance) -> list[Draft]:
        if not samples:
            return []
        drafts = self._drafter.propose(samples, limits, chance, [0.0] * len(samples))
        return [draft.without_laws() for draft in drafts]

    def _every(self) -> int:
        return _EVERY * (1 if self._num_in_a_row < _OFTEN else _SELDOM)


def limits_of(samples: Sequence[Sample], most: int) -> list[int]:
    """Return how many tokens may be drafted for each sample; its last one is never a draft's."""
    return [min(most, sample.max_new_tokens - len(sample.token_ids) - 1) for sample in samples]
