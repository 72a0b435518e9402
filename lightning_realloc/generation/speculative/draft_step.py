"""What one step of speculative decoding drafted, and what that came to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.speculative.draft_planner import DraftPlan
from lightning_realloc.generation.speculative.foresight import DraftOutcome
from lightning_realloc.generation.speculative.verify import Draft


@dataclass(slots=True)
class DraftStep:
    """What one step drafted and came to: learnt from later, many steps at once.

    Right behind a forward the same takes twice as long, since the caches are full of weights.
    """

    number: int
    running: Sequence[Sample]
    being_read: Collection[int] = ()
    """Slots whose prompts it reads."""
    depth: int = 0
    """Most tokens of one draft that are verified; 0: drafting rests."""
    plan: DraftPlan | None = None
    """By which it drafts."""
    drafts: Sequence[Draft] = ()
    """Of which the first ``depth`` tokens are verified."""
    limits: Sequence[int] = ()
    """Most tokens that each of them might have had."""
    looks: bool = False
    """Whether it drafts deeper than seems best, to see what that comes to."""
    begins: Sequence[int] = ()
    """How many tokens each sample had, where its draft is longer than what is verified of it."""
    is_try: bool = False
    """Whether nothing seems to pay: it is drafted to see whether that is true."""
    num_missed: int = 0
    """Tokens that the drafter's model read first, since it had missed them."""
    drafting_s: float = 0.0
    """Where drafting rests, those of looking up what is not verified."""
    first_s: float = 0.0
    """Of drafting, what a model's first tokens took."""
    preparing_s: float = 0.0
    """Of drafting, what is done once for many steps: it belongs to what drafting takes, and not to a token's price."""
    emitted: Sequence[Sequence[int]] = ()
    """What each sample got."""
    drafted_before: bool = False
    """Whether the step before it verified drafts, too: else a drafter first takes in what came since."""
    stands_for: int = 1
    """Plain steps whose seconds its own tell."""
    is_told: bool = False
    """Whether it is learnt from what it took, where no ranks have to agree on that."""
    is_settled: bool = False
    """Whether it is one of many plain steps in a row."""
    lengths: Sequence[int] = ()
    """Tokens of each draft that were verified."""
    seconds: float = 0.0
    """Drafting aside."""

    def gained_s(self) -> float:
        """Return the seconds of plain steps that its tokens saved."""
        assert self.plan is not None, "a step drafts by a plan"
        drafted_s = sum(worth * (len(own) - 1) for worth, own in zip(self.plan.worths, self.emitted, strict=True))
        return self.plan.plain_s + drafted_s

    def outcome(self, row: int, last: DraftStep | None) -> DraftOutcome:
        """Return what a draft came to: a token that was cut off was right, too, where the target drew the same.

        As far as it is known by now: what was cut off stands or falls in later steps. ``last``: the last step before
        this one that drafted.
        """
        sample, limit = self.running[row], self.limits[row]
        resumed = last.is_resumed(row, sample) if last and last.number + 1 == self.number else None
        tokens = sample.chosen(self.begins[row], limit + 1) if self.begins else self.emitted[row]
        return DraftOutcome(self.drafts[row], tokens, limit, resumed)

    def is_resumed(self, row: int, sample: Sample) -> bool | None:
        """Return whether a sample's next draft goes on where this one stood to the last token that it might have had.

        None where that is not known, since nothing was drafted for this sample.
        """
        if row >= len(self.running) or self.running[row] is not sample:
            return None
        return len(self.emitted[row]) > self.depth
