"""PooledReward: the rewards of the function in order, and limits for calls that hang, crash or leave processes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards import Failed, PooledReward, RewardFunctions
from lightning_realloc.rewards.failure_rule import Outcome
from tests.rewards import judges
from tests.rewards.judges import wait_until_gone


@contextmanager
def pooled(function: Any = judges.obedient, **options: Any) -> Iterator[PooledReward]:
    reward = PooledReward(function, **{"deadline_s": 20.0} | options)
    try:
        yield reward
    finally:
        reward.close()


def judge(reward: PooledReward, completions: list[str], **columns: Any) -> list[Outcome]:
    ids = [[number] for number in range(len(completions))]
    return reward(prompts=["?"] * len(completions), completions=completions, completion_ids=ids, **columns)


def test_worker_processes_return_the_functions_rewards_in_order() -> None:
    texts = ["a", "bb", "ccc", "dddd", "eeeee"]
    with pooled(workers=2, chunk_size=2) as reward:
        assert reward.__name__ == "obedient"
        assert judge(reward, texts) == [1.0, 2.0, 3.0, 4.0, 5.0]
        pids = reward.pids
        assert judge(reward, texts[::-1]) == [5.0, 4.0, 3.0, 2.0, 1.0]
        assert reward.pids == pids  # the same processes for all batches
        assert judge(reward, []) == []
    assert wait_until_gone(list(pids)) == []
    with pooled(judges.Scaled(0.5), workers=1, chunk_size=8) as reward:
        assert judge(reward, texts) == [0.5, 1.0, 1.5, 2.0, 2.5]
    with pooled("tests.rewards.judges:in_turn", workers=1, chunk_size=8) as reward:
        assert judge(reward, texts) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_work_is_spread_and_only_requested_columns_are_sent() -> None:
    with pooled(judges.process_ids, workers=2) as reward:
        reward.start()
        assert {int(pid) for pid in judge(reward, ["a"] * 6) if isinstance(pid, float)} == set(reward.pids)
        assert os.getpid() not in reward.pids
    with pooled(judges.wants_gold, workers=1) as reward:
        functions = RewardFunctions(reward)
        with pytest.raises(RewardError, match=r"'wants_gold' needs the columns \['gold'\], the data has \['prompt'\]"):
            functions.check_columns(["prompt"])
        columns = {"gold": ["4", "5"], "other": [1, 2]}
        assert functions(["2+2="] * 2, ["4", "4"], [[1], [2]], columns).total.tolist() == [1.0, 0.0]
        functions.close()
        assert reward.pids == ()


def test_a_forked_process_that_ends_leaves_the_workers_alone() -> None:
    with pooled(workers=2) as reward:
        reward.start()
        before = reward.pids
        forked = get_context("fork").Process(target=reward.close)
        forked.start()
        forked.join()
        assert judge(reward, ["a", "bb"]) == [1.0, 2.0]
        assert reward.pids == before


def test_a_call_that_hangs_or_crashes_fails_alone_and_its_worker_is_replaced() -> None:
    with pooled(workers=2, deadline_s=3.0, on_failure="mask") as reward:
        reward.start()
        before = reward.pids
        began = time.monotonic()
        outcomes = judge(reward, ["hang", "a", "crash", "bb", "exit", "raise", "ccc"])
        assert time.monotonic() - began < 30
        assert [outcome for outcome in outcomes if not isinstance(outcome, Failed)] == [1.0, 2.0, 3.0]
        reasons = [outcome.reason for outcome in outcomes if isinstance(outcome, Failed)]
        assert reasons[:3] == [
            "no answer within deadline_s=3 seconds",
            "its process ended with SIGSEGV",
            "its process ended with exit code 3",
        ]
        assert "raised ValueError in judges.py" in reasons[3] and "no such answer" in reasons[3]
        assert wait_until_gone(list(before)) == []  # one hung, the other crashed
        assert judge(reward, ["dddd"]) == [4.0]


def test_a_failure_ends_the_run_by_default_and_leaves_no_process() -> None:
    with pooled(workers=1, deadline_s=1.0) as reward:
        reward.start()
        pids = list(reward.pids)
        rule = (
            r"obedient: 1 of 2 completions could not be judged; no answer within deadline_s=1 seconds; set on_failure="
        )
        with pytest.raises(RewardError, match=rule):
            judge(reward, ["a", "hang"])
        assert reward.pids == () and wait_until_gone(pids) == []


def test_a_run_that_ends_does_not_wait_for_the_other_completions() -> None:
    with pooled(workers=1, deadline_s=1.0) as reward:
        reward.start()
        began = time.monotonic()
        with pytest.raises(RewardError, match="1 of 61 completions could not be judged"):
            judge(reward, ["raise"] + ["hang"] * 60)
        assert time.monotonic() - began < 10  # not one deadline for each of them


def test_masking_ends_after_several_batches_without_any_reward() -> None:
    with pooled(workers=1, on_failure="mask", give_up_after=2) as reward:
        assert all(isinstance(outcome, Failed) for outcome in judge(reward, ["raise", "raise"]))
        assert judge(reward, ["a", "raise"])[0] == 1.0  # the count starts again
        assert all(isinstance(outcome, Failed) for outcome in judge(reward, ["raise"]))
        with pytest.raises(RewardError, match=r"could be judged in 2 consecutive batches; .* resume, or raise"):
            judge(reward, ["raise"])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process may leave its group")
@pytest.mark.parametrize("completion", ["leave", "leave and hang"])
def test_children_and_daemons_end_with_their_worker(completion: str, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    with pooled(workers=1, deadline_s=3.0, on_failure="mask") as reward:
        outcomes = judge(reward, [completion], note=[str(note)])
        left = [int(pid) for pid in note.read_text().split()]
        assert len(left) == 2
        if completion == "leave":
            assert outcomes == [5.0]
            assert all(judges.alive(pid) for pid in left)
            reward.close()
        assert wait_until_gone(left) == []


def test_a_worker_that_ended_between_batches_is_replaced() -> None:
    with pooled(workers=1) as reward:
        reward.start()
        (pid,) = reward.pids
        os.kill(pid, signal.SIGKILL)
        assert wait_until_gone([pid]) == []
        assert judge(reward, ["abc"]) == [3.0]


@pytest.mark.parametrize(
    ("function", "options", "rule"),
    [
        (lambda **columns: [], {}, "must be importable by its name, at the top of a module"),
        (judges.obedient, {"workers": 0}, "workers=0 must be at least 1"),
        (judges.obedient, {"chunk_size": 0}, "chunk_size=0 must be at least 1"),
        (judges.obedient, {"deadline_s": 0.0}, "deadline_s=0.0 must be above 0"),
        (judges.obedient, {"deadline_s": math.nan}, "deadline_s=nan must be above 0"),
        (judges.obedient, {"on_failure": "skip"}, "on_failure='skip' must be one of fail, mask"),
        (judges.obedient, {"give_up_after": 0}, "give_up_after=0 batches must be at least 1"),
        ("no.such:function", {}, "cannot be imported"),
    ],
)
def test_settings_that_cannot_work_are_refused(function: Any, options: dict[str, Any], rule: str) -> None:
    with pytest.raises(RewardError, match=rule):
        PooledReward(function, **options)


def test_a_function_that_cannot_be_unpickled_ends_the_start() -> None:
    with (
        pooled(judges.Unloadable()) as reward,
        pytest.raises(
            RewardError, match=r"could not load its reward function: ImportError: libjudge.so is missing; it"
        ),
    ):
        RewardFunctions(reward).start()
    assert reward.pids == ()


SCRIPT = """
import sys
from lightning_realloc.rewards import PooledReward

def length(completions, **columns):
    return [float(len(text)) for text in completions]

if __name__ == "__main__":
    reward = PooledReward(length, workers=2)
    print(reward(prompts=["?"] * 3, completions=["a", "bb", "ccc"], completion_ids=[[1]] * 3))
    print(*reward.pids, flush=True)
    if sys.argv[1:] == ["wait"]:
        sys.stdin.read()
"""


def test_functions_of_a_script_are_found_and_their_processes_end_with_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    said, pids = finished.stdout.splitlines()
    assert said == "[1.0, 2.0, 3.0]"
    assert len(pids.split()) == 2 and wait_until_gone([int(pid) for pid in pids.split()]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells a process of its parent's end")
def test_worker_processes_end_when_the_run_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py", "wait"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2 and wait_until_gone(pids) == []
