"""Steps of an iteration in the order in which ranks run them, with the steps that each one waits for.

The simulator and the plan search use the same schedule: the simulator runs it for several iterations, the search takes
the largest mean of a cycle in it. Seconds are no part of a schedule; its users supply them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.tuning.timeline.contention import Task
from lightning_realloc.tuning.timeline.fusion import chunk_shares, fused_first, fused_groups, generation_readers

Overlap = Literal["iterations", "calls", "none"]
"""Work that may run at the same time on disjoint ranks: calls of two iterations, calls of one iteration, nothing."""


@dataclass(frozen=True, slots=True)
class IterationSchedule:
    """Steps of one iteration, in the order in which ranks run them.

    Task 2i moves weights to call i, and task 2i + 1 is call i. A step is a task, or one chunk of a call.
    """

    tasks: tuple[int, ...]
    """The task that each step belongs to."""
    shares: tuple[float, ...]
    """The fraction of its task's seconds that each step takes."""
    needs: tuple[tuple[int, ...], ...]
    """For each step, the earlier steps of the same iteration whose results it needs."""
    carried: tuple[tuple[int, ...], ...]
    """For each step, the steps of the previous iteration whose results it needs."""
    is_plain: bool
    """Whether step i is the whole of task i."""

    def step_masks(self, task_masks: Sequence[int]) -> Sequence[int]:
        """Return the ranks of every step, given those of every task; both as bits."""
        return task_masks if self.is_plain else [task_masks[task] for task in self.tasks]

    def step_seconds(self, task_seconds: Sequence[float]) -> Sequence[float]:
        """Return the seconds of every step, given those of every task."""
        if self.is_plain:
            return task_seconds
        return [task_seconds[task] * share for task, share in zip(self.tasks, self.shares, strict=True)]


class ScheduleBuilder:
    """Builds the schedules of one dataflow, for any ranks of its calls.

    Args:
        calls: The calls with a model, in the dataflow's order. Calls that only serve evaluation get no step.
        num_chunks: Chunks in which a generation's samples go to inference calls on other ranks; 1: all at the end.
    """

    def __init__(self, dataflow: Dataflow, calls: Sequence[ModelFunctionCall], num_chunks: int = 1) -> None:
        self.num_chunks = num_chunks
        self._calls = dataflow.iteration_calls
        self._number = {call.name: i for i, call in enumerate(calls)}
        self.needs, self._carried = _dependencies(dataflow, calls)
        """``needs``: for each task, the tasks of the same iteration whose results it needs."""
        self._readers = generation_readers(self._calls) if num_chunks > 1 else {}
        self.early = {self._number[name]: self._number[source] for name, source in self._readers.items()}
        """Call that can start before its generation ends, on other ranks -> the generating call."""
        self._schedules: dict[tuple[frozenset[str], frozenset[str]], IterationSchedule] = {}

    def schedule(self, task_masks: Sequence[int], alone: Collection[str] = ()) -> IterationSchedule:
        """Return the schedule for calls on some ranks.

        Args:
            task_masks: The ranks of every task as bits; 0 for a call without ranks yet.
            alone: Roles whose models cannot be on the device next to others.
        """
        sources = {
            name: source
            for name, source in self._readers.items()
            if not task_masks[self._task(name)] & task_masks[self._task(source)]
        }
        key = (frozenset(sources), frozenset(alone if sources else ()))
        if key not in self._schedules:
            self._schedules[key] = self._build(sources, alone)
        return self._schedules[key]

    def _build(self, sources: dict[str, str], alone: Collection[str]) -> IterationSchedule:
        steps = _Steps(self.needs, self._carried)
        for group in fused_groups(fused_first(self._calls, sources), sources, alone=alone):
            tasks = [self._task(call.name) for call in group if call.role is not None]
            source = sources.get(group[0].name)
            if source is not None:
                steps.add_fused(tasks, self._task(source))
            else:
                is_source = group[0].name in sources.values()
                steps.add_calls(tasks, chunk_shares(self.num_chunks if is_source else 1))
        return steps.schedule()

    def _task(self, name: str) -> int:
        return 2 * self._number[name] + 1


class _Steps:
    """Steps added so far."""

    def __init__(self, needs: Sequence[Sequence[int]], carried: Sequence[Sequence[int]]) -> None:
        self._task_needs, self._task_carried = needs, carried
        self._tasks: list[int] = []
        self._shares: list[float] = []
        self._needs: list[tuple[int, ...]] = []
        self._steps_of: dict[int, list[int]] = {}
        """Task -> its steps."""

    def add_calls(self, calls: Sequence[int], shares: Sequence[float]) -> None:
        """Add calls that start when all their inputs exist."""
        for call in calls:
            self._add(call - 1, 1.0, ())
            for share in shares:
                self._add(call, share, [self._steps_of[task][-1] for task in self._task_needs[call]])

    def add_fused(self, calls: Sequence[int], source: int) -> None:
        """Add calls that process each chunk of a generating call as soon as it exists, one call after the other."""
        for call in calls:
            self._add(call - 1, 1.0, ())
        chunks = self._steps_of[source]
        for chunk in chunks:
            for call in calls:
                self._add(call, 1 / len(chunks), (chunk, self._steps_of[call - 1][-1]))

    def _add(self, task: int, share: float, needs: Sequence[int]) -> None:
        own = self._steps_of.setdefault(task, [])
        self._needs.append(tuple(sorted({*needs, *own[-1:]})))
        own.append(len(self._tasks))
        self._tasks.append(task)
        self._shares.append(share)

    def schedule(self) -> IterationSchedule:
        carried: list[tuple[int, ...]] = [()] * len(self._tasks)
        for task, steps in self._steps_of.items():
            carried[steps[0]] = tuple(self._steps_of[before][-1] for before in self._task_carried[task])
        return IterationSchedule(
            tuple(self._tasks),
            tuple(self._shares),
            tuple(self._needs),
            tuple(carried),
            is_plain=self._tasks == list(range(len(self._task_needs))),
        )


def _dependencies(
    dataflow: Dataflow, calls: Sequence[ModelFunctionCall]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the tasks that every task needs, of the same iteration and of the previous one.

    Computations on the host take no time here: a call that needs their products needs their inputs. The calls of a
    trained role need its training in the previous iteration, where their weights come from.
    """
    number = {call.name: 2 * i + 1 for i, call in enumerate(calls)}
    makers: dict[str, set[int]] = {}
    needs: list[tuple[int, ...]] = [()] * (2 * len(calls))
    for call in dataflow.calls:
        wanted = set().union(*(makers.get(name, set()) for name in call.needs))
        if call.name in number:
            task = number[call.name]
            needs[task] = (*sorted(wanted), task - 1)
            wanted = {task}
        makers |= {name: wanted for name in call.produces}
    carried: list[tuple[int, ...]] = [()] * (2 * len(calls))
    for training in (call for call in calls if call.kind == "train"):
        for i, call in enumerate(calls):
            if call.role == training.role:
                carried[2 * i + 1] = (number[training.name],)
    return tuple(needs), tuple(carried)


def unroll(
    schedule: IterationSchedule,
    iteration_masks: Iterable[Sequence[int]],
    task_seconds: Sequence[float],
    overlap: Overlap,
) -> list[Task]:
    """Return the steps of consecutive iterations, in order, as tasks for `run_tasks`.

    A step waits for the latest earlier step of each of its ranks, and for its inputs; less overlap adds more waits.

    Args:
        iteration_masks: For each iteration, the ranks of every task as bits; 0 for a move that is not needed.
        task_seconds: Seconds of every task; those of a task without ranks do not count.
    """
    tasks: list[Task] = []
    latest: dict[int, int] = {}  # rank -> its latest step
    seconds = schedule.step_seconds(task_seconds)
    for iteration, task_masks in enumerate(iteration_masks):
        begin, previous = len(tasks), max(0, len(tasks) - len(schedule.tasks))
        for step, mask in enumerate(schedule.step_masks(task_masks)):
            number, ranks = begin + step, tuple(_ranks(mask))
            if overlap == "none":
                after = set(range(max(0, number - 1), number))
            else:
                after = {begin + need for need in schedule.needs[step]}
                after.update(latest[rank] for rank in ranks if rank in latest)
                if overlap == "calls":
                    after.update(range(previous, begin))
                elif iteration:
                    after.update(previous + need for need in schedule.carried[step])
            tasks.append(Task(ranks, seconds[step] if mask else 0.0, tuple(after)))
            latest.update(dict.fromkeys(ranks, number))
    return tasks


def _ranks(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
