"""Run tests on a copy of the repository that has one fault, and end all processes that they leave."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source
from pathlib import Path

from tests.seeded_faults.faults import ROOT, Fault, FaultError

TEST_TIMEOUT_S = 120
"""Seconds of one test, at most: a fault may keep ranks waiting."""
DEADLINE_S = 1800.0
"""Seconds of one run of test files, at most. A fault whose tests do not end is not caught."""
WHOLE_DEADLINE_S = 7200.0
"""The same for the whole suite."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)
_PASSED, _TESTS_FAILED, _NO_TESTS = 0, 1, 5
"""Exit codes of pytest."""


class FaultyCopy:
    """A copy of the repository's files for one fault at a time, whose tests run on the package in the copy.

    Args:
        folder: New folder for the copy. Its path is in the environment of all processes that the tests start, which
            are killed after every run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fault = "no fault"
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():  # else it was deleted since the last commit
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)

    @contextmanager
    def having(self, fault: Fault) -> Iterator[None]:
        """Context manager in which the copy has a fault. Raises FaultError if it does not fit the file."""
        file = self.folder / fault.file
        before = file.read_text()
        self._fault = fault.name
        try:
            _write(file, fault.put_into(before))
            yield
        finally:
            _write(file, before)
            self._fault = "no fault"

    def first_failure(self, files: Sequence[str], *, with_all: bool, passing: Sequence[str] = ()) -> str | None:
        """Return the first test that fails; None if all pass, or do not end in time.

        Args:
            files: Test files or tests; () runs the whole suite, as `make test` does.
            with_all: Whether to run exhaustive tests, too, as `make test-all` does.
            passing: Tests to leave out.

        Raises:
            FaultError: if the tests cannot be collected.
        """
        options = [f"--timeout={TEST_TIMEOUT_S}"] if files else ["-n2", "--dist=loadfile", "--no-loadscope-reorder"]
        options += ["--all"] if with_all else []
        options += [f"--deselect={test}" for test in passing]
        code, output = self._pytest([*options, *files], DEADLINE_S if files else WHOLE_DEADLINE_S)
        if code in (_PASSED, _NO_TESTS, None):
            return None
        failed = _FAILED.search(output)
        if code != _TESTS_FAILED or failed is None:
            raise FaultError(f"with {self._fault}, pytest ended with exit code {code}:\n{output[-2000:]}")
        return failed[1]

    def _pytest(self, options: Sequence[str], deadline_s: float) -> tuple[int | None, str]:
        """Return pytest's exit code, None after the deadline, and its output."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *options]
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        variables |= {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        # Into a file: a process that outlives pytest would keep a pipe open.
        with (self.folder / "pytest.log").open("w+") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=variables, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code: int | None = process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                kill_processes(self.folder)
                process.wait()
            log.seek(0)
            return code, log.read()


def kill_processes(folder: Path) -> None:
    """Kill all processes that have the folder's path in the environment that they were started with."""
    path = os.fsencode(folder)
    while processes := [pid for pid, variables in _environments() if path in variables]:
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _environments() -> Iterator[tuple[int, bytes]]:
    """Yield the id and the variables of every other process of this user; zombies have none."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if (pid := int(file.parent.name)) != os.getpid():
                yield pid, file.read_bytes()


def _write(file: Path, text: str) -> None:
    """Write a module, and remove its bytecode: two texts of one size in the same second would have the same one."""
    file.write_text(text)
    Path(cache_from_source(str(file))).unlink(missing_ok=True)
