"""What training calls measured, told to the ranks that had no part in them."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.strategies.exchange.iteration_data import IterationData


class TrainingMetrics:
    """This rank's measurements, and those of calls that ran elsewhere.

    Args:
        mailbox: Between the ranks.
        rank: This process.
        world_size: All processes.
        may_be_late: Whether measurements of a call that only some ranks took part in may be those of the batch before,
            so that nobody waits for them.
    """

    def __init__(self, mailbox: Mailbox, *, rank: int, world_size: int, may_be_late: bool) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._world_size = world_size
        self._may_be_late = may_be_late
        self._measured: dict[tuple[int, int], dict[str, float]] = {}
        self._late: dict[str, tuple[int, int, int]] = {}

    def note(self, data: IterationData, call: ModelFunctionCall, measured: Mapping[str, float]) -> None:
        """Note what this rank measured in a training call."""
        self._measured.setdefault((data.run, data.index(call)), {}).update(measured)

    def exchange(self, data: IterationData, *, wait: bool) -> dict[str, float]:
        """Send what this rank measured, and return what training calls measured: of this batch, or, where that may be
        late and ``wait`` is False, of the one before."""
        metrics: dict[str, float] = {}
        due: list[tuple[int, int, int]] = []
        for call in data.routes.calls:
            if call.kind != "train":
                continue
            index, ranks = data.index(call), data.routes.placements[call.name].layout.ranks
            if ranks[0] == self._rank:
                content = encode_message(self._measured[data.run, index], {})
                self._mailbox.send(self._mailbox.others, FrameKind.METRICS, data.run, index, content)
            earlier, now = self._late.pop(call.name, None), (data.run, index, ranks[0])
            if self._may_be_late and len(ranks) < self._world_size and not wait:
                self._late[call.name] = now
                due += [earlier] if earlier else []
            else:
                due += [earlier, now] if earlier else [now]
        for run, index, source in due:
            metrics |= self._metrics_of(run, index, source)
        return metrics

    def finish(self) -> None:
        """Take in what is still on its way."""
        for run, index, source in self._late.values():
            self._metrics_of(run, index, source)
        self._late.clear()

    def _metrics_of(self, run: int, index: int, source: int) -> dict[str, float]:
        own = self._measured.pop((run, index), None)
        if source == self._rank and own is not None:
            return own
        return decode_message(self._mailbox.receive(FrameKind.METRICS, run, index, source))[0]
