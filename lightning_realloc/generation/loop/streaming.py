"""Stream finished responses out of a running generation, in chunks of about the same number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_realloc.batch.samples import Samples
from lightning_realloc.generation.core.sample import Completion, Sample


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


class CallNotifier:
    """Reports each finished sample's completion to ``on_finished``, and a sample's id and its new tokens to
    ``on_tokens``; None: nothing is reported."""

    def __init__(
        self,
        samples: Sequence[Sample],
        on_finished: Callable[[Completion], None] | None,
        completion_of: Callable[[Sample], Completion],
        on_tokens: Callable[[int, Sequence[int]], None] | None = None,
    ) -> None:
        self._samples = samples
        self._due = {sample.sample_id for sample in samples}
        self._on_finished, self._completion_of, self._on_tokens = on_finished, completion_of, on_tokens
        self._num_tokens = [len(sample.token_ids) for sample in samples]
        self._num_seen = 0

    def follow(self, ended: Sequence[Sample]) -> None:
        """Report new tokens, and the new samples at the end of a growing list."""
        self._report_tokens()
        if self._on_finished is not None:
            self.report(ended[self._num_seen :])
            self._num_seen = len(ended)

    def report(self, samples: Iterable[Sample]) -> None:
        """Report samples of this call that were not reported yet."""
        self._report_tokens()
        for sample in samples:
            if self._on_finished is not None and sample.sample_id in self._due:
                self._due.remove(sample.sample_id)
                self._on_finished(self._completion_of(sample))

    def _report_tokens(self) -> None:
        if self._on_tokens is None:
            return
        for number, sample in enumerate(self._samples):
            begin, self._num_tokens[number] = self._num_tokens[number], len(sample.token_ids)
            if begin < len(sample.token_ids):
                self._on_tokens(sample.sample_id, sample.token_ids[begin:])
