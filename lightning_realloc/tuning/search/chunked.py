"""What do the tasks of an iteration come to where inference begins with the first samples of a generation?

A generating call is cut into the steps that make its portions, and a call that takes samples of it, on ranks of its
own, into one step for each of them; who waits for whom is then a matter of steps. ``simulator`` cuts them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.tuning.timeline.fusion import fused_first, fused_groups, fused_sources, portion_shares
from lightning_realloc.tuning.timeline.steady_state import Waits

_MAX_CACHED = 20_000


class Steps(NamedTuple):
    """What is walked through in place of tasks."""

    tasks: tuple[int, ...]
    """Of every step, the task that it is a part of."""
    shares: tuple[float, ...]
    """Of every step, its part of that task's seconds."""
    masks: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    carried: tuple[tuple[int, ...], ...]
    waits: Waits

    def spread(self, durations: Sequence[float]) -> list[float]:
        """Return the seconds of every step from those of every task."""
        return [durations[task] * share for task, share in zip(self.tasks, self.shares, strict=True)]


class ChunkedTasks:
    """Cuts the tasks of one dataflow; task 2i moves weights to call i, task 2i + 1 is call i."""

    def __init__(
        self, dataflow: Dataflow, calls: Sequence[ModelFunctionCall], needs: Sequence[Sequence[int]],
        carried: Sequence[Sequence[int]], num_parts: int,
    ) -> None:  # fmt: skip
        """Remember who needs whom; ``needs`` and ``carried`` are those of `Waits.of`."""
        self.num_parts = num_parts
        self._calls = dataflow.iteration_calls
        self._needs, self._carried = needs, carried
        self._number = {call.name: i for i, call in enumerate(calls)}
        apart = {call.name: (i,) for i, call in enumerate(calls)}
        self._names = fused_sources([call for call in self._calls if call.role is None or call.name in apart], apart)
        self.sources = {self._number[name]: self._number[source] for name, source in self._names.items()}
        """Call that can take samples of a generation that goes on, where their ranks differ -> the generating call."""
        self._steps: dict[tuple[tuple[int, ...], frozenset[str]], Steps] = {}

    def steps(self, masks: Sequence[int], offload: frozenset[str]) -> Steps:
        """Return the steps of tasks on these ranks (as bits; 0: not chosen yet, or none)."""
        key = (tuple(masks), offload)
        if key not in self._steps:
            if len(self._steps) > _MAX_CACHED:
                self._steps.clear()
            self._steps[key] = self._cut(masks, offload)
        return self._steps[key]

    def decided_last(self, order: Sequence[int], home: Sequence[int]) -> list[int]:
        """Return calls in an order in which bounds hold: what a call's portions share ranks with is decided before it.

        Calls that may take samples early come after the others, as ranks walk through them, and after their generation;
        then calls that use a home of one of these.
        """
        first = [i for i in order if home[i] not in self.sources and i not in self.sources]
        return [*first, *sorted(self.sources), *(i for i in order if i not in first and i not in self.sources)]

    def _cut(self, masks: Sequence[int], offload: frozenset[str]) -> Steps:
        sources = {
            name: source for name, source in self._names.items()
            if not masks[2 * self._number[name] + 1] & masks[2 * self._number[source] + 1]
        }  # fmt: skip
        cut = _Cut(masks, self._needs, self._carried)
        for group in fused_groups(fused_first(self._calls, sources), sources, alone=offload):
            numbers = [self._number[call.name] for call in group if call.role is not None]
            if group[0].name in sources:
                cut.together(numbers, self._number[sources[group[0].name]], self.num_parts)
            else:
                is_source = group[0].name in sources.values()
                cut.alone(numbers, portion_shares(self.num_parts if is_source else 1))
        return cut.steps()


class _Cut:
    """Steps, while they are put together."""

    def __init__(self, masks: Sequence[int], needs: Sequence[Sequence[int]], carried: Sequence[Sequence[int]]) -> None:
        self._masks, self._task_needs, self._task_carried = masks, needs, carried
        self._tasks: list[int] = []
        self._shares: list[float] = []
        self._needs: list[tuple[int, ...]] = []
        self._of: dict[int, list[int]] = {}
        """Task -> its steps."""

    def alone(self, calls: Sequence[int], shares: Sequence[float]) -> None:
        """Add calls that run when all that they need is there."""
        for i in calls:
            self._move(i)
            for share in shares:
                self._add(2 * i + 1, share, [self._of[task][-1] for task in self._task_needs[2 * i + 1]])

    def together(self, calls: Sequence[int], source: int, num_parts: int) -> None:
        """Add calls that go through each portion of a source in turn."""
        for i in calls:
            self._move(i)
        for made in self._of[2 * source + 1]:
            for i in calls:
                self._add(2 * i + 1, 1 / num_parts, [made, self._of[2 * i][-1]])

    def _move(self, i: int) -> None:
        self._add(2 * i, 1.0, [])

    def _add(self, task: int, share: float, needs: Sequence[int]) -> None:
        own = self._of.setdefault(task, [])
        self._needs.append(tuple(sorted({*needs, *own[-1:]})))
        own.append(len(self._tasks))
        self._tasks.append(task)
        self._shares.append(share)

    def steps(self) -> Steps:
        """Return what was put together."""
        masks = tuple(self._masks[task] for task in self._tasks)
        carried = tuple(
            tuple(self._of[before][-1] for before in self._task_carried[task]) if step == self._of[task][0] else ()
            for step, task in enumerate(self._tasks)
        )
        needs = tuple(self._needs)
        return Steps(tuple(self._tasks), tuple(self._shares), masks, needs, carried, Waits.of(masks, needs, carried))
