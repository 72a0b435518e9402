"""Frames arrive in any order, senders do not wait, and all ranks raise the same error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.errors import RankLost, ReallocError, RewardError
from lightning_realloc.runtime.messages import failure_store
from lightning_realloc.runtime.messages.failure_store import (
    await_watching,
    explain_broken_connection,
    is_broken_connection,
    peer_failures,
    publish_failure,
    publish_loss,
    publish_start,
)
from lightning_realloc.runtime.messages.flight_record import FlightRecord
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.runtime.messages.watchdog import Watchdog
from tests.workers import WorkerPool


def _open() -> tuple[int, Mailbox]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return rank, Mailbox(rank, world_size, dist.new_group(backend="gloo"))


def _bytes(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


class _Work:
    """A message under way, until it is waited for."""

    is_under_way = True

    def wait(self) -> None:
        self.is_under_way = False


def test_release_waits_for_the_frames_of_a_run_and_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[_Work] = []

    def send(*arguments: Any, **settings: Any) -> _Work:
        works.append(_Work())
        return works[-1]

    monkeypatch.setattr(dist, "isend", send)
    mailbox = Mailbox(0, 2, None)
    for run in range(3):
        mailbox.send([1], FrameKind.ROWS, run, 0, _bytes(1))  # a header and its content
    mailbox.release(1)
    assert [work.is_under_way for work in works] == [False] * 4 + [True] * 2
    mailbox.release(2)
    assert not any(work.is_under_way for work in works)


def _send_in_one_order_and_receive_in_another() -> list[list[int]]:
    rank, mailbox = _open()
    for run in range(2):
        for call in range(3):
            mailbox.send(mailbox.others, FrameKind.ROWS, run, call, _bytes(*[10 * run + call] * (rank + call)))
    received = [
        mailbox.receive(FrameKind.ROWS, run, call, source).tolist()
        for run in (1, 0) for call in (2, 0, 1) for source in mailbox.others
    ]  # fmt: skip
    mailbox.release(1)
    return received


def test_frames_are_found_by_name_in_any_order(workers: WorkerPool) -> None:
    for rank, received in enumerate(workers.run(_send_in_one_order_and_receive_in_another, world_size=3)):
        others = [source for source in range(3) if source != rank]
        expected = [[10 * run + call] * (s + call) for run in (1, 0) for call in (2, 0, 1) for s in others]
        assert received == expected


def _poll_and_take() -> list[tuple[int, list[int]]]:
    """Return the questions that rank 0 took between two looks at another message, each with its sender."""
    rank, mailbox = _open()
    taken: list[tuple[int, list[int]]] = []
    if rank:
        for part in range(3):
            mailbox.send([0], FrameKind.QUESTION, 1, 2, _bytes(rank, part), part=part)
        mailbox.send([0], FrameKind.QUESTION, 1, 3, _bytes(99))  # of another call
        mailbox.send([0], FrameKind.ANSWER, 1, 2, _bytes(rank))
    else:
        mailbox.wait_until(lambda: len(taken) == 6, 1, lambda: taken.extend(_questions(mailbox)))
        assert sorted(content.item() for _, content in _all_of(mailbox, FrameKind.ANSWER, 2)) == [1, 2]
    mailbox.release(1)
    return taken


def _questions(mailbox: Mailbox) -> list[tuple[int, list[int]]]:
    mailbox.poll()
    return [(source, content.tolist()) for source, content in mailbox.take(FrameKind.QUESTION, 1, 2)]


def _all_of(mailbox: Mailbox, kind: FrameKind, count: int) -> list[tuple[int, torch.Tensor]]:
    """Return so many frames of a kind, once they have arrived."""
    found: list[tuple[int, torch.Tensor]] = []
    while len(found) < count:
        mailbox.poll(1)
        found += mailbox.take(kind, 1, 2)
    return found


def test_a_rank_takes_the_frames_that_have_arrived_without_waiting(workers: WorkerPool) -> None:
    taken, *others = workers.run(_poll_and_take, world_size=3)
    for rank in (1, 2):
        assert [content for source, content in taken if source == rank] == [[rank, part] for part in range(3)]
    assert others == [[], []]


def _poll_a_failed_rank() -> str:
    rank, mailbox = _open()
    try:
        if rank:
            mailbox.fail(RewardError("no reward"))
        while True:
            mailbox.poll()
    except ReallocError as error:
        return str(error)


def test_a_rank_that_polls_raises_the_error_of_another_one(workers: WorkerPool) -> None:
    assert all("no reward" in error for error in workers.run(_poll_a_failed_rank, world_size=2))


def _send_to_a_rank_that_computes() -> tuple[float, float]:
    """Return the seconds of each rank since the data were sent, and those that it waited for data."""
    rank, mailbox = _open()
    if rank == 0:
        mailbox.send([1], FrameKind.ROWS, 0, 0, torch.zeros(1 << 20, dtype=torch.uint8))
    dist.barrier()  # which the sender would never reach if it waited for the receiver
    begin = time.perf_counter()
    if rank == 0:
        mailbox.release(0)
    else:
        time.sleep(2.0)
        mailbox.receive(FrameKind.ROWS, 0, 0, 0)
    return time.perf_counter() - begin, mailbox.seconds_waited


def test_frames_arrive_while_a_rank_computes(workers: WorkerPool) -> None:
    (let_go_after, _), (received_after, waited) = workers.run(_send_to_a_rank_that_computes, world_size=2)
    assert let_go_after < 1.5 < received_after
    assert waited == 0.0


@dataclass(frozen=True, slots=True)
class _Sum:
    """Numbers of some ranks."""

    numbers: list[int]

    @classmethod
    def merge(cls, parts: Sequence[_Sum]) -> _Sum:
        """Return the numbers of all parts."""
        return cls([number for part in parts for number in part.numbers])


_Sum.__module__ = "lightning_realloc.runtime.messages.test_sum"
"""Ranks exchange only this package's classes."""
sys.modules[_Sum.__module__] = sys.modules[__name__]


def _share(hosts: list[list[int]], contributors: list[int]) -> tuple[list[int], int]:
    """Return the whole of two runs in reverse order, and the messages that this rank sent for them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mailbox = Mailbox(rank, world_size, dist.new_group(backend="gloo"), hosts=hosts)
    for run in range(2):
        if rank in contributors:
            mailbox.share(FrameKind.DIRECTORY, run, 0, _Sum([10 * run + rank]), contributors)
    if rank == 0:
        time.sleep(0.5)  # it passes on in the background what others wait for
    wholes = [mailbox.receive_whole(FrameKind.DIRECTORY, run, 0).numbers for run in (1, 0)]
    num_sent = sum(sent.run in (0, 1) and sent.memory.dtype == torch.int64 for sent in mailbox._port._sent)
    mailbox.release(1)
    return [number for whole in wholes for number in whole], num_sent


@pytest.mark.parametrize("contributors", [[0, 1, 2, 3, 4], [4], [1, 3]])
@pytest.mark.parametrize("hosts", [[[0, 1, 2, 3, 4]], [[0, 1], [2, 3], [4]], [[0], [1], [2], [3], [4]]])
def test_every_rank_gets_the_parts_of_all_in_their_order(
    workers: WorkerPool, hosts: list[list[int]], contributors: list[int]
) -> None:
    found = workers.run(_share, hosts, contributors, world_size=5)
    expected = [10 + rank for rank in contributors] + contributors
    assert [whole for whole, _ in found] == [expected] * 5
    assert sum(num_sent for _, num_sent in found) <= 2 * 2 * 4, "each rank sends a part up, and gets the whole"


def _wait_among_frames(folder: Path, wait: Callable[[Mailbox], None]) -> str:
    """Return the error of rank 0, which knows that the store is lost, while rank 1 sends it frames of another call."""
    rank = dist.get_rank()
    watchdog = Watchdog(FlightRecord(), rank=rank, world_size=2, timeout_s=60, action="warn", folder=folder)
    watchdog.store_is_lost = True
    mailbox, has_ended = Mailbox(rank, 2, dist.new_group(backend="gloo"), watchdog), folder / "has_ended"
    give_up_at = time.monotonic() + 8
    while rank == 1 and not has_ended.exists() and time.monotonic() < give_up_at:
        mailbox.send([0], FrameKind.ROWS, 0, 0, _bytes(1))
        time.sleep(0.2)
    if rank == 1:
        return str(has_ended.exists())
    try:
        wait(mailbox)
    except RankLost as error:
        has_ended.touch()
        return str(error)
    return "nothing"


def _receive(mailbox: Mailbox) -> None:
    mailbox.receive(FrameKind.ROWS, 0, 1, 1)


def _poll(mailbox: Mailbox) -> None:
    while True:
        mailbox.poll(1)


def _wait_until(mailbox: Mailbox) -> None:
    mailbox.wait_until(lambda: False, 1, mailbox.poll)


@pytest.mark.parametrize("wait", [_receive, _poll, _wait_until])
def test_frames_of_other_calls_do_not_delay_the_search_for_lost_ranks(
    workers: WorkerPool, tmp_path: Path, wait: Callable[[Mailbox], None]
) -> None:
    found = workers.run(_wait_among_frames, tmp_path, wait, world_size=2)
    assert found == ["the process group's store has ended", "True"]


def _probe_and_send() -> tuple[int, int]:
    """Return the number of messages that are kept after two probes and a frame of this rank have been received."""
    rank, mailbox = _open()
    for _ in range(2):
        mailbox._port.probe(1 - rank)
    mailbox.send(mailbox.others, FrameKind.ROWS, 0, 0, _bytes(1))
    mailbox.receive(FrameKind.ROWS, 0, 0, 1 - rank)
    mailbox.release(0)
    return len(mailbox._port._probes), len(mailbox._port._sent)


def test_probes_that_were_received_are_not_kept(workers: WorkerPool) -> None:
    assert workers.run(_probe_and_send, world_size=2) == [(0, 0)] * 2


def _fail_on(failing: dict[int, Exception]) -> str:
    rank, mailbox = _open()
    try:
        if rank in failing:
            mailbox.fail(failing[rank])
        mailbox.receive(FrameKind.ROWS, 0, 0, (rank + 1) % dist.get_world_size())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("failing", "heard", "own"),
    [
        ({2: RewardError("no reward for 'x'")}, "RewardError: no reward for 'x'", {}),
        ({2: KeyError("x")}, "ReallocError: rank 2 failed with KeyError: 'x'", {2: "KeyError: 'x'"}),
        ({1: ReallocError("first"), 3: RewardError("second")}, "ReallocError: first", {}),
        ({0: RankLost("gone"), 3: RewardError("the cause")}, "RewardError: the cause", {}),
        ({1: RankLost("gone"), 2: RankLost("too")}, "RankLost: gone", {}),
    ],
    ids=["ours", "python's", "two", "a-lost-rank-and-why", "a-lost-rank"],
)
def test_every_rank_raises_the_lowest_failed_ranks_error(
    workers: WorkerPool, failing: dict[int, Exception], heard: str, own: dict[int, str]
) -> None:
    assert workers.run(_fail_on, failing) == [own.get(rank, heard) for rank in range(4)]


def test_a_single_process_sends_nothing_and_raises_its_own_error() -> None:
    mailbox = Mailbox(0, 1, None)
    mailbox.send(mailbox.others, FrameKind.ROWS, 0, 0, _bytes(1))
    mailbox.release(0)
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        mailbox.fail(error)
    assert caught.value is error


def _end_in_a_collective() -> str:
    """Return this rank's error when rank 1 fails and ends while the others wait for it in a collective."""
    rank, mailbox = _open()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    try:
        if rank == 1:
            mailbox.fail(ArithmeticError("overflow"))
        try:
            dist.barrier(group)
        except RuntimeError as error:
            assert is_broken_connection(error), error
            mailbox.fail(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_broken_collective_raises_the_error_that_broke_it(workers: WorkerPool) -> None:
    heard = workers.run(_end_in_a_collective, world_size=3)
    assert heard == [
        "ReallocError: rank 1 failed with ArithmeticError: overflow",
        "ArithmeticError: overflow",
        "ReallocError: rank 1 failed with ArithmeticError: overflow",
    ]


def _wait_for_a_lost_rank() -> str:
    publish_loss(1)
    try:
        return str(await_watching(threading.Event().wait, what="newer weights"))
    except RankLost as error:
        return str(error)


def test_a_rank_that_waits_for_weights_ends_when_another_rank_is_lost(workers: WorkerPool) -> None:
    assert workers.run(_wait_for_a_lost_rank, world_size=1) == ["rank 1 was lost; this rank waited for newer weights"]


class _CountingStore(dist.HashStore):
    """A store that counts questions for the values of keys."""

    num_reads = 0

    def get(self, key: str) -> bytes:
        """Return a value."""
        self.num_reads += 1
        return bytes(super().get(key))


class _ClosedStore:
    """A store whose process has ended."""

    def add(self, key: str, number: int) -> int:
        """Fail as torch's store does."""
        raise dist.DistNetworkError("failed to recv, got 0 bytes")


def test_a_closed_connection_gets_a_note_about_a_lost_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_store, "group_store", _ClosedStore)
    error = RuntimeError("[/gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    explain_broken_connection(error, 1)
    assert error.__notes__ == [failure_store.STORE_LOST]


def test_a_waiting_rank_asks_for_a_number_until_a_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _CountingStore()
    monkeypatch.setattr(failure_store, "group_store", lambda: store)
    assert failure_store._cause_to_end() is None and store.num_reads == 0
    publish_loss(999)
    assert failure_store._cause_to_end() == "rank 999 was lost"
    publish_failure(70, KeyError("x"))
    publish_failure(7, KeyError("y"))
    store.num_reads = 0
    assert failure_store._cause_to_end() == "rank 7 failed with KeyError: 'y'" and store.num_reads == 1
    for rank in (7, 70, 999):
        publish_start(rank)
    assert failure_store._cause_to_end() is None


def _explained() -> list[str]:
    rank = dist.get_rank()
    publish_start(rank)
    dist.barrier()
    error = RuntimeError("[/gloo/transport/tcp/pair.cc:1] Connection closed by peer") if rank else KeyError("x")
    if rank:
        while not peer_failures():
            time.sleep(0.01)
    explain_broken_connection(error, rank)
    return getattr(error, "__notes__", [])


def test_a_closed_connection_gets_a_note_about_the_rank_that_failed_first(workers: WorkerPool) -> None:
    assert workers.run(_explained, world_size=2) == [[], ["rank 0 failed first, with KeyError: 'x'"]]
    assert not is_broken_connection(RuntimeError("shape mismatch"))
