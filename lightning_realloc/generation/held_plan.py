"""Which plan is in use, for which samples, and for how many steps still."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_realloc.generation.draft_planner import MOST_PLAN_STEPS, PLAN_STEPS, TRY_STEPS, DraftPlan
from lightning_realloc.generation.draft_step import DraftStep
from lightning_realloc.generation.samples import Sample

_MOST_LEFT = 0.6
"""Share of a plan's samples that have to be left for it to go on. With 0.7, a generation took a plan more, of about
five, that was mostly the one before it again."""


class HeldPlan:
    """The plan in use. It goes on without samples that are over, as long as most of them are left."""

    def __init__(self) -> None:
        """Hold none."""
        self._plan: DraftPlan | None = None
        self._samples: Sequence[Sample] = ()
        """Those that it is for."""
        self._num_samples = 0
        """How many they were when it was made."""
        self._until = 0
        """Number of the first step that needs another plan."""
        self._try_until = 0
        """Number of the first step that tries no more what the plan does not do."""
        self._last: dict[int, tuple[int, int]] = {}
        """Depth of the last plan and the steps that it was made for, by the power of two of the number of samples."""

    def let_go(self, *, and_forget: bool) -> None:
        """Hold none any more; ``and_forget``: the next one holds no longer for being like those before it."""
        self._plan = None
        if and_forget:
            self._last.clear()

    def of(self, step: DraftStep) -> DraftPlan | None:
        """Return the plan for the samples of a step; None where it is time for another one."""
        if self._plan is None or step.number >= self._until:
            return None
        running = step.running
        if len(running) != len(self._samples):
            rows = {id(sample): row for row, sample in enumerate(self._samples)}
            left = [rows[id(sample)] for sample in running if id(sample) in rows]
            if len(left) < len(running) or len(left) <= _MOST_LEFT * self._num_samples:
                return None
            self._plan, self._samples = self._plan.of(left), running
        return self._plan

    def hold(self, plan: DraftPlan, step: DraftStep, *, may_try: bool) -> None:
        """Use a plan from this step on: the longer, the more often the ones before it drafted as deep.

        ``may_try``: whether a few steps draft all the same where it drafts nothing.
        """
        size = len(step.running).bit_length()
        depth_before, steps_before = self._last.get(size, (None, 0))
        num_steps = TRY_STEPS if plan.is_try else PLAN_STEPS if plan.depth != depth_before else 2 * steps_before
        num_steps = min(num_steps, MOST_PLAN_STEPS)
        self._last[size] = plan.depth, num_steps
        self._plan, self._samples, self._num_samples = plan, step.running, len(step.running)
        self._until = step.number + num_steps
        # The first step of a try pays for what comes with the change.
        self._try_until = step.number + (TRY_STEPS if not plan.depth and may_try else 0)

    def tries(self, step: DraftStep) -> bool:
        """Whether this step drafts though the plan drafts nothing."""
        return step.number < self._try_until
