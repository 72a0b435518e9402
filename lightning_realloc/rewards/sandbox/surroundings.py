"""Namespaces and user of a sandboxed program, on Linux. Standard library only."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

NOBODY = 65534
"""User and group without rights, by convention."""

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _BIND, _RECURSIVE, _PRIVATE = 0x1, 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
_SOCKET_FOLDER = "/run"
"""Folder of the sockets of services, such as Docker's, which may lead out of a container."""


def unshare(*, new_user: bool = False) -> bool:
    """Start child processes in new namespaces; return whether the kernel allows it to this user.

    Args:
        new_user: Whether to make a namespace of users, too. Users other than root need it for the others.
    """
    kinds = _NEW_PID | _NEW_NET | _NEW_IPC | (_NEW_USER if new_user else 0)
    return bool(ctypes.CDLL(None).unshare(kinds) == 0)


def bound_sockets() -> list[str]:
    """Return the paths of Unix sockets in files on which programs of this network namespace listen."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    columns = (line.split(maxsplit=7) for line in lines)
    return sorted({found[7] for found in columns if len(found) == 8 and found[7].startswith("/")})


def hide_surroundings(sockets: Iterable[str], needed: Iterable[str]) -> None:
    """Mount a ``/proc`` with the processes of this namespace alone, and cover the sockets of other programs.

    No effect where the kernel forbids it.

    Args:
        sockets: Paths of sockets. ``/run`` is covered as a whole.
        needed: A command and its folder. ``/run`` stays as it is if a path among them leads through it.
    """
    libc = ctypes.CDLL(None)
    if libc.unshare(_NEW_MOUNTS) != 0 or libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None) != 0:
        return
    safe = _NO_SUID | _NO_DEVICES | _NO_EXEC
    libc.mount(b"proc", b"/proc", b"proc", safe, None)
    own = (found for path in needed if os.path.isabs(path) for found in (path, os.path.realpath(path)))
    if not any(path.startswith(f"{_SOCKET_FOLDER}/") for path in own):
        libc.mount(b"none", _SOCKET_FOLDER.encode(), b"tmpfs", _READ_ONLY | safe, b"size=4k,mode=755")
    for path in sockets:
        libc.mount(b"/dev/null", os.fsencode(path), None, _BIND, None)


def closed_to_nobody(command: Sequence[str], folder: str) -> Path | None:
    """Return a file of a command that not every user may run, or a folder on the way to it or to ``folder``."""
    files = [Path(argument) for argument in command if os.path.isabs(argument) and os.path.isfile(argument)]
    reached = [part for path in files for part in (*path.parents, *path.resolve().parents)]
    reached += Path(folder).resolve().parents
    closed = [part for part in reached if not _allows(part, stat.S_IXOTH)]
    closed += [path for path in files if not _allows(path, stat.S_IROTH | stat.S_IXOTH)]
    return next(iter(closed), None)


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
