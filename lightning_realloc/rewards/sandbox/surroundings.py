"""Namespaces and user of a sandboxed program, on Linux. Standard library only."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534
"""User and group without rights, by convention."""

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_NO_SUID, _NO_DEVICES, _NO_EXEC, _RECURSIVE, _PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000


def unshare(*, new_user: bool = False) -> bool:
    """Start child processes in new namespaces; return whether the kernel allows it to this user.

    Args:
        new_user: Whether to make a namespace of users, too. Users other than root need it for the others.
    """
    kinds = _NEW_PID | _NEW_NET | _NEW_IPC | (_NEW_USER if new_user else 0)
    return bool(ctypes.CDLL(None).unshare(kinds) == 0)


def show_own_processes() -> None:
    """Mount a ``/proc`` with the processes of this namespace alone; no effect where the kernel forbids it."""
    libc = ctypes.CDLL(None)
    if libc.unshare(_NEW_MOUNTS) == 0 and libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None) == 0:
        libc.mount(b"proc", b"/proc", b"proc", _NO_SUID | _NO_DEVICES | _NO_EXEC, None)


def is_open_to_nobody(command: Sequence[str], folder: str) -> bool:
    """Return whether any user may run the files in a command, and reach a folder."""
    files = [Path(argument) for argument in command if os.path.isabs(argument) and os.path.isfile(argument)]
    reached = [part for path in files for part in (*path.parents, *path.resolve().parents)]
    reached += Path(folder).resolve().parents
    return all(_allows(part, stat.S_IXOTH) for part in reached) and all(
        _allows(path, stat.S_IROTH | stat.S_IXOTH) for path in files
    )


def _allows(path: Path, rights: int) -> bool:
    return path.stat().st_mode & rights == rights


def give_to_nobody(folder: str, *descriptors: int) -> None:
    """Make nobody the owner of a folder with its content, and of open files."""
    for descriptor in descriptors:
        os.fchown(descriptor, NOBODY, NOBODY)
    for path in (Path(folder), *Path(folder).rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def become_nobody() -> None:
    """Give up the rights of root, for good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
