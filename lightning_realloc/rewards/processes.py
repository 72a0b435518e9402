"""How does a process end with all that it started, also what was meant to outlive it? The standard library alone.

On Linux nothing escapes: orphans become children of the nearest subreaper above them, so a tree stays a tree. Elsewhere
a process is killed with its group, which those leave that open a session of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which started it, ends. Linux; elsewhere nothing.

    More precisely when the thread ends that started it.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(1)  # it has ended already


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end. Linux; elsewhere nothing."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def renounce_privileges() -> None:
    """Let nothing that is started from here on gain privileges, as by a set-user-ID file. Linux; elsewhere nothing."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> set[int]:
    """Return the ids of all live processes below ``pid``; none where there is no /proc to say so."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state parent ...": a name may hold spaces and parentheses
            state, parent, *_ = entry.read_text().rpartition(")")[2].split(maxsplit=2)
            if state not in "ZX":
                children[int(parent)].append(int(entry.parent.name))
    found: set[int] = set()
    ahead = [pid]
    while ahead:
        below = set(children[ahead.pop()]) - found
        found |= below
        ahead += below
    return found


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants.

    They are stopped first, until no more appear: what forks faster than it is killed would win otherwise.
    """
    stopped: set[int] = set()
    while fresh := ({pid} | descendants(pid)) - stopped:
        for member in fresh:
            _send(member, signal.SIGSTOP)
        stopped |= fresh
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # where it leads a group
    for member in stopped:
        _send(member, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def died_of(exit_code: int | None) -> str:
    """Say how a process ended: by which exit code, or which signal."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-exit_code).name
    return f"signal {-exit_code}"
