"""Does a rank wait for others that will never come? It cannot know, but it can say what it waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)

TELL_AFTER_S = 60.0
"""Ranks may be a training call apart; who waits for longer is told what could be the matter."""


@contextmanager
def warn_if_stalled(name: str, rank: int) -> Iterator[None]:
    """Surround the first collective of what every rank must call; log a warning when the others take long."""
    timer = threading.Timer(
        TELL_AFTER_S, _log.warning,
        ("rank %d has waited in %s for %g s until all ranks call it. Where some never do, as under rank_zero_only or "
         "`if trainer.is_global_zero`, it waits for ever: call it on every rank", rank, name, TELL_AFTER_S),
    )  # fmt: skip
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
