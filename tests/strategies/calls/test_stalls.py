"""Ranks that wait too long name the late rank, its call and line; a failed run leaves its latest activities."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_realloc.runtime.messages import watchdog
from lightning_realloc.strategies import ReallocStrategy
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

DELAY_S = 3.0


def slow_on_rank_1(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Reward tokens; on rank 1 after a long sleep."""
    if int(os.environ["RANK"]) == 1:
        time.sleep(DELAY_S)
    return [float(len(ids)) for ids in completion_ids]


def fit_and_listen(folder: str) -> list[str]:
    """Fit with a reward that is slow on one rank, and return this rank's warnings of the watchdog."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    watchdog.log.addHandler(handler)
    usual_s, watchdog.POLL_S = watchdog.POLL_S, 0.2
    try:
        strategy = ReallocStrategy("static", stall_timeout=1.0)
        runs.trainer(strategy, 2, max_steps=1, default_root_dir=folder).fit(
            runs.grpo(reward=slow_on_rank_1), Batches(1)
        )
    finally:  # other tests run in this process afterwards
        watchdog.log.removeHandler(handler)
        watchdog.POLL_S = usual_s
    return messages


def test_a_waiting_rank_names_the_late_one_and_its_line(workers: WorkerPool, tmp_path: Path) -> None:
    # On a busy machine ranks also wait for each other while they are set up.
    waiting, late = (
        [message for message in messages if not re.search("in code (between two calls|before the first)", message)]
        for messages in workers.run(fit_and_listen, str(tmp_path), world_size=2, init_process_group=False)
    )

    assert not late
    assert waiting[0].startswith("rank 0 has waited ")
    assert "for rank 1, which has been in " in waiting[0]
    assert f"{Path(__file__).name}:" in waiting[0]
    assert "in slow_on_rank_1" in waiting[0]
    record = (tmp_path / "flight_record" / "rank1.txt").read_text()
    assert "actor.generate" in record
    assert "slow_on_rank_1" in record
