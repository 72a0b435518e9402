"""Tool `python`: run the model's programs in a sandbox, and answer with the output.

A program runs alone, in a process and a folder of its own: neither variables nor files remain for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import weakref
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from lightning_realloc.environments.tools.tool import Tool
from lightning_realloc.errors import ConfigError, describe_error
from lightning_realloc.generation.loop.asking import call
from lightning_realloc.rewards.sandbox.python_programs import PythonPrograms
from lightning_realloc.rewards.sandbox.supervisor import Limits

_log = logging.getLogger(__name__)
DEFAULT_TIMEOUT_S = 5.0
DEFAULT_MEMORY_BYTES = 2**30
_MAX_CONCURRENT = 4
"""Programs of a rank that run at once by default; more of them take CPU time from training."""


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """What a program wrote, and how it ended."""

    text: str
    """Standard output and standard error, with the traceback where there is one."""
    stopped_because: str = ""
    """Limit for which it was stopped; empty if it ended by itself."""


class CodeSandbox(Protocol):
    """Place where the tool `python` runs programs. `run` may be called several times at once."""

    def start(self) -> Awaitable[None] | None:
        """Get ready; called once per process, before the first program."""

    def run(self, code: str, timeout_s: float) -> ProgramOutput | Awaitable[ProgramOutput]:
        """Run a program for at most ``timeout_s`` seconds."""

    def close(self) -> None:
        """Release everything; called once in a process that called `start`, when the tool or the process ends."""


class LocalSandbox:
    """Sandbox in processes of this machine, with the limits and the protection that `CodeTests` has.

    Args:
        memory_bytes: Address space of each process.
        max_concurrent: Number of programs that run at once; further ones wait, within the tool's deadline.
        interpreter: Path of the Python interpreter; None: the current one.
        sandbox: Command of the system that runs the interpreter, as that of `CodeTests`.
    """

    def __init__(
        self,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        *,
        max_concurrent: int = _MAX_CONCURRENT,
        interpreter: str | None = None,
        sandbox: Sequence[str] = (),
    ) -> None:
        for name, number in {"memory_bytes": memory_bytes, "max_concurrent": max_concurrent}.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"{name}={number!r} must be a whole number of at least 1")
        self._again = partial(
            LocalSandbox, memory_bytes, max_concurrent=max_concurrent, interpreter=interpreter, sandbox=tuple(sandbox)
        )
        limits = Limits(  # each program's wall time bounds its CPU time as well
            wall_s=DEFAULT_TIMEOUT_S,
            cpu_s=3600,
            memory_bytes=memory_bytes,
            file_bytes=2**24,
            processes=8,
            output_bytes=2**16,
        )
        self._programs = PythonPrograms(limits, interpreter=interpreter, sandbox=sandbox)
        self._may_run = threading.BoundedSemaphore(max_concurrent)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again, ()

    def start(self) -> None:
        """Check that programs can run.

        Raises:
            RewardError: if the simplest program fails.
        """
        self._programs.report_start(self._programs.run("answer = 4"), "LocalSandbox")

    def run(self, code: str, timeout_s: float) -> ProgramOutput:
        """Run a program; none of its processes remains on return."""
        with self._may_run:
            result = self._programs.run(code, wall_s=timeout_s)
        stopped = result.reason
        if not stopped and result.exit_code is not None and result.exit_code < 0:
            stopped = f"it was ended by signal {-result.exit_code}"
        return ProgramOutput(result.output, stopped)

    def close(self) -> None:
        """Do nothing: no process outlives its program."""


class _Interpreter:
    """State behind the tool: one sandbox for all samples of a process."""

    def __init__(self, sandbox: CodeSandbox, timeout_s: float) -> None:
        self._sandbox = sandbox
        self._timeout_s = timeout_s
        self._start: asyncio.Future[None] | None = None
        self._process = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Interpreter, (self._sandbox, self._timeout_s)

    def __deepcopy__(self, memo: object) -> _Interpreter:
        return self  # copies of an environment share the sandbox, which no program leaves anything in

    async def python(self, code: str) -> str:
        """Run a Python program.

        The answer is what the program prints, so print every result that you need.
        Nothing is kept from one program to the next.

        Args:
            code: The whole program, with its imports.

        Returns:
            Standard output and standard error.
        """
        await self._started()
        output = await call(self._sandbox.run, code, self._timeout_s)
        if not isinstance(output, ProgramOutput):
            name = type(self._sandbox).__name__
            raise ConfigError(f"{name}.run must return ProgramOutput(text); it returned {repr(output)[:60]}")
        if output.stopped_because:
            return f"{output.text}\n[the program was stopped: {output.stopped_because}]".lstrip("\n")
        return output.text or "[the program printed nothing]"

    async def _started(self) -> None:
        """Wait until the sandbox has started; after a failure the next call tries again."""
        if self._start is None or self._process != os.getpid():
            self._process = os.getpid()
            self._start = asyncio.ensure_future(self._start_sandbox())
        start = self._start
        try:
            await asyncio.shield(start)
        except Exception as error:
            if self._start is start:
                self._start = None
                _log.warning("the sandbox of the tool python could not be started: %s", describe_error(error))
            raise

    async def _start_sandbox(self) -> None:
        await call(self._sandbox.start)
        weakref.finalize(self, _close, self._sandbox, os.getpid())


def python_tool(
    timeout_s: float = DEFAULT_TIMEOUT_S,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    sandbox: CodeSandbox | None = None,
) -> Tool:
    """Return the tool `python`, which runs a program and answers with its output.

    Without ``sandbox``, programs run on this machine as those of `CodeTests`: without network, environment variables
    and this run's rights where the system allows it. They can read and write files with this user's rights.

    Args:
        timeout_s: Most seconds of a program. Keep it below half of ``Conversation(deadline_s=...)``.
        memory_bytes: Address space of each process, in the default sandbox.
        sandbox: Another place to run programs, such as containers: an object with ``start()``,
            ``run(code, timeout_s) -> ProgramOutput`` and ``close()``.

    Raises:
        ConfigError: for limits that are not above 0, and for a sandbox without these methods.
    """
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s={timeout_s!r} must be a number of seconds above 0")
    if sandbox is None:
        sandbox = LocalSandbox(memory_bytes)
    elif memory_bytes != DEFAULT_MEMORY_BYTES:
        raise ConfigError(f"memory_bytes={memory_bytes} bounds the default sandbox; give it to {sandbox!r} instead")
    missing = [name for name in ("start", "run", "close") if not callable(getattr(sandbox, name, None))]
    if missing or isinstance(sandbox, type):
        raise ConfigError(
            f"sandbox={sandbox!r} must be an object with start(), run(code, timeout_s) and close(); "
            + (f"it has no {', '.join(missing)}" if missing else "it is a class, make an instance of it")
        )
    return Tool.from_function(_Interpreter(sandbox, timeout_s).python)


def _close(sandbox: CodeSandbox, process: int) -> None:
    """Close a sandbox in the process that started it; a forked process has none to close."""
    if os.getpid() == process:
        sandbox.close()


python = python_tool()
"""The tool with its defaults, for ``tools: ["lightning_realloc.environments.python_tool:python"]``."""
