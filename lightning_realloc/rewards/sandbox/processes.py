"""Kill a process together with all its descendants, including daemons. Standard library only.

On Linux no descendant escapes: orphans become children of the nearest subreaper above them, so a tree stays a tree. On
other systems a process is killed with its process group; descendants that start a session of their own survive.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECUREBITS_NOROOT_LOCKED = 0b11
"""Bits of ``prctl`` by which programs of root get no capabilities, for good (capabilities(7))."""
_NUM_CAPABILITIES = 64
_HIGH_PRIORITY_NICENESS = -15
"""Niceness of processes that must be scheduled promptly among many others."""


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when ``parent``, which started it, ends. On Linux only; no effect elsewhere.

    The signal is sent when the thread ends that started this process.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(1)  # the parent has ended already


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end. On Linux only; no effect elsewhere."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """Forbid privilege gains, as by set-user-ID files, for all programs started from here. On Linux only."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Give programs started from here none of root's capabilities. On Linux only; no effect for other users.

    The kernel then also denies them the memory and environment of processes that have capabilities, such as a run of
    root (ptrace(2), "Ptrace access mode checking").
    """
    for capability in range(_NUM_CAPABILITIES):
        _prctl(_PR_CAPBSET_DROP, capability)
    _prctl(_PR_SET_SECUREBITS, _SECUREBITS_NOROOT_LOCKED)


def hide_from_user() -> None:
    """Deny other processes of this user the memory and environment of this one. On Linux only, until an exec."""
    _prctl(_PR_SET_DUMPABLE, 0)


def raise_priority() -> int:
    """Raise the scheduling priority of this session if permitted; return the previous niceness.

    Linux may divide CPU time evenly among sessions, whatever their number of processes. Then the session's niceness
        counts.
    """
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _HIGH_PRIORITY_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_HIGH_PRIORITY_NICENESS))
    return niceness


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> set[int]:
    """Return the ids of the running processes below ``pid``; an empty set without ``/proc``."""
    children = _listed_children if _CHILDREN_ARE_LISTED else _children_by_parents()
    found: set[int] = set()
    pending = [pid]
    while pending:
        below = set(children(pending.pop())) - found
        found |= below
        pending += below
    return {member for member in found if _state(member) not in _ENDED}


_CHILDREN_ARE_LISTED = Path("/proc/thread-self/children").exists()
"""Whether this kernel lists children, which avoids a scan of all processes on the machine."""
_ENDED = frozenset({"", "Z", "X"})


def _listed_children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return children


def _children_by_parents() -> Callable[[int], list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        fields = _stat_fields(int(name))
        if fields:
            children[int(fields[1])].append(int(name))
    return lambda pid: children[pid]


def _state(pid: int) -> str:
    """Return R, S, T, Z, ... as in proc(5); empty for a process that does not exist."""
    return "".join(_stat_fields(pid)[:1])


def _stat_fields(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        # "pid (name) state parent ...": a name may contain spaces and parentheses
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def kill_tree(pid: int) -> None:
    """Kill a process that adopts orphans, and all its descendants.

    The process is stopped first and killed last: until then it adopts orphans of killed processes. Killing a process
    ends its fork in progress, stopping it does not. So a forking process is found in the next round at the latest.
    """
    _send(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while _state(pid) not in {"T", "t", *_ENDED} and time.monotonic() < deadline:
        time.sleep(0.001)
    empty_rounds = 0
    while empty_rounds < 2 and time.monotonic() < deadline:  # a process may change parents during one scan
        members = descendants(pid)
        # Killing a group prevents forks between two signals. Groups with a leader outside the tree are skipped.
        for group in {_group(member) for member in members} & members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for member in members:
            _send(member, signal.SIGKILL)
        empty_rounds = 0 if members else empty_rounds + 1
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # if it leads a group
    _send(pid, signal.SIGKILL)


def _group(pid: int) -> int:
    """Return the process group of a process, which is its leader's id; 0 if it does not exist."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getpgid(pid)
    return 0


_KILL_TIMEOUT_S = 10.0
"""Seconds to wait for processes to die; processes that wait for a device die only after it responds."""


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def describe_exit(exit_code: int | None) -> str:
    """Describe the end of a process: its exit code or signal."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-exit_code).name
    return f"signal {-exit_code}"
