"""A run goes on when environments fail in any way, leaves nothing open, and resumes exactly after a rank was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos import agents
from tests.chaos.__main__ import trial
from tests.chaos.faults import Fault
from tests.strategies import runs
from tests.workers import WorkerPool

NUM_ITERATIONS = 3
"""Iterations of the short run, which have all faults but those of resets and of steps that raise."""


def fit(address: str) -> tuple[list[dict[str, float]], list[dict[str, int]]]:
    """Return the metrics of each iteration, and what was open after the first and the last one."""
    left = agents.LeftOpen()
    module = agents.algorithm(address, runs.low_tokens)
    plan = runs.calls(actor_generate="dp2", reference_infer="dp2", actor_train="fsdp2")
    games: Any = agents.games()
    outcome = runs.train(module, plan, 2, games, max_steps=NUM_ITERATIONS, callbacks=[left])
    return outcome.logged, left.counts


def test_a_run_goes_on_without_leaks_while_tools_steps_and_a_server_fail(workers: WorkerPool) -> None:
    server, address = agents.start_server()
    try:
        everyone = workers.run(fit, address, world_size=2, init_process_group=False, deadline_s=60.0)
        assert server.wait(timeout=5) == 1, "the server has died in the third iteration"
    finally:
        agents.end_server(server)
    logged = everyone[0][0]
    failing = [sum(fault in agents.FAILING for fault in faults) for faults in agents.FAULTS[:NUM_ITERATIONS]]
    shares = [step["stopped/failure"] for step in logged]
    assert shares == pytest.approx([count / agents.BATCH for count in failing])
    assert logged[0]["tool_failures/is_above"] == 0.0 < logged[1]["tool_failures/is_above"]
    for _, (first, last) in everyone:
        assert all(last[name] <= first[name] for name in first), f"open after iteration 1: {first}, at the end: {last}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", ["training", "generation"])
def test_a_run_with_failing_environments_resumes_exactly_after_a_rank_was_killed(moment: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm": "agents", "launcher": "environment", "world_size": 2, "rank": 1}
    occurrence = {"training": 6, "generation": 60}[moment]
    fault = Fault(number=0, signal="SIGKILL", target="one", moment=moment, occurrence=occurrence, **settings)
    assert trial(fault, tmp_path) == []
