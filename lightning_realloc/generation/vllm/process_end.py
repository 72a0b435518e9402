"""End vLLM's processes, and describe an end that nobody asked for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lightning_realloc.generation.vllm.owned_folder import OwnedFolder
from lightning_realloc.generation.vllm.start.process_log import ProcessLog

MARK = "LIGHTNING_REALLOC_VLLM"
"""Variable by which the processes of one vLLM are found."""


def end_processes(
    process: subprocess.Popen[bytes], connection: socket.socket, files: tuple[OwnedFolder, ProcessLog], mark: str
) -> None:
    """End a vLLM's processes, close the connection to it, and remove its files.

    All have ended when this returns, so the memory of their device is free for the next one.
    """
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
    folder, log = files
    log.remove_unless_kept()
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


def cause_of_end(process: subprocess.Popen[bytes], log: ProcessLog, *, timeout_s: float) -> str:
    """Return why a process ended that nobody ended, or how: by the error in its log, its exit code or its signal."""
    try:
        code = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return log.root_cause() or f"vLLM's process closed its connection, and was ended, {log.end()}"
    if code < 0:  # from elsewhere than an error that was logged
        return f"vLLM's process ended by signal {signal.Signals(-code).name}, {log.end()}"
    cause = log.root_cause() if code else None
    return cause or f"vLLM's process ended with exit code {code}, {log.end()}"
