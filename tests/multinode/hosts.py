"""Hosts of a trial: network namespaces behind one switch, with addresses, host names and shared memory of their own.

Linux and root only. They share the file system, as the nodes of a cluster share that of their checkpoints.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

_INTERFACE = "eth0"


class UnavailableError(Exception):
    """This machine has no such hosts; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host."""

    name: str
    address: str
    namespace: str
    clock_ahead_s: int
    """Seconds by which its clock since boot is ahead of this machine's."""

    def start(
        self, command: Sequence[str], *, log: IO[str] | None = None, variables: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program on this host, in a session of its own."""
        # Its own mounts, so that its /dev/shm is its own, and its own clock since boot, as on another machine.
        prepare = f'hostname {self.name} && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        clocks = ["--time", f"--monotonic={self.clock_ahead_s}", f"--boottime={self.clock_ahead_s}"]
        isolated = ["unshare", "--uts", "--ipc", "--mount", *clocks, "--fork", "sh", "-c", prepare, "sh", *command]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": _INTERFACE, "OMP_NUM_THREADS": "1"} | (variables or {})
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *isolated], env=environment, stdout=log, stderr=log, text=True,
            start_new_session=True,
        )  # fmt: skip

    def processes(self) -> dict[int, str]:
        """Return the command line of every process on this host."""
        found = {}
        for pid in map(int, _run("ip", "netns", "pids", self.namespace).split()):
            with suppress(OSError):  # it has ended
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return found

    def received_bytes(self) -> int:
        """Return the bytes that the host's interface has received."""
        path = f"/sys/class/net/{_INTERFACE}/statistics/rx_bytes"
        return int(_run("ip", "netns", "exec", self.namespace, "cat", path))

    def set_rate(self, rate: str, burst: str = "64k") -> None:
        """Change the bandwidth at which the host sends, in `tc`'s units."""
        limit = ("root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")
        _run("ip", "netns", "exec", self.namespace, "tc", "qdisc", "replace", "dev", _INTERFACE, *limit)

    def set_link(self, *, up: bool) -> None:
        """Connect or disconnect the host: the cable, not the interface, so that programs notice nothing at once."""
        _run("ip", "-n", _switch(self.namespace), "link", "set", _port(self), "up" if up else "down")


@dataclass(slots=True)
class Hosts:
    """Hosts behind one switch; a context manager, which removes them.

    Args:
        count: Number of hosts, at most 9.
        rate: Bandwidth at which each sends, in `tc`'s units.
        burst: Bytes that each may send at once after a pause, in `tc`'s units. Fast links need much.
    """

    count: int
    rate: str = "1gbit"
    burst: str = "512k"
    hosts: list[Host] = field(default_factory=list)

    def __enter__(self) -> list[Host]:
        """Create the hosts.

        Raises:
            UnavailableError: if this machine cannot.
        """
        _require_system()
        prefix = f"realloc{os.getpid()}"
        self.hosts = [Host(f"host{n}", f"10.77.0.{n + 1}", f"{prefix}.{n}", 1000 * n) for n in range(self.count)]
        try:
            _run("ip", "netns", "add", f"{prefix}.switch")
            _run("ip", "-n", f"{prefix}.switch", "link", "add", "switch", "up", "type", "bridge")
            for host in self.hosts:
                self._connect(host)
        except UnavailableError:
            self._remove()
            raise
        return self.hosts

    def _connect(self, host: Host) -> None:
        switch, inside, port = _switch(host.namespace), ("ip", "-n", host.namespace), _port(host)
        _run("ip", "netns", "add", host.namespace)
        cable = ("type", "veth", "peer", _INTERFACE, "netns", host.namespace)
        _run("ip", "-n", switch, "link", "add", port, *cable)
        _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
        _run(*inside, "address", "add", f"{host.address}/24", "dev", _INTERFACE)
        _run(*inside, "link", "set", _INTERFACE, "up")
        _run(*inside, "link", "set", "lo", "up")
        host.set_rate(self.rate, self.burst)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all programs of the hosts, and remove them."""
        self._remove()

    def _remove(self) -> None:
        for host in self.hosts:
            with suppress(UnavailableError):  # it was not created
                for pid in host.processes():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                _run("ip", "netns", "del", host.namespace)
        with suppress(UnavailableError):
            _run("ip", "netns", "del", _switch(self.hosts[0].namespace))


def _switch(namespace: str) -> str:
    return f"{namespace.partition('.')[0]}.switch"


def _port(host: Host) -> str:
    """Return the name of the host's port at the switch."""
    return f"port{host.name.removeprefix('host')}"


def _require_system() -> None:
    if platform.system() != "Linux" or os.geteuid() != 0:
        raise UnavailableError("network namespaces need Linux, and root")
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            raise UnavailableError(f"the program {program!r} is missing: install iproute2 and util-linux")
    if not Path("/proc/self/ns/net").exists():
        raise UnavailableError("this kernel has no network namespaces")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
