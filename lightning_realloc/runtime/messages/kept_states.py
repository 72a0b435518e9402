"""Keep each rank's last published state in a folder of the process that started it, to name a killed rank's call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value
from lightning_realloc.runtime.messages.stalls import RankState, in_activity

_VARIABLE = "LIGHTNING_REALLOC_STATES"


@contextmanager
def states_kept_in(folder: str) -> Iterator[None]:
    """Make processes that are started inside keep their states in a folder."""
    os.environ[_VARIABLE] = folder
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


def keep_state(rank: int, state: RankState) -> None:
    """Write a rank's state to the folder of the process that started it, if that process reads it."""
    folder = os.environ.get(_VARIABLE)
    if folder is None:
        return
    file = Path(folder, f"rank{rank}")
    with suppress(OSError):  # that process has ended, and the folder with it
        file.with_suffix(".new").write_bytes(encode_value(state))
        file.with_suffix(".new").replace(file)  # at once: a kill leaves a whole state


def last_seen(folder: str | None, rank: int) -> str:
    """Return the end of a sentence about a rank that was killed: its last known call; empty without one."""
    file = None if folder is None else Path(folder, f"rank{rank}")
    if file is None or not file.exists():
        return ""
    return f"; it was last seen{in_activity(decode_value(file.read_bytes()))}"
