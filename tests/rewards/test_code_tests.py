"""CodeTests rewards programs for the tests that they pass."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards import CodeTests, RewardFunctions
from lightning_realloc.rewards.code_tests import extract_code

SQUARE = "def square(x):\n    return x * x\n"
TESTS = ["assert square(2) == 4", "assert square(3) == 9"]


def judge(completions: list[str], tests: list[Any], **options: Any) -> list[float | None]:
    return CodeTests(**{"wall_s": 20.0} | options)([""] * len(completions), completions, tests=tests)


def test_programs_that_pass_are_rewarded() -> None:
    wrong, half = SQUARE.replace("x * x", "x + 1"), SQUARE.replace("x * x", "x + 2")
    codes = [SQUARE, wrong, half, "def square(x:", ""]
    assert judge(codes, [TESTS] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert judge(codes, [TESTS] * 5, score="share") == [1.0, 0.0, 0.5, 0.0, 0.0]
    assert judge([SQUARE, SQUARE], [TESTS[0], None]) == [1.0, None]


def test_programs_that_read_and_write_are_compared_by_their_output() -> None:
    code = "import sys\na, b = map(int, input().split())\nprint(a + b, ' ')\nprint('note', file=sys.stderr)\n"
    cases = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2\n", "output": "5"}]
    assert judge([code], [cases], score="share") == [0.5]
    assert judge(["print(7)"], [{"output": "7"}]) == [1.0]
    assert judge(["print(7)\nraise SystemExit(1)"], [{"output": "7"}]) == [0.0]


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import sys; sys.exit()",
        "import atexit, os; atexit.register(os._exit, 0)\ndef square(x): return 0",
    ],
)
def test_exiting_early_fails_the_tests(code: str) -> None:
    assert judge([code], [TESTS]) == [0.0]


def test_programs_over_limits_earn_nothing_and_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests use the real folder at the same time
    codes = ["x = bytearray(2**31)", "while True: print('x' * 9999)", SQUARE]
    assert judge(codes, [TESTS[0]] * 3) == [0.0, 0.0, 1.0]
    assert judge(["while True: pass"], [TESTS[0]], wall_s=1.0) == [0.0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nand", "x = 1\n"),
        ("```py\nx = 1\n```\nno:\n```Python\nx = 2\n```", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = '''```'''\n```", "x = '''```'''\n"),
        ("```text\nhello\n```\nx", "```text\nhello\n```\nx"),
        ("```python\nx = 1", "```python\nx = 1"),
    ],
)
def test_the_code_is_the_last_block_of_python(text: str, code: str) -> None:
    assert extract_code(text) == code


def test_conversations_are_rewarded_too() -> None:
    functions = RewardFunctions(CodeTests(column="checks"))
    with pytest.raises(RewardError, match=r"'CodeTests' needs the columns \['checks'\]"):
        functions.check_columns(["tests"])
    functions.start()
    prompts = [[{"role": "user", "content": "Square?"}]]
    assert functions(prompts, [f"```python\n{SQUARE}```"], [[1]], {"checks": [TESTS]}).total.tolist() == [1.0]


def test_start_reports_causes_that_would_fail_every_test(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        CodeTests().start()
    assert len(caplog.records) <= 1  # on systems without namespaces
    with pytest.raises(RewardError, match=r"CodeTests cannot run /no/python within .* another interpreter"):
        CodeTests(interpreter="/no/python").start()
    with pytest.raises(RewardError, match=r"(?s)CodeTests cannot run .*raise the limits"):
        CodeTests(memory_bytes=2**20).start()


@pytest.mark.parametrize(
    ("options", "tests", "rule"),
    [
        ({"score": "some"}, [], "score='some' must be one of 'all', 'share'"),
        ({"wall_s": 0.0}, [], "wall_s=0.0 must be above 0"),
        ({"workers": 0}, [], "workers=0 must be above 0"),
        ({}, [[]], "column 'tests' needs at least one test for every prompt"),
        ({}, [[3]], "must be Python, or a mapping with 'input' and 'output'; it is 3"),
        ({}, [3], "must be Python, or a mapping with 'input' and 'output'; it is 3"),
        ({}, [{"input": "3"}], "must be Python, or a mapping"),
    ],
)
def test_invalid_options_and_tests_are_refused(options: dict[str, Any], tests: list[Any], rule: str) -> None:
    with pytest.raises(RewardError, match=rule):
        CodeTests(**options)([""] * len(tests), [""] * len(tests), tests=tests)


def test_another_python_may_run_the_tests() -> None:
    assert judge(["import sys\nseen = sys.executable"], [f"assert seen == {sys.executable!r}"]) == [1.0]
    assert judge([SQUARE], [TESTS], interpreter="/no/python") == [0.0]


def test_a_sandbox_of_the_system_runs_the_interpreter_in_the_folder(tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text('#!/bin/sh\ntouch "$1/wrapped"\nshift\nexec "$@"\n')
    wrapper.chmod(0o755)
    reward = CodeTests(sandbox=(str(wrapper), "{folder}"))
    test = "import os; assert os.path.exists('wrapped')"
    assert reward(["?"], ["answer = 4"], tests=[test]) == [1.0]


def test_a_sandbox_that_cannot_run_is_refused() -> None:
    with pytest.raises(RewardError, match=r"sandbox='bwrap --ro' must be a list of arguments: \('bwrap', '--ro'\)"):
        CodeTests(sandbox="bwrap --ro")
    with pytest.raises(
        RewardError, match=r"cannot run no-such-jail .*FileNotFoundError.* another interpreter or sandbox"
    ):
        CodeTests(sandbox=("no-such-jail",)).start()
