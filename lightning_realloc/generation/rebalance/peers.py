"""Peers of a generating rank, and the exchange of reports with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from lightning_realloc.runtime.messages.bulk_messages import PendingReceive, PendingSend
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox

MovableSamples = Literal["queued", "all"]
"""Samples that may move. "queued": those that wait for a slot; "all": running ones as well."""


@dataclass(slots=True)
class Peers:
    """Ranks that generate other samples with the same shard of the same model, and numbers for messages to them.

    A number identifies a message within a pair of ranks; see `BulkChannel`. All ranks plan the same moves, so they
    count alike.
    """

    mailbox: Mailbox
    rank: int
    others: tuple[int, ...]
    moves: MovableSamples = "queued"
    run: int = 0
    call: int = 0
    """Number of the call within ``run``; both name the frames of this call, see `Mailbox`."""
    num_calls: int = 0
    """Generations in this call so far."""
    num_reports: int = 0
    num_shipments: int = 0
    answer_questions: Callable[[], None] | None = None
    """Answers the peers' questions about samples of this rank, without waiting; None: there is no environment."""

    def at(self, run: int, call: int) -> None:
        """Begin another call."""
        self.run, self.call, self.num_calls = run, call, 0

    def wait_for(self, message: PendingReceive, source: int) -> Tensor:
        """Return the content of a message, and answer the peers' questions until it arrives: the source may need that.

        Raises:
            RankLost: if the source has ended.
        """
        if self.answer_questions is not None:
            self.mailbox.wait_until(message.has_arrived, source, self.answer_questions)
        return message.wait()

    def next_report_number(self) -> int:
        """Return the number of the next round's reports."""
        self.num_reports += 1
        return self.report_number_after(0)

    def report_number_after(self, rounds: int) -> int:
        """Return the number of the reports that follow the last ones by so many rounds."""
        return 3 * (self.num_reports + rounds)

    def next_shipment_number(self) -> int:
        """Return the number of a move's message with keys and values; that with the samples is one higher."""
        self.num_shipments += 1
        return 3 * self.num_shipments + 1


class ReportMessages:
    """Sends this rank's reports of one call to its peers, and receives theirs.

    Receives are posted a round early: if one is posted late, gloo waits until its own thread gets a core.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._channel = peers.mailbox.bulk_channel
        self._incoming: deque[dict[int, PendingReceive]] = deque()
        """Reports of the next two rounds, by sender."""
        self._sent: deque[PendingSend] = deque()

    def post_receives(self, *, rounds_ahead: int) -> None:
        """Begin to receive the reports that follow this rank's last one by so many rounds."""
        number = self._peers.report_number_after(rounds_ahead)
        self._incoming.append({other: self._channel.receive(other, number) for other in self._peers.others})

    def send(self, content: Mapping[str, Any]) -> None:
        """Send the next report to all peers, waiting for none of them."""
        while len(self._sent) >= 2 * len(self._peers.others):  # each peer has answered the report of two rounds ago
            self._sent.popleft().wait()
        number, message = self._peers.next_report_number(), encode_message(content)
        self._sent.extend(self._channel.send(other, number, message) for other in self._peers.others)

    def have_arrived(self) -> bool:
        """Whether `receive` would return at once."""
        return all(message.has_arrived() for message in self._incoming[0].values())

    def receive(self) -> list[dict[str, Any]]:
        """Return the next report of every peer; waits for them.

        Raises:
            Exception: the cause, where a peer failed.
        """
        peers, reports = self._peers, []
        for other, message in self._incoming.popleft().items():
            reports.append(decode_message(peers.wait_for(message, other)))
            if not reports[-1]:  # the peer failed or knows of a rank that did; the mailbox raises the cause
                peers.mailbox.receive(FrameKind.RETURNED, peers.run, peers.call, other, part=peers.num_calls + 1)
        return reports

    def exchange_farewells(self) -> None:
        """Answer the receives that peers have posted for another round, and wait for their answers."""
        self.send({"leaves": self._peers.rank})
        self.receive()

    def finish(self) -> None:
        """Wait until all reports have been received."""
        while self._sent:
            self._sent.popleft().wait()

    def send_failure(self) -> None:
        """Send an empty message in place of the next report; its reader asks the mailbox for the cause."""
        number = self._peers.next_report_number()
        for other in self._peers.others:
            with suppress(RuntimeError):  # an unreachable peer has ended too
                self._channel.send(other, number, encode_message({}))
