"""The tool python runs programs in the sandbox of rewards, or in another one that starts and closes once."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
from typing import Any

import pytest

from lightning_realloc.environments import ToolEnvironment
from lightning_realloc.environments.python_tool import LocalSandbox, ProgramOutput, python, python_tool
from lightning_realloc.errors import ConfigError, RewardError
from tests.environments.some_tools import call, turn


def answers(tool: Any, *codes: str) -> list[str]:
    calls = [call("python", {"code": code}, number) for number, code in enumerate(codes)]
    result = asyncio.run(ToolEnvironment([tool]).step(turn(*calls)))
    return [message["content"] for message in result.messages]


def test_programs_answer_with_output_errors_and_limits() -> None:
    printed, failed, silent, endless = answers(
        python_tool(timeout_s=1.0), "print(6 * 7)", "import os\n1 / 0", "x = 1", "print('on')\nwhile True: pass"
    )
    assert printed == "42\n"
    assert "ZeroDivisionError" in failed and 'File "solution.py", line 2' in failed  # no folder of random name
    assert silent == "[the program printed nothing]"
    assert endless.endswith("[the program was stopped: it took more than 1 seconds]")


def test_memory_is_bounded() -> None:
    (answer,) = answers(python_tool(memory_bytes=2**28), "x = bytearray(2**29)")
    assert "MemoryError" in answer


class Recorded:
    """A sandbox that records its calls, and answers with the code."""

    def __init__(self, failures: int = 0) -> None:
        self.calls: list[Any] = []
        self.failures = failures

    async def start(self) -> None:
        self.calls.append("start")
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise OSError("no containers")

    def run(self, code: str, timeout_s: float) -> Any:
        self.calls.append((code, timeout_s))
        return ProgramOutput(code) if code else 7

    def close(self) -> None:
        self.calls.append("close")


def test_another_sandbox_starts_once_and_closes_with_the_tool() -> None:
    sandbox = Recorded()
    tool = python_tool(timeout_s=3, sandbox=sandbox)
    assert sandbox.calls == []
    assert answers(tool, "a", "b") == ["a", "b"] and answers(tool, "c") == ["c"]
    assert sandbox.calls[0] == "start" and sorted(sandbox.calls[1:]) == [("a", 3), ("b", 3), ("c", 3)]
    shared = copy.deepcopy(ToolEnvironment([tool])).tools[0]
    assert shared.function.__self__ is tool.function.__self__  # type: ignore[attr-defined]
    del tool, shared
    gc.collect()
    assert sandbox.calls.count("close") == sandbox.calls.count("start") == 1


def test_a_sandbox_that_does_not_start_is_an_answer_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = Recorded(failures=1)
    tool = python_tool(sandbox=sandbox)
    assert answers(tool, "a", "b") == ['{"error": "OSError: no containers"}'] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "the sandbox of the tool python could not be started: OSError: no containers"
    ]
    assert answers(tool, "a") == ["a"]
    assert "Recorded.run must return ProgramOutput(text); it returned 7" in answers(tool, "")[0]


def test_the_tool_reaches_other_processes_and_yaml() -> None:
    assert pickle.loads(pickle.dumps(python_tool(memory_bytes=2**28))).name == "python"
    assert ToolEnvironment(["lightning_realloc.environments.python_tool:python"]).tools == (python,)
    described = python.schema["function"]
    assert "print every result" in described["description"] and described["parameters"]["required"] == ["code"]


class NoClose:
    def start(self) -> None: ...

    def run(self, code: str, timeout_s: float) -> None: ...


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"timeout_s": 0}, "timeout_s=0 must be a number of seconds above 0"),
        ({"timeout_s": float("inf")}, "timeout_s=inf must be"),
        ({"memory_bytes": 0.5}, "memory_bytes=0.5 must be a whole number of at least 1"),
        ({"sandbox": NoClose()}, r"must be an object with start\(\), run\(code, timeout_s\) and .*; it has no close"),
        ({"sandbox": Recorded(), "memory_bytes": 2**20}, "memory_bytes=1048576 bounds the default sandbox; give it to"),
        ({"sandbox": Recorded}, "it is a class, make an instance of it"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        python_tool(**settings)


def test_the_local_sandbox_reports_an_interpreter_that_cannot_run() -> None:
    with pytest.raises(RewardError, match=r"LocalSandbox cannot run /no/python within .* another interpreter"):
        LocalSandbox(interpreter="/no/python").start()
