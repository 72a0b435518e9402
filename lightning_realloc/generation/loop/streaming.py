"""Stream finished responses out of a running generation, in chunks of about the same number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_realloc.batch.samples import Samples
from lightning_realloc.generation.core.sample import Completion, Sample


class PartialResults:
    """Where a generating call hands on what is finished, all portions but the last, which is the call's own result.

    Args:
        num_parts: How many portions there are with the last one; with one, nothing is handed on.
        take: Gets each of them, in the order in which they fill; none is empty.
    """

    def __init__(self, num_parts: int, take: Callable[[Samples], None]) -> None:
        self._num_parts, self._take = num_parts, take
        self._num_given = 0
        self._samples_of: Callable[[Sequence[Completion]], Samples] | None = None
        self.finished: list[Completion] = []
        """All so far, whether handed on or not."""

    def rows(self, completions: Sequence[Completion]) -> Samples:
        """Return some of what is finished as the call returns it."""
        assert self._samples_of is not None, "nothing is finished before anything was asked for"
        return self._samples_of(completions)

    def collect(
        self, count: int, samples_of: Callable[[Sequence[Completion]], Samples]
    ) -> Callable[[Completion], None]:
        """Return what is to be called with every completion, as soon as it is there.

        A portion goes whenever another ``1 / num_parts`` of ``count`` samples are finished.
        """
        self._samples_of = samples_of
        waiting: list[Completion] = []
        num_finished = 0

        def add(completion: Completion) -> None:
            nonlocal num_finished
            waiting.append(completion)
            self.finished.append(completion)
            num_finished += 1
            due = min(num_finished * self._num_parts // count, self._num_parts - 1)
            if due > self._num_given:
                self._num_given = due
                self._take(samples_of(waiting))
                waiting.clear()

        return add


class CompletionNotifier:
    """Tells a listener of each of a call's samples once, when it is finished.

    Args:
        samples: Those of the call.
        listener: None: nobody listens.
        completion_of: A finished sample as the call returns it.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        listener: Callable[[Completion], None] | None,
        completion_of: Callable[[Sample], Completion],
    ) -> None:
        self._due = {sample.sample_id for sample in samples}
        self._listener, self._completion_of = listener, completion_of
        self._num_heard = 0

    def follow(self, ended: Sequence[Sample]) -> None:
        """Tell of those that are new in a list that grows; other ranks' are left out."""
        if self._listener is not None:
            self.tell(ended[self._num_heard :])
            self._num_heard = len(ended)

    def tell(self, samples: Iterable[Sample]) -> None:
        """Tell of those that nobody was told of."""
        for sample in samples:
            if self._listener is not None and sample.sample_id in self._due:
                self._due.remove(sample.sample_id)
                self._listener(self._completion_of(sample))
