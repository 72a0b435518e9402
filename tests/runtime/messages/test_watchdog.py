"""The message of a rank that waits names the rank that it waits for, its call and its line of code."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_realloc.errors import RankLost
from lightning_realloc.runtime.messages import failure_store, state_board, watchdog
from lightning_realloc.runtime.messages.flight_record import BEFORE, FlightRecord
from lightning_realloc.runtime.messages.plain_data import encode_value
from lightning_realloc.runtime.messages.stalls import MAX_NAMED, RankState, Stall, describe_stall
from lightning_realloc.runtime.messages.state_board import StateBoard
from lightning_realloc.runtime.messages.watchdog import Watchdog

WAITING = RankState("actor.train, waiting for all ranks", 61.2, 2.0, "runner.py:3 in run", waits_for=(0, 1))
WORKING = RankState("actor.generate", 70.0, 1.5, "reward.py:12 in slow", waits_for=None)


States = dict[int, RankState | None]


def _described(rank: int, states: States) -> str:
    stall, own = Stall.find(states, states), states[rank]
    assert stall is not None and own is not None
    return describe_stall(rank, own, stall)


def _is_certain(states: States) -> bool:
    stall = Stall.find(states, states)
    assert stall is not None
    return stall.is_certain


def test_the_rank_that_works_is_named_with_its_call_and_line() -> None:
    assert _described(0, {0: WAITING, 1: WORKING, 2: WAITING}) == (
        "rank 0 has waited 61 s in actor.train, waiting for all ranks (runner.py:3 in run) for rank 1, which has been "
        "in actor.generate for 70 s (reward.py:12 in slow, usually at most 1.5 s)"
    )


def test_a_rank_that_does_not_answer_is_named_before_ranks_that_work() -> None:
    message = _described(0, {0: WAITING, 1: WORKING, 2: None})
    assert "for rank 2, which does not answer: it is stopped, or its host is lost; and for rank 1, which has" in message


def test_ranks_that_wait_for_each_other_are_all_listed() -> None:
    saving = RankState("save_checkpoint", 60.0, 0.0, "user.py:9 in hook", waits_for=())
    message = _described(1, {0: saving, 1: WAITING})
    assert "all other ranks wait, too: rank 0 has been in save_checkpoint for 60 s (user.py:9 in hook)" in message
    assert "trainer.is_global_zero" in message


def test_a_message_names_a_few_ranks_and_counts_the_others() -> None:
    silent: States = dict.fromkeys(range(1, 400))
    message = _described(0, {0: WAITING} | silent)
    assert "for rank 1, which" in message and "for rank 8, which" in message and "rank 9" not in message
    assert message.endswith("and for 391 further ranks")
    message = _described(0, {0: WAITING} | dict.fromkeys(range(1, 400), WORKING))
    assert message.count("which has been") == MAX_NAMED and message.endswith("and for 391 further ranks")
    message = _described(0, dict.fromkeys(range(400), WAITING))
    assert message.count("has been in") == MAX_NAMED - 1 and "; 392 further ranks. Ranks that wait" in message


def test_a_rank_is_silent_only_if_it_answers_neither_of_two_questions() -> None:
    stall = Stall.find({0: WAITING, 1: WORKING, 2: None, 3: None}, {0: WAITING, 1: None, 2: WORKING, 3: None})
    assert stall is not None and stall.silent == (3,)
    assert stall.working == ((1, WORKING), (2, WORKING)) and stall.waiting == ((0, WAITING),)


def test_ranks_that_all_wait_are_stuck_only_if_none_has_moved_on() -> None:
    waiting: States = {0: WAITING, 1: replace(WAITING, seconds=3.0)}
    later: States = {0: replace(WAITING, seconds=66.2), 1: replace(WAITING, seconds=8.0)}
    stall = Stall.find(waiting, later)
    assert stall is not None and dict(stall.waiting) == later
    assert Stall.find(waiting, later | {1: replace(WAITING, stack=7)}) is None
    assert Stall.find(waiting, later | {1: replace(WAITING, activity="reference.infer")}) is None
    stall = Stall.find(waiting, later | {1: WORKING})
    assert stall is not None and stall.working == ((1, WORKING),)


def test_a_slow_start_is_no_certain_stall() -> None:
    loading = replace(WORKING, usual_s=0.0)  # the first call of its name, or the set-up
    assert not _is_certain({0: WAITING, 1: loading})
    assert _is_certain({0: WAITING, 1: WORKING})
    assert not _is_certain({0: replace(WAITING, usual_s=0.0), 1: None}), "a rank that loads may not answer"
    assert _is_certain({0: WAITING, 1: None})


class _CountingStore(dist.HashStore):
    """A store that counts its uses by all ranks, which are threads here."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: Counter[str] = Counter()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return values."""
        self.uses["multi_get"] += 1
        return list(super().multi_get(keys))

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self.uses["set"] += 1
        super().set(key, value)


def test_one_of_many_ranks_that_wait_asks_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_board, "ANSWER_S", 2.0)
    world_size, store, is_over = 40, _CountingStore(), threading.Event()
    boards: list[StateBoard] = []

    def answer(rank: int) -> None:
        asked, _, _ = boards[rank].read_news()
        if asked > answered[rank] and rank != 7:  # which is stopped
            answered[rank] = asked
            boards[rank].publish(replace(WORKING if rank == 5 else WAITING, answers=asked))

    def answer_until_over(rank: int) -> None:
        while not is_over.wait(0.05):
            answer(rank)

    boards += [StateBoard(store, rank, world_size, partial(answer, rank)) for rank in range(world_size)]
    answered = [board.join() for board in boards]
    for rank, board in enumerate(boards):
        board.publish(WAITING if rank != 5 else WORKING)
    with ThreadPoolExecutor(world_size) as threads:
        working = [threads.submit(answer_until_over, rank) for rank in (5,)]
        stalls = list(
            threads.map(StateBoard.find_stall, [board for rank, board in enumerate(boards) if rank not in (5, 7)])
        )
        is_over.set()
        assert all(one.result() is None for one in working)
    assert all(stall == stalls[0] for stall in stalls)
    assert stalls[0] is not None and stalls[0].silent == (7,) and dict(stalls[0].working).keys() == {5}
    assert store.add("watchdog/asked", 0) <= 4, "one rank asks twice; another may have come after it"
    assert store.uses["set"] <= 6 * world_size


def test_a_store_that_never_answers_is_reported_and_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    is_over, record = threading.Event(), FlightRecord()

    def connect() -> None:
        is_over.wait()
        raise RuntimeError("the connection was closed")

    for module in (watchdog, state_board):
        monkeypatch.setattr(module, "ANSWER_S", 0.05)
    monkeypatch.setattr(watchdog, "POLL_S", 0.05)
    monkeypatch.setattr(watchdog, "_connect", connect)
    watching = Watchdog(record, rank=1, world_size=2, timeout_s=0.2, action="warn", folder=tmp_path)
    began = time.monotonic()
    watching.start()
    assert time.monotonic() - began < 5
    with record.during("the first call", waits_for=(0,)):
        while not caplog.messages and time.monotonic() - began < 20:
            time.sleep(0.05)
    is_over.set()
    watching.stop()
    assert "rank 1 has waited" in caplog.messages[0]
    assert "mostly rank 0, is stopped or lost" in caplog.messages[0]


def test_one_of_the_ranks_that_a_stall_ends_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    ended: list[object] = []
    for module in (watchdog, state_board):
        monkeypatch.setattr(module, "ANSWER_S", 0.2)
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)

    def say() -> None:
        watchdog.log.warning("To resume: ...")
        time.sleep(60)  # as for an object store that does not answer

    for rank, first_waiting in ((1, 1), (2, 1), (2, 2)):
        watching = Watchdog(
            FlightRecord(), rank=rank, world_size=3, timeout_s=60, action="end", folder=tmp_path, before_end=say
        )
        watching._end(first_waiting)
    assert ended == [124] * 3
    heads = [message.partition(" because")[0] for message in caplog.messages]
    assert heads == ["rank 1 ends", "To resume: ...", "rank 2 ends", "rank 2 ends", "To resume: ..."]


def test_a_rank_that_moves_on_while_others_are_asked_reports_no_stall(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    store, record = dist.HashStore(), FlightRecord()
    for module in (watchdog, state_board):
        monkeypatch.setattr(module, "ANSWER_S", 0.5)  # rank 1 never answers, so that both questions take this long
    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "_connect", lambda: store)
    watching = Watchdog(record, rank=0, world_size=2, timeout_s=0.1, action="warn", folder=tmp_path)
    watching.start()
    with record.during("a long call", waits_for=(1,)):
        while store.add("watchdog/asked", 0) == 0:
            time.sleep(0.01)
    with record.during("the next call", waits_for=(1,)):
        watching._stopped.set()
        assert watching._thread is not None
        watching._thread.join(20)
    watching.stop()
    assert store.add("watchdog/asked", 0) >= 2
    assert not caplog.messages


def test_a_connection_that_broke_between_calls_gets_a_note_with_the_lost_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = dist.HashStore()
    for module in (watchdog, state_board):
        monkeypatch.setattr(module, "ANSWER_S", 0.5)
    monkeypatch.setattr(watchdog, "_connect", lambda: store)
    monkeypatch.setattr(failure_store, "group_store", lambda: store)
    store.set("watchdog/state/1", encode_value(replace(WORKING, place="")))  # its last answer
    watching = Watchdog(FlightRecord(), rank=0, world_size=2, timeout_s=60, action="warn", folder=tmp_path)
    watching.start()
    broken, known = RuntimeError("gloo/transport/tcp/pair.cc:1: Connection reset by peer"), RankLost("rank 1 was lost")
    for error in (broken, known, ValueError("x")):
        watching.explain(error)
    watching.stop()
    assert broken.__notes__ == ["rank 1 was lost in actor.generate"]
    assert not hasattr(known, "__notes__")


class _LostStore:
    """A store that answers a rank that introduces itself, and is lost some time after its first question."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def add(self, name: str, amount: int) -> int:
        """Return the number of questions."""
        return 0

    def multi_get(self, names: list[str]) -> list[bytes]:
        """Wait, and lose the connection."""
        self.is_over.wait()
        raise dist.DistNetworkError("the connection was closed")

    def set(self, name: str, value: str) -> None:
        """Keep nothing."""

    def compare_set(self, name: str, expected: str, desired: str) -> bytes:
        """Keep nothing."""
        return b""


def test_the_lost_store_of_an_earlier_process_group_does_not_end_the_next_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lost = _LostStore()
    stores = iter([lost, dist.HashStore()])
    for module in (watchdog, state_board):
        monkeypatch.setattr(module, "ANSWER_S", 0.05)
    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "_connect", lambda: next(stores))
    record = FlightRecord()
    with record.during("a call before the first run"):
        pass
    watching = Watchdog(record, rank=0, world_size=2, timeout_s=60, action="warn", folder=tmp_path)
    watching.start()
    assert record.current()[0].name == BEFORE
    while (asking := watching._store_thread) is None or not asking.is_alive():
        time.sleep(0.01)  # until the rank has asked
    watching.stop()
    watching.start()
    lost.is_over.set()
    asking.join(10)
    watching.stop()
    assert not asking.is_alive() and not watching.store_is_lost


def test_a_rank_that_waits_for_one_that_failed_reports_its_error_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    ended: list[object] = []
    store, record = dist.HashStore(), FlightRecord()
    monkeypatch.setattr(failure_store, "PEER_FAILURE_S", 0.2)
    monkeypatch.setattr(failure_store, "group_store", lambda: store)
    monkeypatch.setattr(watchdog, "POLL_S", 0.02)
    monkeypatch.setattr(watchdog, "_connect", lambda: store)
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    watching = Watchdog(record, rank=0, world_size=2, timeout_s=600, action="end", folder=tmp_path)
    watching.start()
    failure_store.publish_failure(1, ValueError("a callback's bug"))
    with record.during("the first call"):  # it works: it may still finish
        time.sleep(0.5)
    assert not ended
    with record.during("actor.train", waits_for=()):
        began = time.monotonic()
        while not ended and time.monotonic() - began < 20:
            time.sleep(0.02)
    watching.stop()
    assert ended == [watchdog.STALL_EXIT_CODE]
    assert "rank 1 failed with ValueError: a callback's bug; rank 0 waits for it in vain in actor.train" in caplog.text


def test_a_stall_after_a_rank_has_ended_is_certain() -> None:
    assert _is_certain({0: replace(WAITING, usual_s=0.0), 1: replace(WORKING, has_ended=True)})
