"""Run a user's script in a fresh process, without the imports of torch, transformers and Lightning.

The process is forked from the template of `tests.workers`. Apart from that it behaves as ``python script arguments``
in a shell: it leads its process group, ends through ``sys.excepthook`` and ``atexit``, and is its own ``__main__``.
Ranks that the script starts import everything themselves, unless they are forked, too.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from lightning_realloc.parent_watch import watch_announced_parent
from tests.workers import PRELOADED


class Script:
    """A started script, with the methods of ``subprocess.Popen`` that the tests use."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path | None,
        *, forks_ranks: bool = False, method: Literal["forkserver", "fork"] = "forkserver",
    ) -> None:  # fmt: skip
        """Start ``python *command`` in ``folder``; standard output and errors go to ``log``.

        Args:
            command: The script and its arguments.
            folder: Working directory.
            environment: All environment variables.
            log: File for the output; None keeps that of this process, and its process group.
            forks_ranks: Whether ranks that Lightning's launcher starts are forked from the script's process.
            method: ``fork`` makes the script a child of this process, which has imported everything.
        """
        context = get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(list(PRELOADED))
        arguments = (tuple(command), folder, dict(environment), log, forks_ranks)
        self._process = context.Process(target=_run, args=arguments)
        self._process.start()
        assert self._process.pid is not None, "it was started"
        self.pid: int = self._process.pid
        self.terminate = self._process.terminate
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        """Exit code, or the negative number of the signal that ended the process; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, signum)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code; raise TimeoutExpired after ``timeout`` seconds."""
        self._process.join(None if timeout == math.inf else timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode


def _exit_code(end: SystemExit) -> int:
    """Return the exit code of ``sys.exit``, which prints any argument that is no number."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _fork_rank(command: Sequence[str], env: Mapping[str, str], cwd: str | None) -> Script:
    """Stand for ``subprocess.Popen`` in a launcher: the rank is a child of this process, in its process group."""
    assert command[0] == sys.executable, f"no script of Python: {command}"
    return Script(command[1:], Path(cwd or Path.cwd()), env, None, method="fork")


def _forget_parent() -> None:
    """Remove what a new interpreter would not have: exit functions, hooks and handlers of the forking process."""
    atexit._clear()
    sys.excepthook = sys.__excepthook__
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path | None, forks_ranks: bool
) -> None:
    """Run the script in this process, and end the process as the interpreter does."""
    if log is None:
        _forget_parent()
    else:
        os.setsid()
        gc.freeze()  # as in the workers: collections skip the imported objects
        stream = log.open("w", buffering=1)
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        sys.stdout = sys.stderr = stream
    if forks_ranks:
        from lightning.pytorch.strategies.launchers import subprocess_script

        subprocess_script.subprocess = types.SimpleNamespace(Popen=_fork_rank)  # type: ignore[attr-defined]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    watch_announced_parent()  # as the package does when it is imported
    sys.argv = list(command)
    main = types.ModuleType("__main__")
    main.__file__ = command[0]
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(Path(command[0]).read_text(), command[0], "exec"), main.__dict__)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        trace = error.__traceback__
        assert trace is not None, "it was raised here"
        outer = trace.tb_next  # without this function's frame
        sys.excepthook(type(error), error.with_traceback(outer), outer)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
