"""Does the program that the model wrote do what it should? It is run, under limits."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.sandbox.sandbox import run_limited
from lightning_realloc.rewards.sandbox.supervisor import Ending, Limits
from lightning_realloc.rewards.texts import completion_texts, shortened

log = logging.getLogger(__name__)

Score = Literal["all", "share"]
Test = str | Mapping[str, Any]

_FENCED = re.compile(
    r"^[ \t]*```(?:python|py|python3)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE
)

# What says that all went well comes last, and cannot be known before: a program that ends early has not passed.
_HARNESS = """
import json, sys
given = json.loads(sys.stdin.readline())
names = {"__name__": "solution"}
exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"), names)
exec(compile(given["test"], "test.py", "exec"), names)
sys.stdout.write("\\n" + given["token"])
sys.stdout.flush()
"""


class CodeTests:
    """Runs the Python that a completion holds, with the tests of its prompt, and rewards what passes.

    The code is the last fenced block, or the whole text. A test is a text of Python that runs after it, with its names
    (``assert solve(2) == 4``), or ``{"input": ..., "output": ...}``, what the program reads and has to write. The
    column holds one test or a list of them for every prompt; None where the reward does not apply.

    Nothing of a program runs on after its test, and it gets none of this process's environment. It can read and write
    files as this user can. Tests share the process with the code that they test: they find mistakes, not malice.

    Args:
        column: Which column of the data holds the tests.
        score: ``"all"``: 1 where all tests pass; ``"share"``: the share that passes.
        wall_s: Seconds for each test.
        cpu_s: Seconds of processor time, of each process.
        memory_bytes: Address space of each process.
        file_bytes: Size of each file that is written.
        processes: Processes at a time, where namespaces can be made threads, too.
        output_bytes: What may be written to standard output and error.
        workers: Programs at a time, on every rank that judges.
        interpreter: The Python that runs them; this one by default.
    """

    def __init__(
        self,
        *,
        column: str = "tests",
        score: Score = "all",
        wall_s: float = 10.0,
        cpu_s: int = 10,
        memory_bytes: int = 2**30,
        file_bytes: int = 2**24,
        processes: int = 8,
        output_bytes: int = 2**16,
        workers: int = 2,
        interpreter: str | None = None,
    ) -> None:
        if score not in get_args(Score):
            raise RewardError(f"score={score!r} must be one of {', '.join(map(repr, get_args(Score)))}")
        numbers = {"wall_s": wall_s, "cpu_s": cpu_s, "memory_bytes": memory_bytes, "file_bytes": file_bytes,
                   "processes": processes, "output_bytes": output_bytes, "workers": workers}  # fmt: skip
        for name, number in numbers.items():
            if not number > 0:
                raise RewardError(f"{name}={number} must be above 0")
        self.column = column
        self.score = score
        self.limits = Limits(wall_s, cpu_s, memory_bytes, file_bytes, processes, output_bytes)
        self.workers = workers
        self.interpreter = interpreter or sys.executable

    def required_columns(self) -> set[str]:
        """Return the column of the tests."""
        return {self.column}

    def start(self) -> None:
        """Make sure that programs can be run here, and say so where nothing keeps them off the network.

        Raises:
            RewardError: when even the simplest one cannot.
        """
        ending = self._run_test("answer = 4", "assert answer == 4")[1]
        if not _passed(ending):
            said = ending.reason or ending.output[-300:]
            raise RewardError(
                f"CodeTests cannot run {self.interpreter} within {self.limits}: {said}; raise the limits, or give "
                f"another interpreter"
            )
        if not ending.isolated:
            log.warning("this system lets nobody make namespaces: the code that CodeTests runs can use the network")

    def __call__(
        self, /, prompts: Sequence[object], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | None]:
        """Return what the programs in B completions earn.

        Raises:
            RewardError: for tests of another form.
        """
        given = [_as_tests(tests, self.column) for tests in columns[self.column]]
        codes = [code_of(text) for text in completion_texts(completions)]
        pairs = [(row, test) for row, tests in enumerate(given) for test in tests or ()]
        with ThreadPoolExecutor(self.workers) as executor:
            try:
                passed = list(executor.map(lambda pair: self._run_test(codes[pair[0]], pair[1])[0], pairs))
            except BaseException:
                executor.shutdown(cancel_futures=True)
                raise
        by_row: list[list[bool]] = [[] for _ in given]
        for (row, _), did in zip(pairs, passed, strict=True):
            by_row[row].append(did)
        return [None if tests is None else self._reward(did) for tests, did in zip(given, by_row, strict=True)]

    def _reward(self, passed: Sequence[bool]) -> float:
        return float(all(passed)) if self.score == "all" else sum(passed) / len(passed)

    def _run_test(self, code: str, test: Test) -> tuple[bool, Ending]:
        with tempfile.TemporaryDirectory(prefix="code_tests_", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / "solution.py").write_text(code, encoding="utf-8", errors="replace")
            if isinstance(test, str):
                token = secrets.token_hex(16)
                ending = run_limited(
                    [self.interpreter, "-I", "-B", "-c", _HARNESS],
                    folder=folder,
                    limits=self.limits,
                    standard_input=json.dumps({"test": test, "token": token}) + "\n",
                )
                return _passed(ending) and ending.output.endswith(token), ending
            ending = run_limited(
                [self.interpreter, "-I", "-B", "solution.py"],
                folder=folder,
                limits=self.limits,
                standard_input=str(test.get("input", "")),
                with_errors=False,
            )
            return _passed(ending) and _lines(ending.output) == _lines(str(test["output"])), ending


def code_of(text: str) -> str:
    """Return the last fenced block of Python in a text, the whole text where there is none."""
    blocks: list[str] = _FENCED.findall(text)
    return blocks[-1] if blocks else text


def _passed(ending: Ending) -> bool:
    return ending.exit_code == 0


def _lines(output: str) -> list[str]:
    """Return what counts of an output: not the white space at the ends of its lines and at its own end."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def _as_tests(tests: Any, column: str) -> tuple[Test, ...] | None:
    if tests is None:
        return None
    listed = tuple(tests) if isinstance(tests, Iterable) and not isinstance(tests, str | Mapping) else (tests,)
    for test in listed:
        if not isinstance(test, str) and not (isinstance(test, Mapping) and "output" in test):
            raise RewardError(
                f"a test in column {column!r} must be Python, or a mapping with 'input' and 'output'; it is "
                f"{shortened(test)}"
            )
    if not listed:
        raise RewardError(f"column {column!r} needs a test or more for every prompt; put None where there are none")
    return listed
