"""How do the processes of one host share memory, and how does one wait for another there?

A `SharedSegment` is a piece of memory that several processes map; a `FlagBarrier` lets them meet by nothing but words
in it. What is put into the segment, and which transport uses it, is decided elsewhere.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import ReallocError
from lightning_realloc.runtime.messages.objects import gather_objects

HEADER_BYTES = mmap.PAGESIZE
"""The first page holds the token and the flags; it stays when the contents are released."""

ALIGNMENT_BYTES = 64
"""Tensors begin at multiples of a cache line."""

_TOKEN_BYTES = 16
_WORD_BYTES = 8
_FIRST_LINE_BYTE = 64
_WORDS_PER_LINE = 8  # one cache line per process, so that no two processes write the same line
_LINES_FOR_ALL = 1
_SPINS, _YIELDS = 64, 2000
_LONGEST_SLEEP_S = 1e-3
_SHARED_MEMORY_FOLDER = Path("/dev/shm")

MAX_MEMBERS = (HEADER_BYTES - _FIRST_LINE_BYTE) // (_WORDS_PER_LINE * _WORD_BYTES) - _LINES_FOR_ALL
"""How many processes have a line of flags in the header."""

DISCARDS, SHORTAGES = (
    (_FIRST_LINE_BYTE + MAX_MEMBERS * _WORDS_PER_LINE * _WORD_BYTES) // _WORD_BYTES + i for i in range(2)
)
"""Words for all: how often the contents were given back, and how often they could not be had again."""


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """What another process of the same host needs to map a segment."""

    path: str
    """Where the segment can be opened: a file, or a descriptor of the process that made it."""
    size: int
    """Bytes after the header."""
    token: bytes
    """Random bytes that the segment begins with, so that a recycled path cannot be mistaken for it."""


class SharedSegment:
    """`size` bytes of memory under every process that maps it; the kernel frees them when the last one lets go.

    Contents follow a header of one page. Nobody has to clean up: neither kind of backing leaves a name behind.
    """

    def __init__(self, descriptor: int, handle: SegmentHandle) -> None:
        self.handle = handle
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, HEADER_BYTES + handle.size)
        self._bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.words = memoryview(self._map)[:HEADER_BYTES].cast("q")

    @classmethod
    def create(cls, size: int, *, backing: str) -> SharedSegment:
        """Return a new segment whose pages exist already, so that writing to it cannot fail for lack of memory.

        ``backing`` is "memfd" (anonymous, Linux) or "file" (in /dev/shm; call `unlink` once everybody has mapped it).
        Raises OSError where the system has no such backing or not enough memory.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        if backing == "memfd":
            descriptor = os.memfd_create("lightning_realloc", os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            path = str(_SHARED_MEMORY_FOLDER / f"lightning_realloc.{token.hex()}")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _require_memory(size, backing)
            # Without this a full tmpfs would kill the first process that touches a missing page (SIGBUS).
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + size)
            os.pwrite(descriptor, token, 0)
            return cls(descriptor, SegmentHandle(path, size, token))
        except OSError:
            os.close(descriptor)
            if backing == "file":
                os.unlink(path)
            raise

    @classmethod
    def attach(cls, handle: SegmentHandle) -> SharedSegment:
        """Map the segment that another process made. Raises OSError where that cannot be done from here."""
        descriptor = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        found = os.pread(descriptor, _TOKEN_BYTES, 0)
        if found != handle.token:
            os.close(descriptor)
            raise OSError(f"{handle.path} is not the segment that was announced: another PID or mount namespace?")
        return cls(descriptor, handle)

    def unlink(self) -> None:
        """Remove the segment's name, if it has one; mappings stay."""
        if self.handle.path.startswith(str(_SHARED_MEMORY_FOLDER)):
            os.unlink(self.handle.path)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the contents from byte ``offset`` on as a contiguous tensor; it keeps the mapping alive."""
        num_bytes = dtype.itemsize * math.prod(shape)
        start = HEADER_BYTES + offset
        return self._bytes[start : start + num_bytes].view(dtype).view(tuple(shape))

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that the contents take at present."""
        return max(0, os.fstat(self._descriptor).st_blocks * 512 - HEADER_BYTES)

    def discard(self) -> None:
        """Give the contents' pages back; every mapping stays valid and reads zeros."""
        if self.handle.size:
            self._map.madvise(mmap.MADV_REMOVE, HEADER_BYTES, self.handle.size)

    def reserve(self) -> None:
        """Make sure that all pages exist again after `discard`. Raises OSError when there is too little memory."""
        os.posix_fallocate(self._descriptor, 0, HEADER_BYTES + self.handle.size)

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


def share_segment(
    size: int, *, members: Sequence[int] | None = None, group: dist.ProcessGroup | None = None
) -> tuple[SharedSegment | None, str | None]:
    """Return a segment of ``size`` bytes that all ``members`` map, or why there is none. Collective over ``group``.

    ``members`` are global ranks of ``group``, all of them by default; the other ranks take part in the talk only and
    get (None, None) when it succeeds. Every rank gets the same reason.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    members = ranks if members is None else members
    facts = gather_objects((host_identity(), shared_memory_obstacle()), group)
    obstacle = _obstacle_among({r: fact for r, fact in zip(ranks, facts, strict=True) if r in members})
    if obstacle is not None:
        return None, obstacle
    reasons = []
    for backing in ("memfd", "file"):
        segment, reason = _share(size, backing, members, ranks, group)
        if reason is None:
            return segment, None
        reasons.append(reason)
    return None, "; ".join(reasons)


def _share(
    size: int, backing: str, members: Sequence[int], ranks: Sequence[int], group: dist.ProcessGroup | None
) -> tuple[SharedSegment | None, str | None]:
    """Let the first member make a segment and the others map it; return it, or why that failed somewhere."""
    rank, segment, reason = dist.get_rank(), None, None
    if rank == members[0]:
        try:
            segment = SharedSegment.create(size, backing=backing)
        except OSError as failure:
            reason = f"no shared memory as {backing}: {failure}"
    handle, reason = gather_objects((segment.handle if segment else None, reason), group)[ranks.index(members[0])]
    if handle is None:
        return None, reason
    if rank in members[1:]:
        try:
            segment = SharedSegment.attach(handle)
        except OSError as failure:
            reason = f"rank {rank} cannot map {handle.path}: {failure}"
    reasons = [text for text in gather_objects(reason, group) if text is not None]
    if rank == members[0] and segment is not None:
        segment.unlink()
    return (None, reasons[0]) if reasons else (segment, None)


def _obstacle_among(facts: Mapping[int, tuple[str, str | None]]) -> str | None:
    """Return why ranks with these hosts and obstacles cannot share memory."""
    first = next(iter(facts))
    for rank, (host, obstacle) in facts.items():
        if obstacle is not None:
            return f"rank {rank}: {obstacle}"
        if host != facts[first][0]:
            return f"ranks {first} and {rank} are on different hosts, {facts[first][0]} and {host}"
    if len(facts) > MAX_MEMBERS:
        return f"{len(facts)} ranks would share a segment, at most {MAX_MEMBERS} can"
    return None


class FlagBarrier:
    """A barrier among processes that map one segment: each counts its arrivals in its own word and reads the others'.

    Needs stores to become visible in program order, which x86 promises and Arm does not: see `stores_stay_in_order`.
    Cheaper than a barrier through sockets by two orders of magnitude, and it needs no process group. Several barriers
    may use one segment, each its own ``channel`` from 0 to 3.
    """

    def __init__(
        self, segment: SharedSegment, index: int, names: Sequence[str], *, deadline_s: float, channel: int = 0
    ) -> None:
        self._words = segment.words
        self._mine = _line(index) + 2 * channel
        self._others = tuple((_line(i) + 2 * channel, name) for i, name in enumerate(names) if i != index)
        self._deadline_s = deadline_s
        self._arrivals = 0
        self._words[self._mine + 1] = os.getpid()

    def arrive(self, turn: int | None = None) -> bool:
        """Say that this process has come, without waiting; tell whether all the others had come before.

        ``turn`` is how often it has come by now, once more than before if None; it never decreases.
        """
        self._arrivals = self._arrivals + 1 if turn is None else turn
        self._words[self._mine] = self._arrivals
        return all(self._words[flag] >= self._arrivals for flag, _ in self._others)

    def wait(self) -> None:
        """Return once every process has called `arrive` or `wait` as often as this one."""
        if self.arrive():
            return
        for flag, name in self._others:
            if self._words[flag] < self._arrivals:
                self._wait_for(flag, self._arrivals, name)

    def _wait_for(self, flag: int, turn: int, name: str) -> None:
        words = self._words

        def give_up_if_gone() -> None:
            pid = words[flag + 1]
            if pid and not _process_exists(pid):
                raise ReallocError(f"{name} (process {pid}) has ended while this process waits for it; see its own log")

        wait_until(
            lambda: words[flag] >= turn,
            deadline_s=self._deadline_s,
            check=give_up_if_gone,
            waiting_for=name,
        )


def wait_until(ready: Callable[[], bool], *, deadline_s: float, check: Callable[[], None], waiting_for: str) -> None:
    """Return when ``ready()``; spin first, then yield the core, then sleep for ever longer up to a millisecond.

    ``check`` is called about once a second and may raise. Raises ReallocError after ``deadline_s``.
    """
    for _ in range(_SPINS):
        if ready():
            return
    for _ in range(_YIELDS):
        os.sched_yield()
        if ready():
            return
    start = time.monotonic()
    next_check, sleep_s = start + 1.0, 2e-5
    while not ready():
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        now = time.monotonic()
        if now > next_check:
            check()
            next_check = now + 1.0
        if now > start + deadline_s:
            raise ReallocError(
                f"{waiting_for} did not come within {deadline_s:g} s; every rank must make the same calls in the same "
                "order: look for an error in its log, or allow more time with deadline_s"
            )


def stores_stay_in_order() -> bool:
    """Tell whether this machine shows one core's stores to the others in the order in which they were made."""
    return platform.machine().lower() in ("x86_64", "amd64")


def host_identity() -> str:
    """Return a text that is equal for two processes exactly when they may share memory: host name and boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else platform.platform()}"


def shared_memory_obstacle() -> str | None:
    """Return why this machine cannot share memory in the way that this module needs, None when it can."""
    if platform.system() != "Linux" or not hasattr(mmap, "MADV_REMOVE"):
        return f"shared segments need Linux, this is {platform.system()}"
    if ctypes.sizeof(ctypes.c_void_p) != _WORD_BYTES:
        return "shared segments need a 64-bit system"
    if not stores_stay_in_order():
        return f"flags in shared memory need x86's store order, this is {platform.machine()}"
    return None


def aligned(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to where the next tensor may begin."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _require_memory(size: int, backing: str) -> None:
    """Raise OSError when ``size`` bytes are certainly not there: asking for them anyway could kill a process."""
    available = _available_bytes()
    if backing == "file":
        folder = os.statvfs(_SHARED_MEMORY_FOLDER)
        available = min(available, folder.f_bavail * folder.f_frsize)
    if size > available:
        where = str(_SHARED_MEMORY_FOLDER) if backing == "file" else "memory"
        raise OSError(f"{size / 1e6:.0f} MB of shared memory needed, {available / 1e6:.0f} MB free in {where}")


def _available_bytes() -> int:
    """Return what the kernel could hand out, by /proc/meminfo and by this control group's own limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit = (group / "memory.max").read_text().strip() if (group / "memory.max").exists() else "max"
    if limit != "max":
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        in_use = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
        available = min(available, int(limit) - in_use)
    return available


def _process_exists(pid: int) -> bool:
    """Tell whether ``pid`` runs; one that has ended but was not yet collected by its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def _line(member: int) -> int:
    """Return the index of the first of a member's eight words."""
    return _FIRST_LINE_BYTE // _WORD_BYTES + member * _WORDS_PER_LINE
