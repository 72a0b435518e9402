"""The steps that a rank makes in one call, and what is learnt from them: later, many at once.

Right behind a forward the same takes twice as long, since caches are full of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from lightning_realloc.generation.loop.run import GenerationRun
from lightning_realloc.generation.rebalance.migration_costs import LengthBook, Pace
from lightning_realloc.generation.schedule.length_predictor import LengthPredictor


class StepRecorder:
    """Makes a run's steps, and keeps what they took until it is learnt.

    Args:
        run: The rank's samples.
        pace: Learns how long steps take.
        book: Learns how long the responses are that ended.
        expected: The same, of this call.
        clock: Tells seconds.
    """

    def __init__(
        self,
        run: GenerationRun,
        pace: Pace,
        book: LengthBook,
        expected: LengthPredictor,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._pace = pace
        self._book = book
        self._expected = expected
        self._clock = clock
        self._steps = [(run.counts, 0.0)]
        """Counts after each step and its seconds, from the last one on that was learnt from."""
        self._num_ended = 0

    def step(self) -> bool:
        """Make one; return whether it brought any sample further."""
        run, (before, _) = self._run, self._steps[-1]
        begin = self._clock()
        run.step()
        after = run.counts
        self._steps.append((after, self._clock() - begin))
        return after != before

    def learn(self) -> int:
        """Learn what steps since the last time took, and how long the responses are that ended in them; return how many
        steps they were."""
        ended = self._run.ended
        for sample in ended[self._num_ended :]:
            self._expected.finish(sample.prompt_number, len(sample.token_ids), is_cut=sample.is_full)
            self._book.keep(sample)
        self._num_ended = len(ended)
        for (before, _), (after, seconds) in pairwise(self._steps):
            rows, read, generated = (now - then for now, then in zip(after, before, strict=True))
            self._pace.take_step(rows=rows, read=read, generated=generated, seconds=seconds)
        num_steps = len(self._steps) - 1
        del self._steps[:-1]
        return num_steps
