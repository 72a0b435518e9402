"""Supervisor process that runs one program under limits and kills all its descendants. Standard library only.

The supervisor adopts the program's orphans, and sets the kernel's resource limits before the program starts. If the
kernel allows namespaces to this user, the program has no network, sees only its own processes, also in ``/proc``, and
no sockets of other programs. Its processes end with the first one. Without namespaces, the supervisor finds and kills
them. A program of root runs as the user ``nobody``, if that user can read its interpreter and reach its folder.

Input: a job as JSON on standard input. Output: a :class:`ProgramResult` as JSON on standard output.
"""

from __future__ import annotations

import contextlib
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
    descendants,
    die_with_parent,
    drop_capabilities,
    forbid_new_privileges,
    hide_from_user,
    kill_tree,
    raise_priority,
)
from lightning_realloc.rewards.sandbox.surroundings import (
    NOBODY,
    become_nobody,
    bound_sockets,
    closed_to_nobody,
    give_to_nobody,
    hide_surroundings,
    unshare,
)

_POLL_INTERVAL_S = 0.02
"""Seconds between two counts of the program's processes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one program."""

    wall_s: float
    """Wall time, in seconds."""
    cpu_s: int
    """CPU time of each process, in seconds."""
    memory_bytes: int
    """Address space of each process, in bytes."""
    file_bytes: int
    """Size of each written file, in bytes."""
    processes: int
    """Number of concurrent processes, including the first; in namespaces, threads count as well."""
    output_bytes: int
    """Size of standard output and standard error together, in bytes."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Outcome of a program's run."""

    exit_code: int | None
    """Exit code; negative for a signal; None if the program was killed for the ``reason``."""
    reason: str
    """Limit that the program exceeded; empty if it ended by itself."""
    output: str
    """Captured standard output, and standard error if requested, up to the limit."""
    isolated: bool
    """Whether the program ran in its own namespaces."""
    is_nobody: bool
    """Whether a program of root ran as the user nobody, with the rights of nobody."""


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """Means by which a program is kept apart."""

    isolated: bool
    """Namespaces of processes, network and messages."""
    is_nobody: bool
    """The user nobody, in place of root."""

    @property
    def limits_processes(self) -> bool:
        """Whether the kernel can limit processes: elsewhere it would count those of other programs, or training's."""
        return self.isolated and not self.is_nobody


def supervise() -> None:
    """Run one job from standard input."""
    job: dict[str, Any] = json.load(sys.stdin)
    die_with_parent(job["parent"])
    adopt_orphans()
    niceness = raise_priority()  # before a namespace removes the right; the program gets the old value back
    job["sockets"] += bound_sockets()  # those of the network that a namespace leaves
    surroundings = _isolate(job)
    hide_from_user()  # once the maps of the namespace are written
    # Entering a namespace has cleared the parent-death signal.
    die_with_parent(job["parent"])
    limits = Limits(**job["limits"])
    result = _run(job, limits, surroundings, niceness)
    json.dump(asdict(result), sys.stdout)


def _isolate(job: dict[str, Any]) -> _Surroundings:
    """Start child processes in new namespaces if wanted and allowed, and choose their user."""
    if sys.platform != "linux":
        return _Surroundings(False, False)
    user, group, wanted = os.getuid(), os.getgid(), job["namespaces"]
    is_nobody = user == 0 and closed_to_nobody(job["command"], job["folder"]) is None
    if is_nobody and (not wanted or unshare()):
        return _Surroundings(wanted, True)
    if not wanted or not unshare(new_user=True):
        return _Surroundings(False, is_nobody)
    # The user inside is nobody, so that the program has none of the creator's rights over the namespace.
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    return _Surroundings(True, False)


def _run(job: dict[str, Any], limits: Limits, around: _Surroundings, niceness: int) -> ProgramResult:
    output_end, output = os.pipe()
    status_end, status = os.pipe()
    with tempfile.TemporaryFile() as stdin:
        stdin.write(job["input"].encode())
        stdin.seek(0)
        if around.is_nobody:
            give_to_nobody(job["folder"], stdin.fileno(), output)
        init_pid = os.fork()
        if init_pid == 0:
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
            os.close(output_end)
            os.close(status_end)
            _run_as_init(job, limits, around, stdin.fileno(), output, status)
    os.close(output)
    os.close(status)
    try:
        captured, reason = _watch(init_pid, output_end, status_end, limits)
        code = os.read(status_end, 16) if not reason else b""
        reason = reason or ("" if code else "it was killed from outside")
    finally:
        if around.isolated:  # the kernel ends all processes of a namespace with its first one
            os.kill(init_pid, signal.SIGKILL)
        else:
            kill_tree(init_pid)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    text = captured.decode(errors="replace")
    return ProgramResult(int(code) if code else None, reason, text, around.isolated, around.is_nobody)


def _watch(init_pid: int, output_end: int, status_end: int, limits: Limits) -> tuple[bytes, str]:
    """Read the program's output until it ends or exceeds a limit; return the output and the exceeded limit."""
    end_at = time.monotonic() + limits.wall_s
    captured = b""
    reading = [output_end, status_end]
    while True:
        left = end_at - time.monotonic()
        ready, _, _ = select.select(reading, [], [], max(0.0, min(left, _POLL_INTERVAL_S)))
        if output_end in ready:
            more = os.read(output_end, 65536)
            captured += more[: limits.output_bytes + 1 - len(captured)]
            if len(captured) > limits.output_bytes:
                return captured[: limits.output_bytes], f"it wrote more than {limits.output_bytes} bytes"
            if not more:
                reading.remove(output_end)
        elif status_end in ready:
            return captured, ""  # nothing is left to read; daemons may hold the other end open
        if left <= 0:
            return captured, f"it took more than {limits.wall_s:g} seconds"
        if len(descendants(init_pid)) > limits.processes:
            return captured, f"it started more than {limits.processes} processes"


def _run_as_init(
    job: dict[str, Any], limits: Limits, around: _Surroundings, stdin: int, output: int, status: int
) -> None:
    """Start the program and wait for it, as the first process of the namespace, with which all others end."""
    try:
        die_with_parent(os.getppid() if not around.isolated else 0)
        if around.isolated:
            hide_surroundings(job["sockets"], (*job["command"], job["folder"]))
        adopt_orphans()
        os.setsid()  # a group that also holds the program, to kill where no subreaper or namespace exists
        program = os.fork()
        if program == 0:
            os.setpgid(0, 0)  # a group without the init process, which outlives it
            _exec_program(job, limits, around, stdin, output)
        os.close(output)
        code = None
        while code is None:
            ended, waited = os.wait()
            code = os.waitstatus_to_exitcode(waited) if ended == program else None
        os.write(status, str(code).encode())
        signal.pause()  # orphans stay below this process until all are killed
    finally:
        os._exit(0)


def _exec_program(job: dict[str, Any], limits: Limits, around: _Surroundings, stdin: int, output: int) -> None:
    """Replace this process with the program."""
    try:
        for descriptor, standard in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        if not job["with_errors"]:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.closerange(3, 1024)
        os.chdir(job["folder"])
        forbid_new_privileges()
        drop_capabilities()
        if around.is_nobody:
            become_nobody()
        die_with_parent(os.getppid())  # another user clears it
        _limit(limits, counts_processes=around.limits_processes)
        os.execve(job["command"][0], job["command"], job["environment"])
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(127)


def _limit(limits: Limits, *, counts_processes: bool) -> None:
    bounds = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_CPU: (limits.cpu_s, limits.cpu_s + 1),
        resource.RLIMIT_FSIZE: (limits.file_bytes, limits.file_bytes),
        resource.RLIMIT_NOFILE: (256, 256),
        resource.RLIMIT_AS: (limits.memory_bytes, limits.memory_bytes),
    }
    if counts_processes:
        num_supervisors = 2  # the supervisor and the init process
        max_processes = limits.processes + num_supervisors
        bounds[resource.RLIMIT_NPROC] = (max_processes, max_processes)
    for kind, (soft, hard) in bounds.items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit is in force already
            resource.setrlimit(kind, (soft, hard))
