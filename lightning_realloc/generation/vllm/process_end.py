"""How a vLLM's processes are ended, and what their log says about an end that nobody asked for."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lightning_realloc.generation.vllm.owned_folder import OwnedFolder

MARK = "LIGHTNING_REALLOC_VLLM"
"""Variable by which the processes of one vLLM are found."""
_ERROR = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception): .*")


def end_processes(process: subprocess.Popen[bytes], connection: socket.socket, folder: OwnedFolder, mark: str) -> None:
    """End a vLLM's processes, close the connection to it, and remove its files."""
    connection.close()
    deadline = time.monotonic() + 10.0  # in which a resource tracker has removed shared memory, unless it hangs
    while left := dict(_processes_of(process.pid, mark)):
        for each, is_tracker in left.items():
            if not is_tracker or time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)  # vLLM has nothing to save, and takes seconds to end by itself
        process.poll()
        time.sleep(0.01)
    process.wait()
    folder.cleanup()


def _processes_of(session: int, mark: str) -> Iterator[tuple[int, bool]]:
    """Yield the processes of a vLLM: those of its session, as its workers, and those that inherited its mark.

    Each with whether it is Python's resource tracker, which removes the shared memory of the others once they are gone.
    """
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or ended meanwhile
            state, _, _, found = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and (int(found) == session or wanted in (folder / "environ").read_bytes()):
                yield int(folder.name), b"multiprocessing.resource_tracker" in (folder / "cmdline").read_bytes()


def describe_end(code: int) -> str:
    """Return how a process ended, by its exit code; negative ones are signals."""
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def last_error(lines: list[str]) -> str:
    """Return the last error that a log names; empty if it names none. vLLM also logs errors that it goes on after."""
    errors = [found[0] for line in lines if (found := _ERROR.search(line))]
    causes = [error for error in errors if "root cause above" not in error.lower()]
    return f"its log names {causes[-1][:400]}; " if causes else ""


def end_of_log(lines: list[str]) -> str:
    """Return the last lines of a log, for an error."""
    return f"the end of its log: {' | '.join(lines[-4:])[-600:] or 'nothing'}"
