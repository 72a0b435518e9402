"""Run command lines of ``lightning-realloc`` in a worker process, which has imported everything."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.workers import WorkerPool


class Outcome(NamedTuple):
    code: int
    output: str
    errors: str


def command_lines(folder: Path, lines: Sequence[Sequence[str]], typed: str = "") -> list[Outcome]:
    """Run command lines in sequence in ``folder``, each in a fresh state, with ``typed`` as standard input."""
    from lightning_realloc import cli

    os.chdir(folder)
    outcomes = []
    for arguments in lines:
        sys.argv = ["lightning-realloc", *arguments]
        output, errors, before = io.StringIO(), io.StringIO(), sys.stdin
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            sys.stdin = io.StringIO(typed)
            try:
                code = cli.main()
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                sys.stdin = before
        outcomes.append(Outcome(code, output.getvalue(), errors.getvalue()))
    # Another test file has another folder with a `rewards` module.
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
    return outcomes


def run_lines(workers: WorkerPool, folder: Path, *lines: Sequence[str], typed: str = "") -> list[Outcome]:
    """Run command lines in one process of the pool."""
    outcomes: list[Outcome] = workers.run(command_lines, folder, lines, typed, world_size=1, init_process_group=False)[
        0
    ]
    return outcomes
