"""Runs one program under limits, and sees to it that nothing of it is left. The standard library alone.

A process of its own: the program's orphans become its children, and what the kernel can bound is bounded on this
side of the program's start. Where the kernel lets this user make namespaces, the program has no network, sees no
processes but its own, and ends to the last of them when its first one does. Where not, they are found and killed.

In: a job as JSON on the standard input. Out: an :class:`Ending` as JSON on the standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_realloc.rewards.sandbox.processes import (
    adopt_orphans,
    come_first,
    descendants,
    die_with_parent,
    kill_tree,
    renounce_privileges,
)

_NEW_USER, _NEW_PID, _NEW_NET, _NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_NOBODY = 65534
_LOOK_AGAIN_S = 0.02
"""Between two counts of the program's processes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use."""

    wall_s: float
    """Seconds from start to end."""
    cpu_s: int
    """Seconds of processor time, of each of its processes."""
    memory_bytes: int
    """Address space of each of its processes."""
    file_bytes: int
    """Size of each file that it writes."""
    processes: int
    """Processes at a time, itself included; in namespaces of its own, threads count, too."""
    output_bytes: int
    """What it may write to its standard output and error."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended."""

    exit_code: int | None
    """Negative: the signal that ended it; None: it was killed for the ``reason``."""
    reason: str
    """Which limit it went over; empty where it ended by itself."""
    output: str
    """What it wrote to standard output, and to standard error where asked for, as far as it may."""
    isolated: bool
    """Whether it ran in namespaces of its own."""


def main() -> None:
    """Do one job."""
    job: dict[str, Any] = json.load(sys.stdin)
    die_with_parent(job["parent"])
    adopt_orphans()
    niceness = come_first()  # before a namespace takes the right to; the program goes back to what was
    isolated = job["namespaces"] and _isolate()
    # Entering a namespace cleared it.
    die_with_parent(job["parent"])
    limits = Limits(**job["limits"])
    ending = _run(job, limits, isolated, niceness)
    json.dump(asdict(ending), sys.stdout)


def _isolate() -> bool:
    """Let children be in namespaces of their own; return whether the kernel allows it to this user."""
    if sys.platform != "linux":
        return False
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC) != 0:
        return False
    # Nobody, inside: the program gets none of the rights over the namespace that its maker has.
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{_NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{_NOBODY} {group} 1")
    return True


def _run(job: dict[str, Any], limits: Limits, isolated: bool, niceness: int) -> Ending:
    output_end, output = os.pipe()
    status_end, status = os.pipe()
    with tempfile.TemporaryFile() as stdin:
        stdin.write(job["input"].encode())
        stdin.seek(0)
        keeper = os.fork()
        if keeper == 0:
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
            os.close(output_end)
            os.close(status_end)
            _keep(job, limits, isolated, stdin.fileno(), output, status)
    os.close(output)
    os.close(status)
    try:
        said, reason = _watch(keeper, output_end, status_end, limits)
        code = os.read(status_end, 16) if not reason else b""
        reason = reason or ("" if code else "it was killed from outside")
    finally:
        if isolated:  # with the first process of a namespace the kernel ends all others, and lets none begin
            os.kill(keeper, signal.SIGKILL)
        else:
            kill_tree(keeper)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    return Ending(int(code) if code else None, reason, said.decode(errors="replace"), isolated)


def _watch(keeper: int, output_end: int, status_end: int, limits: Limits) -> tuple[bytes, str]:
    """Read what the program writes until it ends, or goes over a limit; return that, and which limit."""
    end_at = time.monotonic() + limits.wall_s
    said = b""
    reading = [output_end, status_end]
    while True:
        left = end_at - time.monotonic()
        ready, _, _ = select.select(reading, [], [], max(0.0, min(left, _LOOK_AGAIN_S)))
        if output_end in ready:
            more = os.read(output_end, 65536)
            said += more[: limits.output_bytes + 1 - len(said)]
            if len(said) > limits.output_bytes:
                return said[: limits.output_bytes], f"it wrote more than {limits.output_bytes} bytes"
            if not more:
                reading.remove(output_end)
        elif status_end in ready:
            return said, ""  # and nothing is left to read: daemons may hold the other end
        if left <= 0:
            return said, f"it took more than {limits.wall_s:g} seconds"
        if len(descendants(keeper)) > limits.processes:
            return said, f"it started more than {limits.processes} processes"


def _keep(job: dict[str, Any], limits: Limits, isolated: bool, stdin: int, output: int, status: int) -> None:
    """Start the program and wait for it: the first process of the namespace, with which all others in it end."""
    try:
        die_with_parent(os.getppid() if not isolated else 0)
        adopt_orphans()
        os.setsid()  # of the program too: a group to be killed where nothing else holds it together
        program = os.fork()
        if program == 0:
            os.setpgid(0, 0)  # a group without the keeper, which outlives it
            _become(job, limits, isolated, stdin, output)
        os.close(output)
        code = None
        while code is None:
            ended, waited = os.wait()
            code = os.waitstatus_to_exitcode(waited) if ended == program else None
        os.write(status, str(code).encode())
        signal.pause()  # orphans stay below this process until all are killed
    finally:
        os._exit(0)


def _become(job: dict[str, Any], limits: Limits, isolated: bool, stdin: int, output: int) -> None:
    """Turn into the program."""
    try:
        die_with_parent(os.getppid())
        for descriptor, standard in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        if not job["with_errors"]:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.closerange(3, 1024)
        os.chdir(job["folder"])
        renounce_privileges()
        _limit(limits, isolated)
        os.execve(job["command"][0], job["command"], job["environment"])
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(127)


def _limit(limits: Limits, isolated: bool) -> None:
    bounds = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_CPU: (limits.cpu_s, limits.cpu_s + 1),
        resource.RLIMIT_FSIZE: (limits.file_bytes, limits.file_bytes),
        resource.RLIMIT_NOFILE: (256, 256),
        resource.RLIMIT_AS: (limits.memory_bytes, limits.memory_bytes),
    }
    if isolated:  # elsewhere it would count all that this user runs, training among it
        around = 2  # this side's: who watches, and who keeps
        bounds[resource.RLIMIT_NPROC] = (limits.processes + around, limits.processes + around)
    for kind, (soft, hard) in bounds.items():
        with contextlib.suppress(ValueError, OSError):  # a lower one is in force already
            resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
