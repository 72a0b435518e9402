"""Shared memory segments and barriers for the processes of one host.

Several processes map a `SharedSegment`. A `FlagBarrier` synchronizes them through words in its header. Transports and
collectives decide the contents.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import ReallocError
from lightning_realloc.runtime.messages.objects import gather_objects

HEADER_BYTES = mmap.PAGESIZE
"""Size of the header: one page with the token and the flags. `SharedSegment.discard` keeps it."""

ALIGNMENT_BYTES = 64
"""Alignment of tensors: one cache line."""

_TOKEN_BYTES = 16
_WORD_BYTES = 8
_FIRST_LINE_BYTE = 64
_WORDS_PER_LINE = 8  # one cache line per process, so that no two processes write the same line
_NUM_COMMON_LINES = 1
_NUM_SPINS, _NUM_YIELDS = 64, 2000
_MAX_SLEEP_S = 1e-3
_SHARED_MEMORY_FOLDER = Path("/dev/shm")

MAX_MEMBERS = (HEADER_BYTES - _FIRST_LINE_BYTE) // (_WORDS_PER_LINE * _WORD_BYTES) - _NUM_COMMON_LINES
"""Most processes of a segment: those with a line of flags in the header."""

DISCARDS_WORD, SHORTAGES_WORD = (
    (_FIRST_LINE_BYTE + MAX_MEMBERS * _WORDS_PER_LINE * _WORD_BYTES) // _WORD_BYTES + i for i in range(2)
)
"""Indices of the common words that count discards of the contents, and failures to allocate them again."""


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """Data with which another process of the same host can map a segment."""

    path: str
    """Path of the segment: a file, or a descriptor of the process that created it."""
    size: int
    """Bytes after the header."""
    token: bytes
    """Random bytes at the segment's start, which distinguish it from another one at a reused path."""


class SharedSegment:
    """`size` bytes of memory shared by every process that maps it. The kernel frees them with the last mapping.

    The contents follow a header of one page. No cleanup is needed: neither kind of backing leaves a name.
    """

    def __init__(self, descriptor: int, handle: SegmentHandle) -> None:
        self.handle = handle
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, HEADER_BYTES + handle.size)
        self._bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.words = memoryview(self._map)[:HEADER_BYTES].cast("q")

    @classmethod
    def create(cls, size: int, *, backing: str) -> SharedSegment:
        """Return a new segment with allocated pages, so that writing to it cannot fail for lack of memory.

        ``backing`` is "memfd" (anonymous, Linux) or "file" (in /dev/shm; call `unlink` once all processes have mapped
        it). Raises OSError if the system has no such backing or not enough memory.
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
            # Otherwise a full tmpfs would kill the first process that accesses a missing page (SIGBUS).
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
        """Map the segment that another process created. Raises OSError if that is impossible."""
        descriptor = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        found = os.pread(descriptor, _TOKEN_BYTES, 0)
        if found != handle.token:
            os.close(descriptor)
            raise OSError(f"{handle.path} is not the segment that was announced: another PID or mount namespace?")
        return cls(descriptor, handle)

    def unlink(self) -> None:
        """Remove the segment's name, if it has one. Mappings stay."""
        if self.handle.path.startswith(str(_SHARED_MEMORY_FOLDER)):
            os.unlink(self.handle.path)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the contents from byte ``offset`` as a contiguous tensor, which keeps the mapping alive."""
        num_bytes = dtype.itemsize * math.prod(shape)
        start = HEADER_BYTES + offset
        return self._bytes[start : start + num_bytes].view(dtype).view(tuple(shape))

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that the contents take now."""
        return max(0, os.fstat(self._descriptor).st_blocks * 512 - HEADER_BYTES)

    def discard(self) -> None:
        """Free the pages of the contents. Every mapping stays valid and reads zeros."""
        if self.handle.size:
            self._map.madvise(mmap.MADV_REMOVE, HEADER_BYTES, self.handle.size)

    def reserve(self) -> None:
        """Allocate all pages again after `discard`. Raises OSError if there is too little memory."""
        os.posix_fallocate(self._descriptor, 0, HEADER_BYTES + self.handle.size)

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


def share_segment(
    size: int, *, members: Sequence[int] | None = None, group: dist.ProcessGroup | None = None
) -> tuple[SharedSegment | None, str | None]:
    """Return (segment, None) with a segment that all ``members`` map, or (None, reason). Collective over ``group``.

    ``members`` are global ranks of ``group``, all of them by default. Other ranks get (None, None) on success; they
    may be members of another segment, which is then made in the same call. Every rank gets the same reason.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    members = tuple(ranks if members is None else members)
    answers = gather_objects((members, host_identity(), shared_memory_obstacle()), group)
    hosts = {rank: answer[1:] for rank, answer in zip(ranks, answers, strict=True)}
    for team in dict.fromkeys(team for team, *_ in answers):
        obstacle = _obstacle_among({rank: hosts[rank] for rank in ranks if rank in team})
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
    """Create a segment on the first member and map it on the others; return it, or the reason of a failure."""
    rank, segment, reason = dist.get_rank(), None, None
    creates = bool(members) and rank == members[0]
    if creates:
        try:
            segment = SharedSegment.create(size, backing=backing)
        except OSError as failure:
            reason = f"no shared memory as {backing}: {failure}"
    answers = gather_objects((segment.handle if segment else None, reason), group)
    reasons = [why for _, why in answers if why is not None]
    if not reasons:
        if rank in members[1:]:
            handle = answers[ranks.index(members[0])][0]
            try:
                segment = SharedSegment.attach(handle)
            except OSError as failure:
                reason = f"rank {rank} cannot map {handle.path}: {failure}"
        reasons = [why for why in gather_objects(reason, group) if why is not None]
    if creates and segment is not None:
        segment.unlink()
    return (None, reasons[0]) if reasons else (segment, None)


def _obstacle_among(hosts: Mapping[int, tuple[str, str | None]]) -> str | None:
    """Return why ranks with these (host, obstacle) pairs cannot share memory; None if they can."""
    first = next(iter(hosts), 0)
    for rank, (host, obstacle) in hosts.items():
        if obstacle is not None:
            return f"rank {rank}: {obstacle}"
        if host != hosts[first][0]:
            return f"ranks {first} and {rank} are on different hosts, {hosts[first][0]} and {host}"
    if len(hosts) > MAX_MEMBERS:
        return f"{len(hosts)} ranks would share a segment, at most {MAX_MEMBERS} can"
    return None


class FlagBarrier:
    """A barrier for processes that map one segment. Each counts its arrivals in its own word and reads the others'.

    Stores must become visible in program order, which x86 guarantees and Arm does not; see `stores_stay_in_order`. The
    barrier is two orders of magnitude faster than one over sockets and needs no process group. Several barriers may
    use one segment, each with its own ``channel`` from 0 to 3.
    """

    def __init__(
        self, segment: SharedSegment, index: int, names: Sequence[str], *, deadline_s: float, channel: int = 0
    ) -> None:
        self._words = segment.words
        self._mine = member_word(index) + 2 * channel
        self._others = tuple((member_word(i) + 2 * channel, name) for i, name in enumerate(names) if i != index)
        self._deadline_s = deadline_s
        self._arrivals = 0
        self._words[self._mine + 1] = os.getpid()

    def arrive(self, turn: int | None = None) -> bool:
        """Record an arrival of this process without waiting; return whether all others have arrived already.

        ``turn`` is the number of arrivals including this one, and never decreases. None means one more than before.
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
                self._wait_for(flag, name)

    def _wait_for(self, flag: int, name: str) -> None:
        """Wait for one process: spin first, then yield the core, then sleep, with backoff up to a millisecond."""
        words, turn = self._words, self._arrivals
        for spin in range(_NUM_SPINS + _NUM_YIELDS):
            if words[flag] >= turn:
                return
            if spin >= _NUM_SPINS:
                os.sched_yield()
        start = time.monotonic()
        next_check, sleep_s = start + 1.0, 2e-5
        while words[flag] < turn:
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _MAX_SLEEP_S)
            now = time.monotonic()
            if now > next_check:
                next_check = now + 1.0
                pid = words[flag + 1]
                if pid and not process_exists(pid):
                    raise ReallocError(f"{name} (process {pid}) ended while this one waited for it; see its own log")
            if now > start + self._deadline_s:
                raise ReallocError(
                    f"{name} did not arrive within {self._deadline_s:g} s; every rank must make the same calls in the "
                    "same order: look for an error in its log, or allow more time with deadline_s"
                )


def stores_stay_in_order() -> bool:
    """Return whether this machine makes one core's stores visible to others in program order."""
    return platform.machine().lower() in ("x86_64", "amd64")


def host_identity() -> str:
    """Return host name and boot id, which are equal exactly for processes that can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else platform.platform()}"


def shared_memory_obstacle() -> str | None:
    """Return why this machine cannot share memory as this module needs it; None if it can."""
    if platform.system() != "Linux" or not hasattr(mmap, "MADV_REMOVE"):
        return f"shared segments need Linux, this is {platform.system()}"
    if ctypes.sizeof(ctypes.c_void_p) != _WORD_BYTES:
        return "shared segments need a 64-bit system"
    if not stores_stay_in_order():
        return f"flags in shared memory need x86's store order, this is {platform.machine()}"
    return None


def align_up(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to a multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _require_memory(size: int, backing: str) -> None:
    """Raise OSError if ``size`` bytes are certainly not available; allocating them could kill a process."""
    available = available_bytes()
    if backing == "file":
        folder = os.statvfs(_SHARED_MEMORY_FOLDER)
        available = min(available, folder.f_bavail * folder.f_frsize)
    if size > available:
        where = str(_SHARED_MEMORY_FOLDER) if backing == "file" else "memory"
        raise OSError(f"{size / 1e6:.0f} MB of shared memory needed, {available / 1e6:.0f} MB free in {where}")


def available_bytes() -> int:
    """Return the available bytes according to /proc/meminfo and to this control group's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit = (group / "memory.max").read_text().strip() if (group / "memory.max").exists() else "max"
    if limit != "max":
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        in_use = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
        available = min(available, int(limit) - in_use)
    return available


def process_exists(pid: int) -> bool:
    """Return whether the process ``pid`` runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def member_word(member: int) -> int:
    """Return the index of the first of the eight words in a segment's header that only this member writes."""
    return _FIRST_LINE_BYTE // _WORD_BYTES + member * _WORDS_PER_LINE
