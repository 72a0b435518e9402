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
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_FIRST = -15
"""The niceness of who has to get its turn among any number of others."""


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


def come_first() -> int:
    """Let this session's first process be scheduled before others, where it may; return the niceness that it had.

    On Linux sessions may share processors alike, however many processes each has: then the session's niceness counts.
    """
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _FIRST)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_FIRST))
    return niceness


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> set[int]:
    """Return the ids of the processes below ``pid`` that have not ended; none where there is no /proc to say so."""
    children = _listed_children if _CHILDREN_ARE_LISTED else _children_by_parents()
    found: set[int] = set()
    ahead = [pid]
    while ahead:
        below = set(children(ahead.pop())) - found
        found |= below
        ahead += below
    return {member for member in found if _state(member) not in _ENDED}


_CHILDREN_ARE_LISTED = Path("/proc/thread-self/children").exists()
"""Whether this kernel keeps such lists, so that not all processes of the machine need to be looked at."""
_ENDED = frozenset({"", "Z", "X"})


def _listed_children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return children


def _children_by_parents() -> Callable[[int], list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        facts = _facts(int(name))
        if facts:
            children[int(facts[1])].append(int(name))
    return lambda pid: children[pid]


def _state(pid: int) -> str:
    """Return R, S, T, Z, ... as in proc(5), nothing for a process that is not there."""
    return "".join(_facts(pid)[:1])


def _facts(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        # "pid (name) state parent ...": a name may hold spaces and parentheses
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def kill_tree(pid: int) -> None:
    """Kill a process that adopts orphans, and all its descendants.

    It goes last, stopped: until then it adopts those whose parents were killed. A fork under way ends with its
    process when that is killed, though not when it is stopped; so one that forks is found in the next round at latest.
    """
    _send(pid, signal.SIGSTOP)
    give_up_at = time.monotonic() + _STOP_S
    while _state(pid) not in {"T", "t", *_ENDED} and time.monotonic() < give_up_at:
        time.sleep(0.001)
    empty_rounds = 0
    while empty_rounds < 2 and time.monotonic() < give_up_at:  # one may look while a process changes parents
        members = descendants(pid)
        # A group is killed at once: none of it can fork between two signals. Not one with a leader from elsewhere.
        for group in {_group(member) for member in members} & members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for member in members:
            _send(member, signal.SIGKILL)
        empty_rounds = 0 if members else empty_rounds + 1
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # where it leads a group
    _send(pid, signal.SIGKILL)


def _group(pid: int) -> int:
    """Return the process group of a process, which is its leader's id; 0 of one that is not there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getpgid(pid)
    return 0


_STOP_S = 10.0
"""How long processes may take to be killed, which those that wait for a device do only after it."""


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
