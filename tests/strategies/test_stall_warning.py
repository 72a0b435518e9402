"""A rank that waits long for others in a collective logs a warning; a short wait logs nothing."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from lightning_realloc.strategies import role_checkpoints
from lightning_realloc.strategies.role_checkpoints import warn_if_stalled


def test_a_rank_that_waits_long_names_the_method_that_all_ranks_must_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(role_checkpoints, "STALL_WARNING_S", 0.05)
    give_up_at = time.monotonic() + 10
    with caplog.at_level(logging.WARNING), warn_if_stalled("save_checkpoint", 2):
        while not caplog.messages and time.monotonic() < give_up_at:
            time.sleep(0.01)
    (warning,) = caplog.messages
    assert warning.startswith("rank 2 has waited in save_checkpoint for 0.05 s until all ranks call it")
    assert warning.endswith("call it on every rank")


def test_a_short_wait_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(KeyError), warn_if_stalled("save_checkpoint", 0):
        (timer,) = set(threading.enumerate()) - threads
        raise KeyError("x")
    timer.join(timeout=role_checkpoints.STALL_WARNING_S / 2)
    assert not timer.is_alive()
    assert caplog.messages == []
