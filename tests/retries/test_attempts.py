"""Repeated attempts: their number and waits, errors that end them at once, and actions inside actions."""

from __future__ import annotations

import logging
import random

import pytest

from lightning_realloc.retries import attempts
from lightning_realloc.retries.attempts import TRIES, backoff_s, retried

FIRST_WAIT_S = 1.0


class Action:
    """Fails with the given errors, then returns the number of its attempts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> int:
        """Take one attempt."""
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each wait, which takes none."""
    waited: list[float] = []
    monkeypatch.setattr(attempts, "sleep", waited.append)
    monkeypatch.setattr(attempts, "FIRST_WAIT_S", FIRST_WAIT_S)
    return waited


def test_the_third_attempt_is_the_last_and_waits_double(waits: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert retried(Action(ConnectionResetError("reset"), TimeoutError("slow")), "s3://b/x") == 3
    assert FIRST_WAIT_S / 2 <= waits[0] <= FIRST_WAIT_S <= waits[1] <= 2 * FIRST_WAIT_S
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"s3://b/x failed, attempt 2 of 3 follows in {waits[0]:.2f} s: ConnectionResetError: reset"
    assert lines[1].endswith(": TimeoutError: slow") and lines[2].startswith("s3://b/x answers again after ")
    lasting = Action(*[ConnectionResetError("reset")] * 9)
    with pytest.raises(ConnectionResetError):
        retried(lasting, "s3://b/x")
    assert lasting.calls == TRIES and len(waits) == 2 * (TRIES - 1)


def test_an_error_that_lasts_ends_the_first_attempt(waits: list[float]) -> None:
    for error in (PermissionError("no key"), FileNotFoundError("no bucket"), OSError(28, "No space left on device")):
        action = Action(error)
        with pytest.raises(type(error)):
            retried(action, "s3://b/x")
        assert action.calls == 1
    unknown = Action(RuntimeError("of a package"))
    with pytest.raises(RuntimeError):
        retried(unknown, "/runs/x")
    assert unknown.calls == 1 and not waits
    assert retried(Action(RuntimeError("of a package")), "s3://b/x") == 2


def test_attempts_inside_attempts_do_not_multiply_and_each_step_has_its_own() -> None:
    inner = Action(*[ConnectionResetError("reset")] * 20)

    def wrapped() -> int:
        try:
            return retried(inner, "s3://b/x")
        except ConnectionResetError as error:
            raise RuntimeError("of a package around it") from error

    with pytest.raises(RuntimeError):
        retried(wrapped, "s3://b")
    assert inner.calls == TRIES
    # Ten steps of which each fails once: no single action has that many attempts.
    steps = [Action(ConnectionResetError("reset")) for _ in range(10)]
    assert retried(lambda: [retried(step, "s3://b/x") for step in steps], "s3://b") == [2] * 10


def test_ranks_that_failed_together_try_again_at_different_times() -> None:
    rng = random.Random(0)
    drawn = [backoff_s(1, rng.uniform, first_wait_s=1.0) for _ in range(1000)]
    assert 1.0 <= min(drawn) < 1.05 and 1.95 < max(drawn) <= 2.0
    assert sum(drawn) / len(drawn) == pytest.approx(1.5, abs=0.03)
    assert backoff_s(9, rng.uniform, first_wait_s=1.0, max_wait_s=4.0) <= 4.0
