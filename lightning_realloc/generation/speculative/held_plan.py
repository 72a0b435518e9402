"""Which plan is in use, for which samples, and for how many steps still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.speculative.draft_planner import MOST_PLAN_STEPS, PLAN_STEPS, TRY_STEPS, DraftPlan
from lightning_realloc.generation.speculative.draft_step import DraftStep

_LEAST_LEFT = 0.5
"""Share of a plan's samples that have to be left for it to go on. With 0.7, a generation took a plan more, of about
five, that was mostly the one before it again."""
_IDLE_S = 0.05
"""For which a plan that drafts nothing goes on in the generations after its own, if steps take as long as it says.
Making one takes a few ten-thousandths of a second: three in a generation of 26 steps took 2.5 % of its seconds."""


@dataclass(slots=True)
class _Kept:
    """The last plan for about so many samples."""

    plan: DraftPlan
    num_steps: int
    """That it was made for."""
    num_left: int
    """Of them."""


class HeldPlan:
    """The plan in use. It goes on without samples that are over, as long as most of them are left.

    A plan holds for so many steps of about so many samples, whichever these are: where a generation follows another one
    of the same size, few plans are made in it.
    """

    def __init__(self) -> None:
        """Hold none."""
        self._plan: DraftPlan | None = None
        self._samples: Sequence[Sample] = ()
        """Those that it is for."""
        self._num_samples = 0
        """How many they were when it began."""
        self._kept: dict[int, _Kept] = {}
        """By the power of two of the number of samples."""
        self._try_until = 0
        """Number of the first step that tries no more what the plan does not do."""

    def release(self, *, and_forget_idle: bool) -> None:
        """Hold none any more, and those that drafted nothing not for long; ``and_forget_idle``: nor know of them."""
        self._plan = None
        if and_forget_idle:
            self._kept = {size: kept for size, kept in self._kept.items() if kept.plan.depth}
        for kept in self._kept.values():
            if not kept.plan.depth:
                kept.num_left = min(kept.num_left, int(_IDLE_S / kept.plan.plain_s))

    def forget(self) -> None:
        """Hold none any more, nor know of any before: they were for samples of another kind."""
        self._plan = None
        self._kept.clear()

    def expire(self, step: DraftStep) -> None:
        """Take that drafting rests in a step: once it goes on, another plan is made from what plain steps told."""
        kept = self._kept.get(len(step.running).bit_length())
        if kept is not None:
            kept.num_left = 0
        self._plan = None

    def of(self, step: DraftStep) -> DraftPlan | None:
        """Return the plan for the samples of a step; None where it is time for another one."""
        if self._plan is None:
            return None
        kept = self._kept[self._num_samples.bit_length()]
        kept.num_left -= 1
        if kept.num_left < 0:
            return None
        running = step.running
        if not self._plan.depth and not self.tries(step):  # nothing in it is about single samples
            share = len(running) / self._num_samples
            return self._plan if _LEAST_LEFT <= share <= 1.0 / _LEAST_LEFT else None
        if len(running) != len(self._samples):
            rows = {id(sample): row for row, sample in enumerate(self._samples)}
            left = [rows[id(sample)] for sample in running if id(sample) in rows]
            if len(left) < len(running) or len(left) < _LEAST_LEFT * self._num_samples:
                return None
            self._plan, self._samples = self._plan.of(left), running
        return self._plan

    def earlier(self, step: DraftStep) -> DraftPlan | None:
        """Return the plan for about as many samples as run in a step, if it holds for some steps still."""
        kept = self._kept.get(len(step.running).bit_length())
        return kept.plan if kept is not None and kept.num_left > 0 else None

    def resume(self, plan: DraftPlan, step: DraftStep) -> None:
        """Use the plan that is kept for about so many samples, made for these, from this step on."""
        self._plan, self._samples, self._num_samples = plan, step.running, len(step.running)
        self._try_until = 0
        self._kept[self._num_samples.bit_length()].num_left -= 1

    def hold(self, plan: DraftPlan, step: DraftStep, *, may_try: bool) -> None:
        """Use a plan from this step on: the longer, the more often the ones before it drafted as deep.

        ``may_try``: whether a few steps draft all the same where it drafts nothing.
        """
        size = len(step.running).bit_length()
        last = self._kept.get(size)
        num_steps = PLAN_STEPS if last is None or plan.depth != last.plan.depth else 2 * last.num_steps
        num_steps = TRY_STEPS if plan.is_try else min(num_steps, MOST_PLAN_STEPS)
        self._kept[size] = _Kept(plan, num_steps, num_steps)
        self.resume(plan, step)
        # The first step of a try pays for what comes with the change.
        self._try_until = step.number + (TRY_STEPS if not plan.depth and may_try else 0)

    def tries(self, step: DraftStep) -> bool:
        """Whether this step drafts though the plan drafts nothing."""
        return step.number < self._try_until
