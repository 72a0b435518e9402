"""Connect to a Ray cluster, and list its machines.

Ray is imported on use, so that nothing else needs it.
"""

from __future__ import annotations

import math
import os
import socket
from importlib.metadata import PackageNotFoundError, version

import torch
from lightning.pytorch.utilities import rank_zero_warn
from packaging.version import Version

from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.ray.bundles import RayMachine, RayPlacement

OLDEST_RAY = Version("2.40")
"""Oldest release of Ray that is accepted."""
NEWEST_RAY = Version("2.60")
"""Newest minor release that was tested; a newer one gets a warning."""
CONNECT_TIMEOUT_S = 10.0
"""Seconds to wait for the answer of the cluster at ``RAY_ADDRESS``."""


def ray_version() -> str | None:
    """Return the version of the installed Ray; None without one."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return None


def check_ray() -> None:
    """Check that Ray is installed, in a version that works. Do not import it.

    Raises:
        ConfigError: without Ray, and for a version before `OLDEST_RAY`.
    """
    text = ray_version()
    if text is None:
        raise ConfigError("launcher='ray' needs Ray, which is not installed: pip install 'lightning-realloc[ray]'")
    installed = Version(text)
    if installed < OLDEST_RAY:
        raise ConfigError(
            f"launcher='ray' needs Ray {OLDEST_RAY} or newer, and {installed} is installed: "
            f"pip install 'ray>={OLDEST_RAY}'"
        )
    if (installed.major, installed.minor) > (NEWEST_RAY.major, NEWEST_RAY.minor):
        rank_zero_warn(f"Ray {installed} is newer than {NEWEST_RAY}, the newest version that was tested")


def connect(num_cpus: float, namespace: str | None) -> None:
    """Connect to the cluster of ``RAY_ADDRESS`` or of this machine, unless connected; else start Ray on this machine.

    Args:
        num_cpus: Processors to offer at least, where Ray is started here: on a CPU, a rank is one process.
        namespace: Ray's namespace; None for one of this process.
    """
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or "auto"
    refuse_unreachable(address)
    try:
        ray.init(address=address, namespace=namespace)
    except ConnectionError:  # no cluster on this machine
        processors = max(math.ceil(num_cpus), os.cpu_count() or 1)
        ray.init(address="local", num_cpus=processors, namespace=namespace, include_dashboard=False)


def refuse_unreachable(address: str) -> None:
    """Raise ConfigError for the address of a cluster that does not answer, for which Ray would wait for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    try:
        if "/" in host or not port.isdecimal():  # also ray://, a client without shared memory and placement groups
            raise OSError("it is not host:port")
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"RAY_ADDRESS={address!r} cannot be reached ({error}); start the cluster, correct the address, or unset "
            f"RAY_ADDRESS to run on this machine"
        ) from None


def machines() -> list[RayMachine]:
    """Return every machine of the cluster that is alive."""
    import ray

    return [RayMachine(dict(one["Resources"]), dict(one.get("Labels", {}))) for one in ray.nodes() if one["Alive"]]


def warn_of_unused_gpus(placement: RayPlacement) -> None:
    """Warn if ranks run on CPUs because this process sees no GPU, while machines of the cluster have some."""
    gpus = sum(machine.resources.get("GPU", 0.0) for machine in machines())
    if gpus and not placement.uses_gpus and not torch.cuda.is_available():
        rank_zero_warn(
            f"Ray's machines have {gpus:g} GPUs, and the ranks of this run use none, since this process sees none; "
            f"set ReallocStrategy(launcher=RayOptions(use_gpus=True)), and leave the Trainer's accelerator out"
        )
