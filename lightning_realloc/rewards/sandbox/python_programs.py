"""Run Python source in the sandbox, each program in a temporary folder of its own."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.sandbox.sandbox import run_limited
from lightning_realloc.rewards.sandbox.supervisor import Limits, ProgramResult
from lightning_realloc.rewards.sandbox.surroundings import closed_to_nobody

log = logging.getLogger(__name__)

PROGRAM_FILE = "solution.py"
"""Name of the source's file, in its folder."""
_SIGNALS = ", and send signals to this run and other processes of its user"


@dataclass(slots=True, init=False)
class PythonPrograms:
    """Python interpreter in the sandbox, for any number of programs at a time.

    Args:
        limits: Resource limits of each program.
        interpreter: Path of the Python interpreter; None: the current one.
        sandbox: Command of the system that runs the interpreter; ``{folder}`` in it stands for the program's folder.
    """

    limits: Limits
    interpreter: str
    sandbox: tuple[str, ...]

    def __init__(self, limits: Limits, *, interpreter: str | None = None, sandbox: Sequence[str] = ()) -> None:
        if isinstance(sandbox, str):
            raise RewardError(f"sandbox={sandbox!r} must be a list of arguments: {tuple(sandbox.split())!r}")
        self.limits = limits
        self.interpreter = interpreter or sys.executable
        self.sandbox = tuple(sandbox)

    def run(
        self,
        source: str,
        *arguments: str,
        standard_input: str = "",
        with_errors: bool = True,
        wall_s: float | None = None,
    ) -> ProgramResult:
        """Run a program to its end or its limits.

        Args:
            source: Python source, which becomes the file `PROGRAM_FILE`.
            arguments: Arguments of the interpreter; by default the file.
            standard_input: Text for standard input.
            with_errors: Whether the captured output includes standard error.
            wall_s: Seconds for this program; None: those of the limits.
        """
        limits = self.limits if wall_s is None else replace(self.limits, wall_s=wall_s)
        with tempfile.TemporaryDirectory(prefix="program_", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / PROGRAM_FILE).write_text(source, encoding="utf-8", errors="replace")
            command = self._command(folder, *(arguments or (PROGRAM_FILE,)))
            result = run_limited(
                command, folder=folder, limits=limits, standard_input=standard_input, with_errors=with_errors
            )
            # Tracebacks name the file by its folder, whose random name would differ between two equal programs.
            return replace(result, output=result.output.replace(f"{folder}/", ""))

    def report_start(self, result: ProgramResult, user: str) -> None:
        """Check the simplest program, and log a warning of rights and network that programs share with this run.

        Args:
            result: Result of a program that cannot fail.
            user: Name of the class or function whose arguments choose limits, interpreter and sandbox.

        Raises:
            RewardError: if it failed.
        """
        if result.exit_code != 0:
            details = result.reason or result.output[-300:]
            raise RewardError(
                f"{user} cannot run {' '.join((*self.sandbox, self.interpreter))} within {self.limits}: {details}; "
                f"raise the limits, or give another interpreter or sandbox"
            )
        runs_as_root = os.getuid() == 0 and not result.is_nobody
        if runs_as_root:
            folder = tempfile.gettempdir()
            closed = closed_to_nobody(self._command(Path(folder)), os.path.join(folder, "any"))
            log.warning(
                "code run by %s has the rights of root%s; give %s(interpreter=...) that all users can "
                "run, such as /usr/bin/python3, or run training as another user",
                user,
                "" if closed is None else f", since the user nobody cannot read {closed}",
                user,
            )
        if not result.isolated:
            log.warning(
                "this system does not allow namespaces: code run by %s can use the network and sockets%s; give "
                "%s(sandbox=...) or run in a container",
                user,
                "" if result.is_nobody else _SIGNALS if runs_as_root else f", read environment variables{_SIGNALS}",
                user,
            )

    def _command(self, folder: Path, *arguments: str) -> list[str]:
        sandbox = [argument.replace("{folder}", str(folder)) for argument in self.sandbox]
        if sandbox:
            sandbox[0] = shutil.which(sandbox[0]) or sandbox[0]
        return [*sandbox, self.interpreter, "-I", "-B", *arguments]
