"""Every fault fits the package as it is; the trial counts what caught it, and leaves no processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seeded_faults.__main__ import Outcome, conclude
from tests.seeded_faults.faults import ROOT, Fault, FaultError, load_faults
from tests.seeded_faults.runs import kill_processes

FAULTS = load_faults()


def test_fifty_faults_lie_in_all_packages_that_train() -> None:
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) == 50
    assert {fault.file.split("/")[1] for fault in FAULTS} == {
        "algorithms", "batch", "callbacks", "data", "environments", "generation", "layout", "realloc", "rewards",
        "runtime", "strategies", "tuning",
    }  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place_and_leaves_a_module(fault: Fault) -> None:
    before = (ROOT / fault.file).read_text()
    after = fault.put_into(before)
    assert after != before
    compile(after, fault.file, "exec")
    assert all((ROOT / file).is_file() for file in fault.tests)


@pytest.mark.parametrize("text", ["no such line", "old old"])
def test_a_fault_whose_text_does_not_occur_once_is_named(text: str) -> None:
    fault = Fault("a-fault", "a.py", "old", "new", "", ())
    with pytest.raises(FaultError, match=r"the old text of a-fault occurs [02] times in a\.py"):
        fault.put_into(text)


@pytest.mark.parametrize(
    ("num_soon", "num_later", "code", "counts"),
    [(45, 5, 0, ("45/50", "50/50")), (44, 6, 1, ("44/50", "50/50")), (49, 0, 1, ("49/50", "49/50"))],
)
def test_the_trial_needs_nine_in_ten_from_make_test_and_all_from_test_all(
    num_soon: int, num_later: int, code: int, counts: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    caught = [Outcome(fault, "t.py::t", index >= num_soon, 1.0) for index, fault in enumerate(FAULTS)]
    survivors = [Outcome(fault, None, False, 1.0) for fault in FAULTS[num_soon + num_later :]]
    assert conclude([*caught[: num_soon + num_later], *survivors], 60.0) == code
    *named, soon, all_ = capsys.readouterr().out.splitlines()
    assert f"make test: {counts[0]}" in soon and f"make test-all: {counts[1]}" in all_
    assert [line.split()[1] for line in named] == [outcome.fault.name for outcome in survivors]


def test_processes_that_were_started_for_a_folder_are_killed(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    ours, other = (
        subprocess.Popen(
            sleep,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            start_new_session=path == str(tmp_path),
        )
        for path in (str(tmp_path), "elsewhere")
    )
    try:
        for process in (ours, other):
            assert process.stdout is not None and process.stdout.readline(), "its variables can be read from now on"
        kill_processes(tmp_path)
        assert ours.wait(10) == -signal.SIGKILL and other.poll() is None
    finally:
        ours.kill()
        other.kill()
        other.wait()
