"""The nodes of a run: their devices, and the hosts and versions of their ranks, checked before ranks depend on them.

Plans count on equal nodes with consecutive ranks, so that shards stay inside nodes where that saves traffic.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from warnings import warn

import torch

from lightning_realloc.errors import ConfigError
from lightning_realloc.layout import ClusterSpec, format_ranks
from lightning_realloc.layout.cluster import data_sheet_of
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.transfer.shared_memory import host_identity

_COMPARED = ("lightning-realloc", "torch", "transformers", "lightning", "peft")
"""Packages whose versions must be equal: ranks exchange their objects, or compute parts of one result with them."""
MAX_USED_SHARE = 0.1
"""Share of a device's memory that other processes may hold: every process of CUDA takes half a gigabyte."""


@dataclass(frozen=True, slots=True)
class RankHost:
    """Where a rank runs, and with what."""

    host: str
    """Name and boot of the host, as `host_identity` returns them."""
    versions: Mapping[str, str]
    """Package -> version without its local part, which names a build such as ``+cu130``; packages may be missing."""

    @classmethod
    def of_this_process(cls) -> RankHost:
        """Return the place of this process."""
        return cls(host_identity(), _installed_versions())

    @property
    def host_name(self) -> str:
        """Name of the host alone."""
        return self.host.partition("/")[0]


@cache  # reading the files of the packages takes a twentieth of the time of a tiny fit
def _installed_versions() -> dict[str, str]:
    versions = {"Python": platform.python_version().rpartition(".")[0]}
    for package in _COMPARED:
        with suppress(PackageNotFoundError):
            versions[package] = version(package).partition("+")[0]
    return versions


def describe_cluster(num_nodes: int, ranks_per_node: int, device: torch.device) -> ClusterSpec:
    """Return nodes like this one, with the memory of its device, and the rates of its data sheet.

    Those of an H100 stand for a GPU without a known data sheet, nominal ones for the CPU.
    """
    if device.type == "cuda":
        preset = data_sheet_of(torch.cuda.get_device_name(device)) or "h100"
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        preset = "cpu"
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_per_node
    return replace(ClusterSpec.local(ranks_per_node, preset), num_nodes=num_nodes, device_memory_bytes=memory)


def warn_of_other_processes(device: torch.device) -> None:
    """Warn if other processes hold much of a GPU, since plans count on all of its memory."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others > MAX_USED_SHARE * total:
        warn(
            f"other processes hold {others / 2**30:.1f} of {total / 2**30:.1f} GiB on {device}, and plans count on all "
            f"of it; end them (nvidia-smi lists them), or set ReallocStrategy(memory_per_device="
            f"'{(total - others) / 2**30:.0f}GiB')",
            stacklevel=2,
        )


def check_nodes(ranks_per_node: int) -> list[str]:
    """Return the name of the host of each node. Collective over all ranks.

    Raises:
        ConfigError: on every rank if `find_problem` finds one.
    """
    places = gather_objects(RankHost.of_this_process())
    problem = find_problem(places, ranks_per_node)
    if problem is not None:
        raise ConfigError(problem)
    return [place.host_name for place in places[::ranks_per_node]]


def find_problem(places: Sequence[RankHost], ranks_per_node: int) -> str | None:
    """Return a fault of a run's nodes with the way out; None without one. Pure.

    Args:
        places: Places of all ranks, in order.
        ranks_per_node: Ranks of a node, as the Trainer has them.
    """
    return _version_problem(places) or node_problem(places, ranks_per_node)


def _version_problem(places: Sequence[RankHost]) -> str | None:
    """Return a line about the first rank that differs from rank 0, with all its differing versions."""
    first = places[0]
    for rank, place in enumerate(places):
        differing = version_difference(place, first)
        if differing is not None:
            return f"rank {rank} on {place.host_name} has {differing}; install the same versions on every node"
    return None


def version_difference(place: RankHost, first: RankHost) -> str | None:
    """Return the versions of a rank that differ from rank 0's, and rank 0's; None if all are equal."""
    names = sorted(name for name in {*first.versions, *place.versions} if _of(first, name) != _of(place, name))
    theirs, ours = (", ".join(f"{name} {_of(one, name)}" for name in names) for one in (place, first))
    return f"{theirs}, rank 0 on {first.host_name} has {ours}" if names else None


def _of(place: RankHost, package: str) -> str:
    return place.versions.get(package, "not installed")


def node_problem(places: Sequence[RankHost], ranks_per_node: int) -> str | None:
    """Return a line about the first node whose ranks run on several hosts."""
    for begin in range(0, len(places), ranks_per_node):
        members = places[begin : begin + ranks_per_node]
        if len({place.host for place in members}) > 1:
            return (
                f"ranks {begin}-{begin + len(members) - 1} are one node of Trainer(devices={ranks_per_node}, "
                f"num_nodes={len(places) // ranks_per_node}), but run on {_spread(places)}; {_way_out(places)}"
            )
    return None


def _spread(places: Sequence[RankHost]) -> str:
    """Return every host with its ranks, in the order of the first ones."""
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place.host, []).append(rank)
    return ", ".join(f"{host.partition('/')[0]} (rank {format_ranks(members)})" for host, members in ranks.items())


def _way_out(places: Sequence[RankHost]) -> str:
    counts = Counter(place.host for place in places)
    if len(set(counts.values())) > 1:
        return "start the same number of processes on every node"
    per_host = len(places) // len(counts)
    if any(len({place.host for place in places[i : i + per_host]}) > 1 for i in range(0, len(places), per_host)):
        return "number the ranks node by node (srun --distribution=block)"
    return f"set devices={per_host} and num_nodes={len(counts)}"
