"""Access to the samples of a rank between two steps, so that they can leave for another rank or arrive from one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_realloc.generation.cache.kv_cache import LayerShape
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.run import GenerationRun
from lightning_realloc.generation.schedule.slot_plan import Prompt


class SampleAccess:
    """Reads, removes and adds samples of one or several `GenerationRun` s, by their index in `samples`.

    Args:
        samples: Samples of the call.
        places: Index of each sample of each run, in the order of the run; grows with those that arrive. None: there is
            one run, with all samples in order.
    """

    def __init__(
        self, runs: Sequence[GenerationRun], samples: Sequence[Sample], places: Sequence[list[int]] | None = None
    ) -> None:
        self._runs = runs
        self.samples = list(samples)
        """Samples of the call, followed by those that arrived from other ranks."""
        self._places = [list(range(len(samples)))] if places is None else places
        self._own = {place: (run, own) for run, of_run in enumerate(self._places) for own, place in enumerate(of_run)}
        """Index -> run, and index in that run."""
        self._added: set[int] = set()
        """Samples of other ranks that are not started yet."""

    @property
    def running(self) -> list[int]:
        """Samples that the next step advances; each can move with its keys and values."""
        return self._of_runs(_running)

    @property
    def held(self) -> list[int]:
        """Samples that cannot move now: they wait for their environment, or their tokens are being read."""
        return self._of_runs(_held)

    @property
    def queued(self) -> list[int]:
        """Samples without a slot, in the order in which they will get one."""
        return self._of_runs(lambda run: run.scheduler.waiting)

    @property
    def free_slots(self) -> int:
        """Number of further samples that could run; 0 after the budget is spent."""
        return sum(0 if run.is_stopped else run.scheduler.num_free for run in self._runs)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token's keys and values; infinity if they cannot leave, and a moved sample is read again."""
        shapes = self.describe_cache()
        return math.inf if shapes is None else sum(shape.num_bytes for shape in shapes)

    def settle(self) -> None:
        """Collect the steps in flight, after which slots may change."""
        for run in self._runs:
            if run.is_in_flight:
                run.collect_step()

    def read_cache(self, index: int, begin: int, end: int) -> Tensor:
        """Return the keys and values of these positions of a running sample, as (bytes,) uint8."""
        run, own = self._run_of(index)
        return run.executor.read(run.scheduler.slots.index(own), begin, end)

    def describe_cache(self) -> list[LayerShape] | None:
        """Return the shapes of the cache's layers; None if keys and values cannot leave."""
        return self._runs[0].executor.describe()

    def remove(self, index: int) -> None:
        """Stop a running or queued sample here. Its entry in ``samples`` stays."""
        run, own = self._run_of(index)
        if own in run.scheduler.slots:
            run.scheduler.finish(run.scheduler.slots.index(own))
        else:
            run.scheduler.withdraw({own})

    def add(self, sample: Sample) -> int:
        """Append another rank's sample to the run with the fewest, and return its index.

        Start it by :meth:`resume` or :meth:`queue`.
        """
        number = min(range(len(self._runs)), key=self._num_live)
        run, index = self._runs[number], len(self.samples)
        self.samples.append(sample)
        run.samples.append(sample)
        run.executor.may_need(sample.max_length)
        self._places[number].append(index)
        self._own[index] = number, len(run.samples) - 1
        self._added.add(index)
        return index

    def resume(
        self, index: int, spans: Sequence[tuple[int, int, Tensor]] = (), shapes: Sequence[LayerShape] = ()
    ) -> None:
        """Continue a sample that has tokens, from its keys and values or, without any, by reading it again.

        ``spans`` are (begin, end, content) of positions, as :meth:`read_cache` returned them from layers of ``shapes``.
        """
        sample = self.samples[index]
        self._added.discard(index)
        run, own = self._run_of(index)
        if run.is_stopped:
            sample.finish_reason = "unfinished"
            return
        resident = own_prompt_number(own)
        slot = run.scheduler.seat(own, resident) if spans else None
        if slot is None:
            sample.num_read = 0
            run.scheduler.add(Prompt.of(run.samples, (own,), resident))
            return
        run.executor.write(slot, spans, shapes)
        run.decoding.follower.admitted([slot])
        unread = sample.num_read, sample.position
        run.scheduler.read(own, *unread, is_whole=bool(sample.extras_between(*unread)))

    def queue(self, indices: Sequence[int]) -> None:
        """Add samples of one prompt that have no token yet to the queue."""
        self._added.difference_update(indices)
        parts: defaultdict[int, list[int]] = defaultdict(list)
        for index in indices:
            number, own = self._own[index]
            parts[number].append(own)
        for number, part in parts.items():
            run = self._runs[number]
            if run.is_stopped:
                for own in part:
                    run.samples[own].finish_reason = "unfinished"
            else:
                run.scheduler.add(Prompt.of(run.samples, tuple(part), own_prompt_number(part[0])))

    def _of_runs(self, indices: Callable[[GenerationRun], Sequence[int]]) -> list[int]:
        """Return the samples at these indices of each run."""
        runs = zip(self._runs, self._places, strict=True)
        return [places[own] for run, places in runs for own in indices(run)]

    def _run_of(self, index: int) -> tuple[GenerationRun, int]:
        """Return a sample's run, and its index there."""
        number, own = self._own[index]
        return self._runs[number], own

    def _num_live(self, number: int) -> int:
        """Return the number of unfinished samples of a run."""
        run = self._runs[number]
        num_added = sum(self._own[index][0] == number for index in self._added)
        return len(_running(run)) + len(_held(run)) + len(run.scheduler.waiting) + num_added


def _running(run: GenerationRun) -> list[int]:
    return [i for i in run.scheduler.slots if i is not None and not run.scheduler.is_parked(i)]


def _held(run: GenerationRun) -> list[int]:
    parked = [i for i in run.scheduler.slots if i is not None and run.scheduler.is_parked(i)]
    asked = () if run.conversations is None else run.conversations.asked
    return parked + [i for i in asked if i not in parked]


def own_prompt_number(index: int) -> int:
    """Return a prompt number for samples that arrived together, which no other sample shares.

    A call's own prompts count from 0; numbers of `foreign_prompt_number` are below all numbers of this kind.
    """
    return -1 - index


def foreign_prompt_number(rank: int, number: int) -> int:
    """Return the number that samples of another rank's prompt share on this rank."""
    return -((rank + 1) << 32) - number
