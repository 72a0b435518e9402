"""What drafted tokens are worth, in seconds, and whether drafting has paid for itself of late.

A token is worth the seconds of plain steps that it saves. Every sample has to be read in every plain step until it is
over, and there have to be as many steps as the last sample to be over needs: a token saves its own row, and a whole
step only if it is that last sample's. Where it is not known which one that is, the step's fixed seconds are shared out
by how likely each sample is the last. Pure: seconds and outcomes are told, never measured here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TRIAL = 8
"""Steps after which it is judged whether drafting pays; more of them where a step is one of few samples."""
_TRIAL_ROWS = 32
"""Samples' steps that a trial has at least: what one sample gets in a step is mostly chance."""
_GLARING = 1.0
"""Loss, in seconds per second spent and summed over steps, that ends a trial at once."""
_PAUSE = 12
"""Plain steps in a row that tell what a plain step takes; the first ones behind verifying steps are slower."""
COST_OF_TRYING = 0.003
"""Share of all seconds that drafting in vain may come to."""
_PAUSE_AFTER = 4000
_LEAST_PAUSE_AFTER = 160
"""Steps with drafts that are told of, for every second gained per second spent, and those beside them, after which a
pause shows what plain steps take now: it loses what drafts would have gained and half a step, 0.3 % at most. That the
machine got slower as a whole, steps with drafts tell as well; that plain ones look dearer than they are, they do
not."""
_FIRST_PAUSE_AFTER = 24
_IN_DOUBT = 0.04
"""Such steps, and what plain steps look too dear by, as like as not: drafting begins where they look dear, and so where
they look dearer than they are. The first pause comes soon where no more than that is gained, and ever later the surer
the gain is; the next one after twice as many steps, up to those above."""
_RATE = 0.2
"""Weight of the last trial, where there were many."""
_NOISE = 0.1
"""What one trial's balance is off by, as like as not."""
_MOST_LOSS = 0.5
"""Share of its seconds that one step counts as lost at most: a hiccup says nothing about drafting."""


def chances_to_be_last(left: Sequence[float]) -> list[float]:
    """Return how likely each sample is the last one, beside the one that has the most tokens left, whose chance is 1.

    Their sum says how many samples may be the last to be over.

    Args:
        left: Tokens that each sample is expected to get still.
    """
    longest = max(left)
    # How far samples drift apart while the longest one runs: like the steps of a random walk, of two tokens each.
    spread = 2.0 * math.sqrt(longest + 1.0)
    return [math.exp((tokens - longest) / spread) for tokens in left]


def token_worths(chances: Sequence[float], plain_s: float, row_s: float) -> list[float]:
    """Return what one token of each sample is worth, in seconds; all together are worth a plain step.

    Args:
        chances: Of each sample to be the last one.
        plain_s: Seconds of a plain step of these samples.
        row_s: Those of them that one sample adds.
    """
    share_s = (plain_s - row_s * len(chances)) / sum(chances)
    return [row_s + share_s * chance for chance in chances]


@dataclass(slots=True)
class _Record:
    """How drafting went with about so many samples."""

    balance: float = 0.0
    """Seconds gained per second spent, in the last trials."""
    trial: float = 0.0
    """The same, summed over the steps of this trial."""
    num_steps: int = 0
    """Of this trial."""
    num_trials: int = 0
    steps_since_pause: int = 0
    num_pauses: int = 0
    """Since drafting began."""
    num_plain: int = 0
    """Plain steps since drafting ended."""
    num_rests: int = 0
    """In a row, since drafting last paid."""
    rest: int = 0
    """Steps to rest still."""


class Payoff:
    """Whether drafting has paid of late, by the number of running samples; where it has not, how long it rests.

    With few samples a verified token costs next to nothing, with many as much as any other, and the end of a generation
    runs with few: each power of two has a record of its own.
    """

    def __init__(self) -> None:
        """Know nothing: plain steps come first, to compare with."""
        self._all_records: dict[bool, dict[int, _Record]] = {False: {}, True: {}}
        self.turn_to(acquainted=False)
        self.saved_s = 0.0
        """What tries may lose still, of their share of all seconds; less than nothing where they lost more."""
        self._num_free = 0
        """Steps of tries to come that are free."""

    def turn_to(self, *, acquainted: bool) -> None:
        """Go on by what drafting gained for samples whose prompts were met before, or for others."""
        self._records = self._all_records[acquainted]

    def rests(self, num_rows: int) -> bool:
        """Count a step; return whether drafting rests in it."""
        record = self._record(num_rows)
        if record.rest:
            record.rest -= 1
            return True
        return False

    def pays(self, num_rows: int) -> bool:
        """Whether drafting gained in the last trials, and does in this one so far."""
        record = self._record(num_rows)
        return record.balance > 0.0 and record.trial >= 0.0

    def is_doubtful(self, num_rows: int) -> bool:
        """Whether one step more may make drafting rest: it did not gain in the last trials, or loses in this one."""
        record = self._record(num_rows)
        return record.balance <= 0.0 or record.trial <= -_GLARING / 2

    def save(self, num_rows: int, plain_s: float, *, num_steps: int = 1) -> None:
        """Take the seconds of a plain step, as so many took."""
        self.saved_s += COST_OF_TRYING * num_steps * plain_s
        self._record(num_rows).num_plain += num_steps

    def take_try(self, gained_s: float, spent_s: float) -> None:
        """Take a step that drafted though nothing seemed to pay: as `learn`, but nothing rests for it."""
        lost_s = max(spent_s - gained_s, 0.0)
        if self._num_free:
            self._num_free -= 1
            lost_s = max(lost_s - gained_s, 0.0)
        self.saved_s -= lost_s

    def allow(self, num_steps: int) -> None:
        """Let the next tries lose up to as much as they gain: one of many samples may lose far more."""
        self._num_free = num_steps
        self.saved_s = max(self.saved_s, 0.0)

    def forgive(self, num_rows: int) -> None:
        """Forget what drafting lost: it goes on in another way."""
        key = num_rows.bit_length()
        if key in self._records and self._records[key].balance < 0.0:
            self._records[key] = _Record()

    def learn(self, num_rows: int, gained_s: float, spent_s: float) -> None:
        """Take a step with drafts, which did in ``spent_s`` what plain steps do in ``gained_s``."""
        record = self._record(num_rows)
        if record.rest:  # decided by steps that were told of together with this one
            return
        if record.num_plain > _PAUSE:  # drafting begins anew
            record.steps_since_pause = record.num_pauses = 0
        record.num_plain = 0
        record.trial += max(gained_s / spent_s - 1.0, -_MOST_LOSS)
        record.num_steps += 1
        length = max(_TRIAL, -(-_TRIAL_ROWS // num_rows))
        is_glaring = record.trial <= -_GLARING
        if record.num_steps >= length or is_glaring:
            record.num_trials += 1
            share = min(record.num_steps / length, 1.0)  # a few hiccups end a trial, too: it says less than a whole one
            rate = max(_RATE, 1.0 / record.num_trials) * share
            record.balance += rate * (record.trial / record.num_steps - record.balance)
            record.steps_since_pause += record.num_steps
            if record.trial > 0.0:
                record.num_rests = 0
            record.trial, record.num_steps = 0.0, 0
            doubt = 0.0 if is_glaring else _NOISE / math.sqrt(record.num_trials)
            record.rest = _rest(record, doubt)
            if record.rest:
                record.steps_since_pause = 0

    def _record(self, num_rows: int) -> _Record:
        key = num_rows.bit_length()
        if key not in self._records:
            self._records[key] = _Record(rest=0 if any(self._all_records.values()) else _PAUSE)
        return self._records[key]


def _rest(record: _Record, doubt: float) -> int:
    """Return for how many steps drafting rests after a trial; ``doubt``: what the balance may be off by."""
    if record.balance < -doubt:
        record.num_rests += 1  # the first ones are short: what drafts come to is learnt by drafting
        return round(_TRIAL * min(-record.balance / COST_OF_TRYING, 4.0**record.num_rests))
    record.num_rests = 0
    gain = max(record.balance, 0.0)
    first = _FIRST_PAUSE_AFTER * (1.0 + (gain / _IN_DOUBT) ** 2)
    if record.steps_since_pause < min(first * 2.0**record.num_pauses, _LEAST_PAUSE_AFTER + _PAUSE_AFTER * gain):
        return 0
    record.num_pauses += 1
    return _PAUSE
