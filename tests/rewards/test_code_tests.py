"""CodeTests rewards programs for the tests that they pass."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards import CodeTests, RewardFunctions
from lightning_realloc.rewards.program_tests import OutputTest, program_tests
from lightning_realloc.rewards.sandbox.surroundings import closed_to_nobody
from lightning_realloc.rewards.texts import extract_code

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
        ("```cpp\nint x;\n```\nor\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nOutput:\n```\n3\n```", "x = 1\n"),
        ("```bash\npip install x\n```\n```\nx = 1\n```\n```json\n{}\n```", "x = 1\n"),
        ("1. So:\n   ```python\n   if x:\n       y\n\n   ```", "if x:\n    y\n\n"),
        ("\t~~~ Python3\n\tx = 1\ny\n\t~~~~", "x = 1\ny\n"),
        ('```python title="a.py"\r\nx = 1\r\ny = 2\r\n```\r\nDone.', "x = 1\ny = 2\n"),
        ("```{.python .numberLines}\nx = 1\n```", "x = 1\n"),
        ('````python\nx = """\n```\n"""\n````', 'x = """\n```\n"""\n'),
        ("    if x:\n        y", "if x:\n    y"),
    ],
)
def test_the_code_is_the_last_block_of_python(text: str, code: str) -> None:
    assert extract_code(text) == code


def test_blocks_are_found_in_linear_time() -> None:
    began = time.process_time()
    assert extract_code("```" + " " * 100_000 + "`\n```py" + " " * 100_000 + "x\nx = 1\n```") == "x = 1\n"
    assert time.process_time() - began < 5  # a quadratic search takes minutes


def test_programs_run_as_python_runs_them() -> None:
    code = """
from __future__ import annotations
import atexit, io, pickle, sys
from dataclasses import dataclass
from typing import ClassVar

@dataclass
class Point:
    x: int
    names: ClassVar[list[str]] = []

atexit.register(print, "goodbye")
same = wanted = 3
def moved(point): return Point(point.x + wanted)
sys.stdout = io.StringIO()
"""
    tests = [
        "assert moved(Point(1)) == Point(4)",
        "assert pickle.loads(pickle.dumps(Point(1))) == Point(1)",
        "import inspect, solution; assert solution.Point is Point and 'x: int' in inspect.getsource(Point)",
        "assert __name__ == 'solution' and moved(Point(1)).x == 5",
    ]
    assert judge([code], [tests], score="share") == [0.75]


def test_functions_are_called_with_arguments() -> None:
    function = "same = 1\ndef add(a, b): a.append(same); return (a[0] + b, a[-1] / 3)\n"
    method = "class Solution:\n    def add(self, a, b): return a + b\n"
    nothing = "def add(a, b): return None"
    cases = {"fn_name": "add", "inputs": [[[1], 2], [[2], 2]], "outputs": [[3, 0.3333333], [5, 0.3333333]]}
    assert judge([function, nothing], [cases, cases], score="share") == [0.5, 0.0]
    assert judge([function], [json.dumps(cases)], score="share") == [0.5]
    one = {"fn_name": "add", "input": [1, 2], "output": 3, "inputs": None}
    listed = {"fn_name": "add", "input": [[1, 2], [3, 4]], "output": [3, 7]}
    assert judge([method] * 2, [[one, one | {"output": [3]}, listed], one | {"output": 4}]) == [1.0, 0.0]
    assert judge([nothing, method], [one | {"output": None}] * 2) == [1.0, 0.0]


def test_programs_are_run_on_lists_of_inputs() -> None:
    code = "print(int(input()) + 1)\nprint(0.1 + 0.2, 2e-9)"
    cases = {"inputs": ["1\n", "2", ["3"]], "outputs": ["2\n0.3 0.0", ["4", "0.3 0.0"], "4\n0.30 0.0"], "fn_name": None}
    assert judge([code], [cases], score="share") == [pytest.approx(2 / 3)]
    assert judge([code], [[{"input": ["1", "1"], "output": ["2\n0.3 0.", "3\n0.3 0."]}]], score="share") == [0.5]


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        ("0.333333", "0.333333333333", True),
        ("x = 0.33", "x = 0.333333333333", False),
        ("1000000.1 \n", "1000000.0", True),
        ("1000002.1", "1000000.0", False),
        ("2", "2.0", True),
        ("2.0", "2", False),
        ("1000000007", "1000000008", False),
        ("1e-7", "0.0", True),
        ("0.5 a", "0.5 b", False),
        ("0.5\n1", "0.5", False),
        ("0.5 1.0", "0.5", False),
        ("yes 1.5e3", "yes 1500.0", True),
        ("nan", "0.0", False),
        ("", "", True),
    ],
)
def test_outputs_may_round_numbers_with_a_decimal_point(found: str, expected: str, is_same: bool) -> None:
    assert OutputTest("", expected).accepts(found) is is_same


def test_texts_of_lists_are_tests_and_not_programs() -> None:
    checks = ["assert x == 1", "assert x == 2"]
    for text in (json.dumps(checks), repr(checks)):
        assert program_tests(text, "tests") == tuple(checks)
    assert program_tests('[{"input": null, "output": 3}]', "tests") == (OutputTest("", "3"),)
    for text in ("[x] == [1] or exit(1)", "{[1]: 2}", "[{}, {[]}]", "[" * 100_000, "[" + "-" * 100_000 + "1]"):
        assert program_tests(text, "tests") == (text,)


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
    assert len(caplog.records) <= 1 + (os.getuid() == 0)  # of systems without namespaces, and of root
    with pytest.raises(RewardError, match=r"CodeTests cannot run /no/python within .* another interpreter"):
        CodeTests(interpreter="/no/python").start()
    with pytest.raises(RewardError, match=r"(?s)CodeTests cannot run .*raise the limits"):
        CodeTests(memory_bytes=2**20).start()


@pytest.mark.skipif(os.getuid() != 0, reason="is about programs of root")
def test_start_says_which_file_lets_programs_keep_the_rights_of_root(caplog: pytest.LogCaptureFixture) -> None:
    public = "/usr/bin/python3"
    if closed_to_nobody([public], "/tmp/any") is not None:
        pytest.skip("this system lets only root read its Python")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # only root reads it
        private = Path(name) / "python"
        private.write_text(f'#!/bin/sh\nexec {public} "$@"\n')
        private.chmod(0o700)
        for interpreter in (public, str(private)):
            caplog.clear()
            CodeTests(interpreter=interpreter).start()
            said = [record.getMessage() for record in caplog.records if "rights of root" in record.getMessage()]
            assert said == [] if interpreter == public else f"since the user nobody cannot read {name};" in said[0]


@pytest.mark.parametrize(
    ("options", "tests", "rule"),
    [
        ({"score": "some"}, [], "score='some' must be one of all, share"),
        ({"wall_s": 0.0}, [], "wall_s=0.0 must be above 0"),
        ({"workers": 0}, [], "workers=0 must be above 0"),
        ({}, [[]], "column 'tests' needs at least one test for every prompt"),
        ({}, [[3]], "must be Python, or a mapping with 'input' and 'output'; it is 3"),
        ({}, [3], "must be Python, or a mapping with 'input' and 'output'; it is 3"),
        ({}, [{"input": "3"}], "must be Python, or a mapping"),
        ({}, [{"input": "3", "output": None}], "must be Python, or a mapping"),
        ({}, [{"inputs": ["3"], "outputs": []}], "lists 'inputs' and 'outputs' must have equal length"),
        ({}, [{"inputs": [], "outputs": []}], "needs at least one test"),
        ({}, [{"fn_name": "f", "input": 3, "output": 4}], "with 'fn_name' an input is a list of arguments"),
        ({}, ["[1, 2]"], "must be Python, or a mapping with 'input' and 'output'; it is 1;"),
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
