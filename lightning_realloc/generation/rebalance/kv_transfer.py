"""Move running samples with their keys and values in two stages, so that they decode while most bytes travel.

In the round that plans a move, the keys and values so far are sent ahead and the samples go on running. In the next
round the samples leave with the positions added since, in the message that `SampleHandover` sends.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_realloc.generation.cache.kv_cache import LayerShape
from lightning_realloc.generation.loop.sample_access import SampleAccess
from lightning_realloc.generation.rebalance.load import SampleMove
from lightning_realloc.generation.rebalance.migrated_sample import KVSpan, pack_samples, unpack_samples
from lightning_realloc.generation.rebalance.pace import PaceEstimator
from lightning_realloc.runtime.messages.bulk_messages import PendingReceive


class KVTransfer:
    """Keys and values on their way from and to one rank, by number of their shipment.

    Args:
        access: Samples of this rank.
        pace: Learns how fast transfers are.
    """

    def __init__(self, access: SampleAccess, pace: PaceEstimator) -> None:
        self._access = access
        self._pace = pace
        self._num_sent: dict[int, dict[int, int]] = {}
        """Positions sent ahead, by shipment and sample id."""
        self._arriving: dict[int, PendingReceive] = {}

    def send_ahead(self, number: int, moves: Sequence[SampleMove]) -> Tensor:
        """Return the message with the keys and values of running samples so far.

        Args:
            number: Number of the shipment.
            moves: Its moves. Those to be recomputed have nothing to send.
        """
        access = self._access
        index_of = {access.samples[index].sample_id: index for index in access.running}
        spans, num_sent = [], self._num_sent.setdefault(number, {})
        for move in moves:
            index = index_of.get(move.sample_id)
            if index is not None and move.how == "send":
                end = num_sent[move.sample_id] = access.samples[index].num_read
                spans.append(KVSpan(move.sample_id, 0, end, access.read_cache(index, 0, end)))
        return pack_samples(spans=spans, shapes=access.describe_cache())

    def rest(self, number: int, index: int) -> KVSpan | None:
        """Return the positions added to a running sample since they were sent ahead; None if nothing was."""
        sample = self._access.samples[index]
        begin, end = self._num_sent.get(number, {}).get(sample.sample_id, 0), sample.num_read
        return KVSpan(sample.sample_id, begin, end, self._access.read_cache(index, begin, end)) if begin else None

    def forget(self, number: int) -> None:
        """Drop a shipment whose samples have left."""
        self._num_sent.pop(number, None)

    def expect(self, number: int, message: PendingReceive) -> None:
        """Remember a message of another rank's :meth:`send_ahead`."""
        self._arriving[number] = message

    def has_arrived(self, number: int) -> bool:
        """Whether all keys and values sent ahead to this rank are here."""
        return number not in self._arriving or self._arriving[number].has_arrived()

    def receive(self, number: int) -> tuple[list[KVSpan], list[LayerShape]]:
        """Return spans sent ahead to this rank and the shapes of the source's layers; waits for them."""
        if number not in self._arriving:
            return [], []
        message = self._arriving.pop(number)
        self._pace.record_transfer(in_time=message.has_arrived())
        _, spans, shapes = unpack_samples(message.wait())
        return spans, shapes
