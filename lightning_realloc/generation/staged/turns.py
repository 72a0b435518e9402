"""Turns of a call's groups on the last stage: each collects its step and submits the next one, as one run would."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.environment import Conversations
from lightning_realloc.generation.loop.run import GenerationRun


class GroupTurns:
    """Runs of groups whose samples share one environment. Between two steps, each run may have a step in flight.

    Args:
        lockstep: As for `GenerationEngine`.
        on_collected: Called after each step of a run.
    """

    def __init__(
        self,
        runs: Sequence[GenerationRun],
        conversations: Conversations | None,
        lockstep: Callable[[bool], bool] | None,
        on_collected: Callable[[], None],
    ) -> None:
        self.runs, self.conversations = runs, conversations
        self._lockstep, self._on_collected = lockstep, on_collected
        self.ended: list[Sample] = []
        """Samples that finished here, in this order."""
        for run in runs:
            run.ended = self.ended
        self._others_work = lockstep is not None
        """Whether ranks in lockstep go on."""
        self._num_idle = 0
        """Turns since a run had anything to submit."""

    @property
    def has_work(self) -> bool:
        """Whether any sample is unfinished."""
        return any(run.has_work for run in self.runs)

    @property
    def goes_on(self) -> bool:
        """Whether there are further steps, also those that only other ranks need."""
        return self.has_work or self._others_work or any(run.is_in_flight for run in self.runs)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Sums of the runs' counts."""
        rows, read, generated = (sum(counts) for counts in zip(*(run.counts for run in self.runs), strict=True))
        return rows, read, generated

    def step(self) -> None:
        """Collect and submit a step of each run in turn.

        A run waits for its environment only if no run had anything to submit since its last turn.
        """
        for run in self.runs:
            run.collect_step()
            self._on_collected()
            if self._others_work and self._lockstep is not None:
                self._others_work = self._lockstep(self.has_work)
            if run.has_work or self._others_work:
                run.submit_step(may_wait=self._num_idle >= len(self.runs))
            elif run.conversations is not None:
                run.conversations.mark_idle(True)
            self._num_idle = 0 if run.is_in_flight else self._num_idle + 1
