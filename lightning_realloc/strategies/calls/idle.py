"""How much of an iteration does a rank spend waiting, for data, for weights and for other ranks?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning_realloc.runtime.messages.mailbox import Mailbox
from lightning_realloc.strategies.calls.metrics import ITERATION_S
from lightning_realloc.strategies.pool.model_pool import ModelPool

_IDLE_SHARE = "idle_share"


class IdleClock:
    """How long this rank waited for others, and what share of the time that was."""

    def __init__(self, mailbox: Mailbox, pool: ModelPool) -> None:
        self._mailbox, self._pool = mailbox, pool
        self._elsewhere = 0.0
        self._begin = time.perf_counter()
        self._seconds_then = 0.0
        self._share: float | None = None
        self._took_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds waited for data, for weights and for other ranks."""
        return self._mailbox.seconds_waited + self._elsewhere

    def measure(self, action: Callable[[], Any]) -> Any:
        """Do something that waits; what the pool spends on moving weights meanwhile is work."""
        begin, moving = time.perf_counter(), self._pool.seconds_moving
        result = action()
        self._elsewhere += max(0.0, time.perf_counter() - begin - (self._pool.seconds_moving - moving))
        return result

    def add(self, seconds: float) -> None:
        """Count seconds for which this rank waited where this clock does not see it."""
        self._elsewhere += seconds

    def begin(self) -> None:
        """Begin an iteration."""
        self._begin, self._seconds_then = time.perf_counter(), self.seconds

    def end(self) -> None:
        """End it."""
        self._took_s = time.perf_counter() - self._begin
        self._share = (self.seconds - self._seconds_then) / self._took_s

    def facts(self, rank: int) -> dict[str, float]:
        """Return the share of the iteration before this one, and its seconds."""
        return {} if self._share is None else {f"{_IDLE_SHARE}/{rank}": self._share, ITERATION_S: self._took_s}


def merge_idle_shares(facts: Mapping[str, float]) -> dict[str, float]:
    """Return the facts with one mean in place of every rank's idle share."""
    shares = [value for name, value in facts.items() if name.startswith(f"{_IDLE_SHARE}/")]
    rest = {name: value for name, value in facts.items() if not name.startswith(f"{_IDLE_SHARE}/")}
    return rest | ({_IDLE_SHARE: sum(shares) / len(shares)} if shares else {})
