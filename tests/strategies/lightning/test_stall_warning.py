"""Who waits long for ranks that may never come says what for; who does not wait long says nothing."""

from __future__ import annotations

import logging
import time

import pytest

from lightning_realloc.strategies.lightning import stall_warning as long_waits
from lightning_realloc.strategies.lightning.stall_warning import warn_if_stalled


def test_a_rank_that_waits_long_says_what_all_must_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(long_waits, "TELL_AFTER_S", 0.05)
    give_up_at = time.monotonic() + 10
    with caplog.at_level(logging.WARNING), warn_if_stalled("save_checkpoint", 2):
        while not caplog.messages and time.monotonic() < give_up_at:
            time.sleep(0.01)
    (told,) = caplog.messages
    assert told.startswith("rank 2 has waited in save_checkpoint for 0.05 s until all ranks call it")
    assert told.endswith("call it on every rank")


def test_a_short_wait_is_not_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(long_waits, "TELL_AFTER_S", 0.1)
    with pytest.raises(KeyError), warn_if_stalled("save_checkpoint", 0):
        raise KeyError("x")
    time.sleep(0.2)
    assert caplog.messages == []
