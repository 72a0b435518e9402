"""Reward for generated programs: run the prompt's tests in a sandbox."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

from lightning_realloc.errors import RewardError, require_choice
from lightning_realloc.rewards.program_tests import OutputTest, program_tests
from lightning_realloc.rewards.sandbox.python_programs import PythonPrograms
from lightning_realloc.rewards.sandbox.supervisor import Limits, ProgramResult
from lightning_realloc.rewards.texts import completion_texts, extract_code

Score = Literal["all", "share"]

# The program is a module, as dataclasses and pickles need it. The token is random and written last, so a program that
# exits early cannot pass; it goes to a descriptor of its own, since programs and tests may replace sys.stdout.
_HARNESS = """
import json, os, sys, types
given = json.loads(sys.stdin.readline())
output = os.dup(1)
sys.path.insert(0, os.getcwd())
solution = sys.modules["solution"] = types.ModuleType("solution")
solution.__file__ = os.path.abspath("solution.py")
exec(compile(open(solution.__file__, "rb").read(), solution.__file__, "exec"), solution.__dict__)
exec(compile(given["test"], "test.py", "exec"), solution.__dict__)
os.write(output, ("\\n" + given["token"]).encode())
"""


class CodeTests:
    """Reward for Python code that passes its prompt's tests.

    The code is the last block of a completion that is marked as Python, or else the last one without a language, or
    the whole text. The column ``tests`` holds one test or a list of them for every prompt; None where the reward does
    not apply. A test is one of:

    - Python text that runs after the code and sees its names, such as ``assert solve(2) == 4``.
    - ``{"input": ..., "output": ...}``: standard input, and the expected standard output. White space at the end of
      lines, and an error of 1e-6 in numbers with a decimal point, do not count.
    - ``{"fn_name": ..., "input": [...], "output": ...}``: a function's arguments and its result.
    - The same with lists ``inputs`` and ``outputs``, as in APPS, also as JSON: a test for each pair.

    All processes of a program end with its test. A program gets none of this process's environment variables, but it
    can read and write files with this user's rights; a program of root has those of the user ``nobody``, if that user
    can read the interpreter. Tests share a process with the tested code: they detect mistakes, not deliberate cheating.

    Args:
        column: Column of the data that holds the tests.
        score: ``"all"``: 1 if all tests pass; ``"share"``: the fraction that passes.
        wall_s: Seconds for each test.
        cpu_s: Seconds of CPU time for each process.
        memory_bytes: Address space of each process.
        file_bytes: Size of each written file.
        processes: Number of concurrent processes per program; in namespaces, threads count as well.
        output_bytes: Size of standard output and error together.
        workers: Number of programs that run at once, on every rank that computes rewards.
        interpreter: Path of the Python interpreter; by default the current one.
        sandbox: Command that runs the interpreter in a sandbox of the system; ``{folder}`` in it is replaced by the
            program's folder: ``("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--bind", "{folder}", "{folder}")``.
            Its processes count towards the limits. It reaches no Unix sockets, and so no daemon such as Docker's.

    Example:
        >>> reward = CodeTests(score="share")
        >>> reward(["Double x."], ["def f(x): return 2 * x"], tests=[["assert f(2) == 4", "assert f(2) == 5"]])
        [0.5]
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
        sandbox: Sequence[str] = (),
    ) -> None:
        require_choice("score", score, get_args(Score), RewardError)
        numbers = {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "memory_bytes": memory_bytes,
            "file_bytes": file_bytes,
            "processes": processes,
            "output_bytes": output_bytes,
            "workers": workers,
        }
        for name, number in numbers.items():
            if not number > 0:
                raise RewardError(f"{name}={number} must be above 0")
        self.column = column
        self.score = score
        self.workers = workers
        limits = Limits(wall_s, cpu_s, memory_bytes, file_bytes, processes, output_bytes)
        self._programs = PythonPrograms(limits, interpreter=interpreter, sandbox=sandbox)

    skips_missing = True

    def required_columns(self) -> set[str]:
        """Return the column of the tests."""
        return {self.column}

    def start(self) -> None:
        """Check that programs can run, and log a warning of rights and network that they share with this run.

        Raises:
            RewardError: if the simplest program fails.
        """
        self._programs.report_start(self._run_test("answer = 4", "assert answer == 4")[1], "CodeTests")

    def __call__(
        self, /, prompts: Sequence[object], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | None]:
        """Return the rewards of B completions.

        Raises:
            RewardError: for tests in another form.
        """
        given = [program_tests(tests, self.column) for tests in columns[self.column]]
        codes = [extract_code(text) for text in completion_texts(completions)]
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

    def _run_test(self, code: str, test: str | OutputTest) -> tuple[bool, ProgramResult]:
        if isinstance(test, str):
            token = secrets.token_hex(16)
            given = json.dumps({"test": test, "token": token}) + "\n"
            result = self._programs.run(code, "-c", _HARNESS, standard_input=given)
            return result.exit_code == 0 and token in result.output, result
        result = self._programs.run(code, standard_input=test.given, with_errors=False)
        return result.exit_code == 0 and test.accepts(result.output), result
