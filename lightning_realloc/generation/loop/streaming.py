"""Stream finished responses out of a running generation, in chunks of about the same number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from lightning_realloc.batch.samples import Samples
from lightning_realloc.generation.core.sample import Completion, Sample
from lightning_realloc.runtime.messages.progress import ActivityProgress


class PartialResults:
    """Sends the responses of a generating call in chunks while it runs, all but the last one.

    Args:
        num_chunks: Number of chunks, including the last one, which is part of the call's result. 1: nothing is sent.
        send: Receives each chunk once it is full; none is empty.
    """

    def __init__(self, num_chunks: int, send: Callable[[Samples], None]) -> None:
        self._num_chunks, self._send = num_chunks, send
        self._num_sent = 0
        self._num_finished = 0

    def collect(
        self, count: int, samples_of: Callable[[Sequence[Completion]], Samples]
    ) -> Callable[[Completion], None]:
        """Return a function to call with each completion as soon as it is finished.

        Args:
            count: Samples of the call. A chunk is full whenever another ``1 / num_chunks`` of them has finished.
            samples_of: Converts completions to samples.
        """
        unsent: list[Completion] = []

        def add(completion: Completion) -> None:
            unsent.append(completion)
            self._num_finished += 1
            due = min(self._num_finished * self._num_chunks // count, self._num_chunks - 1)
            if due > self._num_sent:
                self._num_sent = due
                self._send(samples_of(unsent))
                unsent.clear()

        return add


class SharingEngine:
    """Base of engines whose finished responses other calls use, and whose progress they show, while they generate."""

    partial_results: PartialResults | None = None
    """Sends finished responses in chunks while a call runs; None: nothing is sent."""
    _followed: list[Sample] | None = None
    """Samples of all generations inside `sharing`, without those of other ranks; None outside."""

    def progress(self) -> ActivityProgress | None:
        """Return the progress of all generations inside `sharing`; None outside. Any thread may call it.

        A sample that moved to another rank counts as unfinished until it returns.
        """
        followed = self._followed  # the thread that trains may end the call meanwhile
        if followed is None:
            return None
        samples = tuple(followed)
        longest = max((len(sample.token_ids) for sample in samples if sample.finish_reason is None), default=None)
        done = sum(sample.finish_reason is not None for sample in samples)
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        return ActivityProgress(done, len(samples), "samples", num_tokens, longest)

    def _follow(self, samples: Sequence[Sample]) -> None:
        """Report the progress of these samples, too."""
        if self._followed is not None:
            self._followed.extend(samples)

    @contextmanager
    def sharing(self, partial_results: PartialResults | None = None) -> Iterator[None]:
        """Share finished responses with other calls inside this context.

        Args:
            partial_results: Sends finished responses in chunks; None: nothing is sent.
        """
        self.partial_results, self._followed = partial_results, []
        try:
            yield
        finally:
            self.partial_results = self._followed = None


class CompletionNotifier:
    """Calls a listener once for each sample of a call when it has finished.

    Args:
        samples: Samples of the call.
        listener: Function to call; None: none.
        completion_of: Returns a finished sample's completion.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        listener: Callable[[Completion], None] | None,
        completion_of: Callable[[Sample], Completion],
    ) -> None:
        self._due = {sample.sample_id for sample in samples}
        self._listener, self._completion_of = listener, completion_of
        self._num_seen = 0

    def follow(self, ended: Sequence[Sample]) -> None:
        """Report the new samples at the end of a growing list."""
        if self._listener is not None:
            self.report(ended[self._num_seen :])
            self._num_seen = len(ended)

    def report(self, samples: Iterable[Sample]) -> None:
        """Report samples of this call that were not reported yet."""
        for sample in samples:
            if self._listener is not None and sample.sample_id in self._due:
                self._due.remove(sample.sample_id)
                self._listener(self._completion_of(sample))
