"""Read what a rank sees of its host: versions, GPUs, shared memory, disk, descriptors, and the address of messages."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_realloc.runtime.measure.nodes import RankHost
from lightning_realloc.strategies.cluster_check.launch import Launch
from lightning_realloc.strategies.lightning.process_group import max_open_files

_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address."""
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What a rank sees of its host."""

    place: RankHost
    """Host and versions."""
    local_rank: int
    address: str | None
    """Address that gloo listens at; None: the interface that ``GLOO_SOCKET_IFNAME`` names does not exist."""
    interface: str | None
    """Interface that faces rank 0; None if it is not known."""
    gpus: tuple[str, ...]
    """UUIDs of the GPUs that the process sees."""
    own_gpu: int | None
    """Position of the rank's GPU among them, as Lightning chooses it; None without one."""
    shared_bytes: int | None
    """Free bytes of ``/dev/shm``; None without it."""
    disk_bytes: int
    """Free bytes of the working directory."""
    folder: str
    """The working directory."""
    max_descriptors: int
    """Open files that the process may have (``ulimit -Hn``)."""
    driver: str | None
    """Version of NVIDIA's driver."""

    @classmethod
    def of_this_process(cls, launch: Launch) -> RankFacts:
        """Return the facts of this process."""
        facing = _address_facing(launch.address, launch.port)
        gpus = _visible_gpus()
        shared, folder = Path("/dev/shm"), Path.cwd()
        return cls(
            place=_with_libraries(RankHost.of_this_process()),
            local_rank=launch.local_rank,
            address=_address_of_messages(os.environ),
            interface=None if facing is None else _interface_of(facing),
            gpus=gpus,
            own_gpu=_own_gpu(len(gpus), launch.local_rank),
            shared_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
            disk_bytes=shutil.disk_usage(folder).free,
            folder=str(folder),
            max_descriptors=max_open_files(),
            driver=_driver_version(),
        )

    @property
    def host(self) -> str:
        """Name and boot of the host."""
        return self.place.host


def _with_libraries(place: RankHost) -> RankHost:
    """Add the versions of CUDA and NCCL that torch was built with, which talk to each other."""
    versions = dict(place.versions)
    if torch.version.cuda is not None:
        versions["CUDA"] = torch.version.cuda
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return RankHost(place.host, versions)


def _visible_gpus() -> tuple[str, ...]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(count))


def _own_gpu(count: int, local_rank: int) -> int | None:
    """Return a rank's GPU: the only one, which srun's ``--gpus-per-task`` gives, or the one with its number."""
    if count == 1:
        return 0
    return local_rank if local_rank < count else None


def _driver_version() -> str | None:
    found = re.search(r"Module .*?(\d+\.\d+(?:\.\d+)*)\s", _DRIVER.read_text()) if _DRIVER.exists() else None
    return None if found is None else found[1]


# ---- addresses
def _address_facing(address: str, port: int) -> str | None:
    """Return this host's address on the way to another; no packet is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _address_of_messages(variables: Mapping[str, str]) -> str | None:
    """Return the address that gloo listens at: of ``GLOO_SOCKET_IFNAME``, else of this host's name, else loopback."""
    if name := variables.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        return interface_address(name)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _interface_of(address: str) -> str | None:
    """Return the interface with an address."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if interface_address(name) == address), None)


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of an interface; None without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
