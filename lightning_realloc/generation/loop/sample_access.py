"""Access to the samples of a run between two steps, so that they can leave for another rank or arrive from one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_realloc.generation.cache.kv_cache import LayerShape
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.loop.run import GenerationRun
from lightning_realloc.generation.schedule.slot_plan import Prompt


class SampleAccess:
    """Reads, removes and adds samples of a `GenerationRun`, by their index in ``run.samples``."""

    def __init__(self, run: GenerationRun) -> None:
        self._run, self._executor, self._scheduler = run, run.executor, run.scheduler

    @property
    def samples(self) -> list[Sample]:
        """Samples of the call, followed by those that arrived from other ranks."""
        return self._run.samples

    @property
    def running(self) -> list[int]:
        """Samples that the next step advances; each can move with its keys and values."""
        return [i for i in self._scheduler.slots if i is not None and not self._scheduler.is_parked(i)]

    @property
    def held(self) -> list[int]:
        """Samples that cannot move now: they wait for their environment, or their tokens are being read."""
        parked = [i for i in self._scheduler.slots if i is not None and self._scheduler.is_parked(i)]
        asked = () if self._run.conversations is None else self._run.conversations.asked
        return parked + [i for i in asked if i not in parked]

    @property
    def queued(self) -> list[int]:
        """Samples without a slot, in the order in which they will get one."""
        return self._scheduler.waiting

    @property
    def free_slots(self) -> int:
        """Number of further samples that could run; 0 after the run's budget is spent."""
        return 0 if self._run.is_stopped else self._scheduler.num_free

    def read_cache(self, index: int, begin: int, end: int) -> Tensor:
        """Return the keys and values of these positions of a running sample, as (bytes,) uint8."""
        return self._executor.read(self._scheduler.slots.index(index), begin, end)

    def describe_cache(self) -> list[LayerShape]:
        """Return the shapes of the cache's layers."""
        return self._executor.describe()

    def remove(self, index: int) -> None:
        """Stop a running or queued sample here. Its entry in ``samples`` stays."""
        if index in self._scheduler.slots:
            self._scheduler.finish(self._scheduler.slots.index(index))
        else:
            self._scheduler.withdraw({index})

    def add(self, sample: Sample) -> int:
        """Append another rank's sample, and return its index; start it by :meth:`resume` or :meth:`queue`."""
        self.samples.append(sample)
        self._executor.may_need(sample.max_length)
        return len(self.samples) - 1

    def resume(
        self, index: int, spans: Sequence[tuple[int, int, Tensor]] = (), shapes: Sequence[LayerShape] = ()
    ) -> None:
        """Continue a sample that has tokens, from its keys and values or, without any, by reading it again.

        ``spans`` are (begin, end, content) of positions, as :meth:`read_cache` returned them from layers of ``shapes``.
        """
        sample = self.samples[index]
        if self._run.is_stopped:
            sample.finish_reason = "unfinished"
            return
        resident = own_prompt_number(index)
        slot = self._scheduler.seat(index, resident) if spans else None
        if slot is None:
            sample.num_read = 0
            self._scheduler.add(Prompt.of(self.samples, (index,), resident))
            return
        self._executor.write(slot, spans, shapes)
        self._run.decoding.follower.admitted([slot])
        self._scheduler.read(index, sample.num_read, sample.position)

    def queue(self, indices: Sequence[int]) -> None:
        """Add samples of one prompt that have no token yet to the queue."""
        if self._run.is_stopped:
            for index in indices:
                self.samples[index].finish_reason = "unfinished"
        else:
            self._scheduler.add(Prompt.of(self.samples, tuple(indices), own_prompt_number(indices[0])))


def own_prompt_number(index: int) -> int:
    """Return a prompt number for samples that arrived together, which no other sample shares.

    A call's own prompts count from 0; numbers of `foreign_prompt_number` are below all numbers of this kind.
    """
    return -1 - index


def foreign_prompt_number(rank: int, number: int) -> int:
    """Return the number that samples of another rank's prompt share on this rank."""
    return -((rank + 1) << 32) - number
