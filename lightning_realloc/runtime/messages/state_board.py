"""What each rank does, in the store of the process group, and questions to all ranks, which one rank asks at a time.

Ranks answer questions from their watchdog's thread, even if the thread that trains is blocked in a collective. If many
ranks wait for a late one, one of them asks, and the others read what it found: otherwise their questions alone, which
grow with the square of the number of ranks, would keep the store busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_realloc.runtime.messages.failure_store import COUNT_KEY
from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value
from lightning_realloc.runtime.messages.stalls import RankState, Stall

ANSWER_S = 5.0
"""Seconds that a rank waits for the states of others. They answer within `POLL_S` unless their process is stopped."""
LOOK_S = 0.1
"""Seconds between two looks at the answers; more with many ranks."""
LOOKS_PER_S = 2000
"""Looks of all ranks together."""

_ASKED = "watchdog/asked"


class StateBoard:
    """One rank's connection to the states of all ranks.

    Args:
        store: Store of the process group.
        rank: This rank.
        world_size: Number of ranks.
        answer: Publishes this rank's state if another one asks.
    """

    def __init__(self, store: Any, rank: int, world_size: int, answer: Callable[[], object]) -> None:
        self.store = store
        self._rank, self._world_size, self._answer = rank, world_size, answer
        self._look_s = max(LOOK_S, world_size / LOOKS_PER_S)

    def join(self) -> int:
        """Return the number of questions so far, before this rank publishes its first state."""
        self.store.compare_set(_key(0), "", "")  # `read_news` reads these keys, for which a store would wait
        self.store.add(COUNT_KEY, 0)
        return int(self.store.add(_ASKED, 0))

    def read_news(self) -> tuple[int, RankState | None, int]:
        """Return the number of questions, the state of rank 0, and the number of failures and losses.

        The store serves all ranks every second, so it is read in one round trip.
        """
        question, host, failures = self.store.multi_get([_ASKED, _key(0), COUNT_KEY])
        return int(question), _decoded(host), int(failures)

    def publish(self, state: RankState) -> None:
        """Write this rank's state."""
        self.store.set(_key(self._rank), encode_value(state))

    def last_state(self, rank: int) -> RankState | None:
        """Return a rank's latest published state; None for a rank that has published none."""
        return _decoded(self.store.get(_key(rank))) if self.store.check([_key(rank)]) else None

    def ask(self) -> dict[int, RankState | None]:
        """Return the state of every rank; None for one that does not answer in time."""
        question = self.store.add(_ASKED, 1)
        self._answer()
        ranks = list(range(self._world_size))
        if not self.store.check(list(map(_key, ranks))):
            ranks = [rank for rank in ranks if self.store.check([_key(rank)])]
        states: dict[int, RankState | None] = dict.fromkeys(range(self._world_size))
        give_up_at = time.monotonic() + ANSWER_S
        while (silent := [rank for rank in ranks if states[rank] is None]) and time.monotonic() < give_up_at:
            for rank, state in zip(silent, self.store.multi_get(list(map(_key, silent))), strict=True):
                states[rank] = _if_answers(_decoded(state), question)
            time.sleep(self._look_s)
        return states

    def find_stall(self) -> Stall | None:
        """Return the ranks for which others wait, as two questions show; None if ranks have moved on meanwhile.

        If another rank asks at the moment, this one returns what that finds.
        """
        found: Stall | None = self._ask_or_wait("stall", lambda: Stall.find(self.ask(), self.ask()))
        return found

    def find_silent(self) -> list[int]:
        """Return ranks that do not answer. If another rank asks at the moment, return those that it finds."""
        found: list[int] = self._ask_or_wait(
            "silent", lambda: [rank for rank, one in self.ask().items() if one is None]
        )
        return found

    def _ask_or_wait(self, name: str, find: Callable[[], Any]) -> Any:
        """Return the result of ``find``, of this rank or of the one that asks at the moment."""
        asking, count, finding = (f"watchdog/{name}/{key}" for key in ("asking", "count", "finding"))
        store = self.store
        num_found = store.add(count, 0)
        while int(store.compare_set(asking, "", str(self._rank))) != self._rank:
            give_up_at = time.monotonic() + 3 * ANSWER_S
            while time.monotonic() < give_up_at:
                self._answer()
                if store.add(count, 0) > num_found:
                    return decode_value(store.get(finding))
                time.sleep(self._look_s)
            store.delete_key(asking)  # the rank that asked was lost
        try:
            found = find()
            store.set(finding, encode_value(found))
            store.add(count, 1)
        finally:
            store.delete_key(asking)
        return found


def _if_answers(state: RankState | None, question: int) -> RankState | None:
    """Return a state if it answers a question, or its rank has ended and answers none."""
    return state if state is not None and (state.answers >= question or state.has_ended) else None


def _key(rank: int) -> str:
    return f"watchdog/state/{rank}"


def _decoded(content: bytes) -> RankState | None:
    """Return a published state; None for the empty one of a rank that has published none yet."""
    state: RankState | None = decode_value(content) if content else None
    return state
