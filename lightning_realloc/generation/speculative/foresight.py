"""What drafts would have come to, had they been verified: told of what samples got while none are.

Samples then pass every place of their responses, and drafts begin at some of them alone. So what a sample got is gone
through once more, from draft to draft, as if these had been verified, by a copy that has no more of it than it had.
One that is hard to draft for takes more drafts for as many tokens, and so counts as much more as it would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.speculative.acceptance import AcceptanceRates, DepthProfile
from lightning_realloc.generation.speculative.draft_worth import COST_OF_TRYING
from lightning_realloc.generation.speculative.drafting import Chance, Drafter, Propose
from lightning_realloc.generation.speculative.verify import Draft

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
"""Its multiples spread evenly between whole numbers, whichever of them are taken."""
_EVERY = 16
"""Steps without drafts after which what samples got since is replayed."""
_OFTEN = 16
"""Times in a row. Then `_SELDOM` times as many steps pass."""
_SELDOM = 2
_FREE = 16
"""Times, the first ones, whose seconds do not count: that drafts would stand should be known soon."""
_SAMPLES = 2
"""That are replayed at a time."""
_STRETCH = 64
"""Most tokens of each that are replayed at a time."""
_WHOLE = 64
"""Tokens, at most, of responses that are replayed from the first one once they are over, between two times that seconds
are told: where responses are short, hardly any would be replayed else, and longer ones are anyway."""
_NAMES = -(1 << 62)
"""Copies are called as no sample is: by numbers below it."""
_LONGEST = 48
"""Tokens behind which another sample is replayed: each is one of many that differ."""


class DraftOutcome(NamedTuple):
    """A draft and what came in its place."""

    draft: Draft
    tokens: Sequence[int]
    """That the sample got from where the draft began."""
    limit: int
    """Tokens that the draft might have had."""
    resumed: bool | None
    """Whether the sample's draft before it was cut off and all of it stood; None if that is not known."""

    def num_stood(self) -> int:
        """Return how many tokens stood."""
        most = min(len(self.draft), len(self.tokens))
        return next((i for i in range(most) if self.draft.tokens[i] != self.tokens[i]), most)

    def teach(self, rates: AcceptanceRates, profile: DepthProfile) -> None:
        """Tell how many tokens stood; of those behind what the sample got nothing is known."""
        stood = self.num_stood()
        rates.learn(self.draft.kinds[: len(self.tokens)], stood)
        profile.learn(len(self.draft), stood, depth=self.limit, room=len(self.tokens), resumed=self.resumed)


class _Replay:
    """Goes through what a sample got, from draft to draft."""

    def __init__(self, sample: Sample, name: int, *, begin: int) -> None:
        """Begin behind so many of the sample's tokens; ``name``: no sample's `sample_id`."""
        self.sample = sample
        self.copy = Sample(name, sample.prompt_number, sample.prompt, sample.max_new_tokens, sample.key)
        self.begin = begin
        self._resumed: bool | None = None
        """Whether the next draft goes on where one was cut off; None: there is none before it."""
        self._is_told = not begin
        """Whether the next draft would begin where it does."""
        self.open: list[DraftOutcome] = []
        """What is known of a draft whose end is not."""
        self._pass(self.begin)

    @property
    def is_long(self) -> bool:
        """Whether another sample should be gone through."""
        return len(self.copy.token_ids) - self.begin >= _LONGEST

    def go_on(self, propose: Propose, *, depth: int, most: int, chance: Chance) -> Iterator[DraftOutcome]:
        """Yield what drafts of ``most`` tokens came to, each begun where one of ``depth`` tokens before it ended.

        As far as it is known by now; where that is much, for the last of it alone.
        """
        self.open = []
        sample, copy = self.sample, self.copy
        num_known = len(sample.token_ids)
        if len(copy.token_ids) < num_known - _STRETCH:
            self._pass_over(num_known - _STRETCH - len(copy.token_ids))
        while (place := len(copy.token_ids)) < num_known:
            limit = limits_of([copy], most)[0]
            tokens = sample.chosen(place, limit + 1)
            if not tokens:
                self._pass_over(1)
                continue
            (draft,) = propose([copy], [limit], chance, [0.0])
            outcome = DraftOutcome(draft.without_laws(), tokens, limit, self._resumed)
            num_stood = min(outcome.num_stood(), depth)
            told = [outcome] if self._is_told else []
            may_go_on = num_stood == len(tokens) and place + len(tokens) == num_known
            if may_go_on and sample.finish_reason is None:  # where the next one begins is not known
                self.open = told
                return
            yield from told
            self._resumed, self._is_told = num_stood == depth, True
            self._pass(min(num_stood + 1, len(tokens)))

    def _pass_over(self, num_tokens: int) -> None:
        """Let the copy get the sample's next tokens, behind which no draft may have begun."""
        self._pass(num_tokens)
        self._resumed, self._is_told = None, False

    def _pass(self, num_tokens: int) -> None:
        """Let the copy get the sample's next tokens."""
        sample, copy = self.sample, self.copy
        span = slice(len(copy.token_ids), len(copy.token_ids) + num_tokens)
        for token, is_own in zip(sample.token_ids[span], sample.model_mask[span], strict=True):
            copy.append(token, 0.0)
            copy.model_mask[-1] = is_own


class Foresight:
    """Drafts for copies of some samples that nothing is drafted for, and tells what that would have come to."""

    def __init__(self, drafter: Drafter, max_draft_tokens: int, *, propose: Propose | None = None) -> None:
        """Know nothing; ``propose`` takes the place of the drafter's own."""
        self.depth = 1
        """Tokens of a draft behind which the next one begins."""
        self._drafter = drafter
        self._propose = propose or drafter.propose
        self._max_draft_tokens = max_draft_tokens
        self._num_in_a_row = 0
        self._num_times = {False: 0, True: 0}
        """That something was replayed: for samples whose prompts were met before (True), and for others."""
        self._acquainted = False
        self._shows_whole = not drafter.exchanges
        """Whether a response that is over would have been drafted for as its replay is, and tells of others. Not where
        most of what is drafted from came while it ran. Nor where drafts were made for it or others: who is over in a
        step without drafts is hard to draft for then, or would have been over before."""
        self._next = 0
        """Number of the first step that may replay again."""
        self._saved_s = 0.0
        """What may be spent still, of the share that trying may take; less than nothing where more was spent."""
        self._num_replays = 0
        self._replays: dict[int, _Replay] = {}
        """By identity of the sample."""
        self._num_whole = 0
        """Tokens of responses that were replayed from the first one since seconds were told."""

    def begin(self, *, acquainted: bool = False) -> None:
        """Start a generation of samples whose prompts were met before, or of others."""
        self._acquainted = acquainted
        self._shows_whole = acquainted or not self._drafter.exchanges
        self._stop_all()
        self._next = 0  # so that first tokens count as others do

    def rest(self) -> None:
        """Take that drafts are verified: behind them, it is looked often again."""
        self._num_in_a_row = 0
        self._shows_whole = False
        self._stop_all()

    def is_due(self, step: int) -> bool:
        """Whether there is something to look up in this step without drafts."""
        return step >= self._next and self._may_spend

    def spend(self, looked_s: float, passed_s: float) -> None:
        """Take the seconds of steps without drafts, and those of looking up in them."""
        self._num_whole = 0
        self._saved_s += COST_OF_TRYING * passed_s
        if not self._is_free:
            self._saved_s -= looked_s

    def look(self, step: int, samples: Sequence[Sample], chance: Chance) -> list[DraftOutcome]:
        """Return what drafts for some samples would have come to since the last time; next, others may be chosen."""
        self._next = step + _EVERY * (1 if self._num_in_a_row < _OFTEN else _SELDOM)
        self._num_in_a_row += 1
        self._num_times[self._acquainted] += 1
        told = [outcome for replay in self._replays.values() for outcome in self._go_on(replay, chance)]
        running = {id(sample) for sample in samples}
        for name, replay in list(self._replays.items()):
            if replay.is_long or name not in running:
                told += replay.open  # without it, drafts would look shorter than they are
                self._stop(replay)
        free = [sample for sample in samples if id(sample) not in self._replays]
        while free and len(self._replays) < _SAMPLES:
            sample = free.pop(int(len(free) * ((1 + self._num_replays) * GOLDEN % 1.0)))
            self._begin(sample, len(sample.token_ids))
        return told

    def heeds_end_of(self, sample: Sample) -> bool:
        """Whether `finish` has something to tell of this sample."""
        if id(sample) in self._replays:
            return True
        return self._shows_whole and self._num_whole + len(sample.token_ids) <= _WHOLE and self._may_spend

    def finish(self, sample: Sample, chance: Chance) -> list[DraftOutcome]:
        """Return what drafts for a sample would have come to up to its end, before the drafter knows of it."""
        if not self.heeds_end_of(sample):
            return []
        replay = self._replays.get(id(sample))
        if replay is None:
            self._num_whole += len(sample.token_ids)
            replay = self._begin(sample, 0)
        told = list(self._go_on(replay, chance))
        self._stop(replay)
        return told

    @property
    def _is_free(self) -> bool:
        """Whether seconds do not count yet for such samples."""
        return self._num_times[self._acquainted] <= _FREE

    @property
    def _may_spend(self) -> bool:
        return self._is_free or self._saved_s >= 0.0

    def _begin(self, sample: Sample, begin: int) -> _Replay:
        self._num_replays += 1
        replay = self._replays[id(sample)] = _Replay(sample, _NAMES - self._num_replays, begin=begin)
        return replay

    def _go_on(self, replay: _Replay, chance: Chance) -> Iterator[DraftOutcome]:
        return replay.go_on(self._propose, depth=self.depth, most=self._max_draft_tokens, chance=chance)

    def _stop_all(self) -> None:
        for replay in list(self._replays.values()):
            self._stop(replay)

    def _stop(self, replay: _Replay) -> None:
        self._drafter.forget(replay.copy)
        del self._replays[id(replay.sample)]


def limits_of(samples: Sequence[Sample], most: int) -> list[int]:
    """Return how many tokens may be drafted for each sample; its last one is never a draft's."""
    return [min(most, sample.max_new_tokens - len(sample.token_ids) - 1) for sample in samples]
