"""Start the process group through a store on loopback, and destroy its groups when the process exits."""

from __future__ import annotations

import gc
import os
import resource
import socket
import sys
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch._C._distributed_c10d import TCPStore
from torch.distributed.constants import default_pg_timeout

from lightning_realloc.errors import ConfigError

LOOPBACK = "127.0.0.1"
BASE_DESCRIPTORS, DESCRIPTORS_PER_RANK = 128, 4
"""Open files that a rank needs for itself, and for each other rank: two groups of all ranks have a connection to each,
and groups of a plan as many again at most. Measured: 17 + 2 a rank for GRPO on 2 and 4 ranks."""
RAISE_OPEN_FILES = (
    "raise it before the launcher starts (ulimit -n 65536; LimitNOFILE= of a service; --ulimit nofile=65536 of "
    "a container)"
)


def needed_descriptors(world_size: int) -> int:
    """Return the open files that a rank of a run needs, connections included."""
    return BASE_DESCRIPTORS + DESCRIPTORS_PER_RANK * world_size


def max_open_files() -> int:
    """Return the most open files that the system allows this process; its own limit may be lower, and can be raised."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def allow_open_files(world_size: int) -> None:
    """Raise this process's limit of open files to the number that a rank needs.

    Raises:
        ConfigError: if the system does not allow it, with the way out.
    """
    needed, (soft, hard) = needed_descriptors(world_size), resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_open_files() < needed:
        raise ConfigError(
            f"{world_size} ranks need about {needed:,} open files each, for connections to all others, and "
            f"{socket.gethostname()} allows a process {hard:,}; {RAISE_OPEN_FILES}"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def is_on_one_host(environment: ClusterEnvironment, *, num_nodes: int) -> bool:
    """Return whether all ranks are known to be on this host before they have met.

    They are if they meet at a loopback address, as processes that `ScriptLauncher` has started on one node do.
    """
    if num_nodes > 1:
        return False
    if environment.main_address in (LOOPBACK, "localhost"):
        return True
    if not environment.creates_processes_externally or isinstance(environment, SLURMEnvironment):
        return True
    return "WORLD_SIZE" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def start_on_loopback(
    environment: ClusterEnvironment, backend: str, device: torch.device, timeout: timedelta | None
) -> None:
    """Start the process group with a store that listens on loopback alone. Leaves it to an agent of torchrun, if any.

    The store has no authentication, and torch's own listens on all interfaces.

    Raises:
        OSError: if the port is taken.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    rank, port = environment.global_rank(), environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = LOOPBACK, str(port)
    store = open_store(LOOPBACK, port, timeout, listener=listen_at(LOOPBACK, port) if rank == 0 else None)
    start_with_store(store, environment, backend, device, timeout)


def start_with_store(
    store: TCPStore, environment: ClusterEnvironment, backend: str, device: torch.device, timeout: timedelta | None
) -> None:
    """Start the process group with a store through which ranks meet."""
    dist.init_process_group(
        backend,
        store=store,
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=timeout,
        device_id=device if device.type != "cpu" else None,
    )


def listen_at(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at an address of this machine; port 0 takes a free one. OSError if it is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def open_store(address: str, port: int, timeout: timedelta | None, *, listener: socket.socket | None) -> TCPStore:
    """Return the store at an address: the server on the rank that has the listening socket, a client elsewhere."""
    given = timeout or default_pg_timeout
    if listener is None:
        return TCPStore(address, port, is_master=False, timeout=given)
    return TCPStore(address, port, is_master=True, timeout=given, master_listen_fd=listener.detach())


def end_process_group() -> None:
    """Destroy the process groups that this process created; Lightning does so only for NCCL.

    A gloo thread may hold the last reference to a tensor. If it released that during interpreter shutdown, it could no
    longer acquire the GIL and would abort the process.
    """
    with suppress(KeyboardInterrupt):  # another Ctrl-C need not wait for this
        if not dist.is_initialized():
            return
        dist.destroy_process_group()
        gc.collect()  # a group's threads end with its last reference, and models have reference cycles
