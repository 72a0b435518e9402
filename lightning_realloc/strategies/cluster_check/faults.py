"""Decide what is wrong with the hosts of a launcher's ranks, one line for each fault with the way out. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from statistics import median

from lightning_realloc.layout import format_ranks
from lightning_realloc.runtime.measure.link_table import LinkTable
from lightning_realloc.runtime.measure.nodes import node_problem, version_difference
from lightning_realloc.strategies.cluster_check.facts import RankFacts
from lightning_realloc.strategies.lightning.process_group import RAISE_OPEN_FILES, needed_descriptors
from lightning_realloc.tuning.memory.advice import gibibytes

MIN_SHARED_BYTES = 1 << 30
"""Free shared memory of a host below which it is a fault; Docker's default is 64 MiB."""
MIN_DISK_BYTES = 10 << 30
"""Free disk below which it is a fault: a checkpoint of a small model fills it."""
MAX_CLOCK_S = 1.0
"""Seconds by which clocks of two hosts may differ. Raising it lets logs of hosts disagree more."""


@dataclass(frozen=True)
class Cluster:
    """Facts of all ranks, in order."""

    ranks: Sequence[RankFacts]

    @cached_property
    def hosts(self) -> dict[str, list[int]]:
        """Host -> its ranks, in the order of the first ones."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(self.ranks):
            found[facts.host].append(rank)
        return dict(found)

    @property
    def leaders(self) -> list[int]:
        """First rank of each host."""
        return [ranks[0] for ranks in self.hosts.values()]

    @property
    def names(self) -> list[str]:
        """Name of each host."""
        return [self.ranks[rank].place.host_name for rank in self.leaders]

    @property
    def ranks_per_host(self) -> int | None:
        """Number of ranks of each host; None if hosts differ in it, or ranks are not numbered host by host."""
        per_host = len(self.ranks) // len(self.hosts)
        return per_host if node_problem([facts.place for facts in self.ranks], per_host) is None else None

    @property
    def has_own_gpus(self) -> bool:
        """Whether every rank has a GPU of its own."""
        return all(facts.own_gpu is not None for facts in self.ranks) and not list(_gpu_faults(self))


def find_faults(cluster: Cluster) -> list[str]:
    """Return the faults of facts that each rank has alone."""
    checks = _number_faults, _version_faults, _address_faults, _gpu_faults, _room_faults, _descriptor_faults
    return [line for check in checks for line in check(cluster)]


def _each_host(cluster: Cluster) -> Iterator[tuple[str, RankFacts]]:
    """Yield the name of each host, and the facts of its first rank."""
    return zip(cluster.names, (cluster.ranks[rank] for rank in cluster.leaders), strict=True)


def _number_faults(cluster: Cluster) -> Iterator[str]:
    counts = {name: len(ranks) for name, ranks in zip(cluster.names, cluster.hosts.values(), strict=True)}
    if cluster.ranks_per_host is not None:
        return
    spread = ", ".join(
        f"{name} has {format_ranks(ranks)}" for name, ranks in zip(cluster.names, cluster.hosts.values(), strict=True)
    )
    way_out = (
        "start the same number of processes on every host"
        if len(set(counts.values())) > 1
        else "number the ranks host by host (srun --distribution=block, mpirun --map-by slot)"
    )
    yield f"ranks: {spread}; {way_out}"


def _version_faults(cluster: Cluster) -> Iterator[str]:
    first = cluster.ranks[0].place
    for name, ranks in zip(cluster.names, cluster.hosts.values(), strict=True):
        for rank in ranks:
            differing = version_difference(cluster.ranks[rank].place, first)
            if differing is not None:
                yield f"versions: rank {rank} on {name} has {differing}; install the same versions on every host"
                break


def _address_faults(cluster: Cluster) -> Iterator[str]:
    for name, facts in _each_host(cluster):
        if facts.address is None:
            yield f"ports: {name} has no interface of GLOO_SOCKET_IFNAME with an address; {_interface_hint(facts)}"
        elif len(cluster.hosts) > 1 and ip_address(facts.address).is_loopback:
            yield (
                f"ports: the name of {name} means {facts.address}, where other hosts cannot reach its ranks; "
                f"{_interface_hint(facts)}, or correct /etc/hosts"
            )


def _interface_hint(facts: RankFacts) -> str:
    name = facts.interface or "the interface that faces the other hosts"
    return f"export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with its interface ({name})"


def _gpu_faults(cluster: Cluster) -> Iterator[str]:
    if not any(facts.gpus for facts in cluster.ranks):
        return
    for name, ranks in zip(cluster.names, cluster.hosts.values(), strict=True):
        users: defaultdict[str, list[int]] = defaultdict(list)
        without = [rank for rank in ranks if cluster.ranks[rank].own_gpu is None]
        for rank in ranks:
            facts = cluster.ranks[rank]
            if facts.own_gpu is not None:
                users[facts.gpus[facts.own_gpu]].append(rank)
        if without:
            seen = len(cluster.ranks[without[0]].gpus)
            yield (
                f"GPUs: ranks {format_ranks(without)} on {name} have none of the {seen} GPUs that they see; start at "
                f"most one rank for each GPU, or look at nvidia-smi and CUDA_VISIBLE_DEVICES there"
            )
        for gpu, sharing in users.items():
            if len(sharing) > 1:
                yield (
                    f"GPUs: ranks {format_ranks(sharing)} on {name} use the same {gpu}; leave CUDA_VISIBLE_DEVICES to "
                    f"the launcher, or give each rank its own LOCAL_RANK"
                )


def _room_faults(cluster: Cluster) -> Iterator[str]:
    for name, facts in _each_host(cluster):
        if facts.shared_bytes is not None and facts.shared_bytes < MIN_SHARED_BYTES:
            yield (
                f"shared memory: {name} has {gibibytes(facts.shared_bytes)} free in /dev/shm; start its container with "
                f"--shm-size=8g or --ipc=host"
            )
        if facts.disk_bytes < MIN_DISK_BYTES:
            yield (
                f"disk: {name} has {gibibytes(facts.disk_bytes)} free in {facts.folder}; free some, or let runs write "
                f"to another disk (default_root_dir)"
            )


def _descriptor_faults(cluster: Cluster) -> Iterator[str]:
    needed = needed_descriptors(len(cluster.ranks))
    for name, facts in _each_host(cluster):
        if facts.max_descriptors < needed:
            yield (
                f"descriptors: {name} allows a process {facts.max_descriptors} open files, and {len(cluster.ranks)} "
                f"ranks need about {needed:,}; {RAISE_OPEN_FILES}"
            )


def clock_faults(cluster: Cluster, ahead_s: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each host whose clock differs from that of rank 0's host.

    Args:
        ahead_s: Host -> seconds by which its clock is ahead of that of rank 0's host.
    """
    for host, name in zip(cluster.hosts, cluster.names, strict=True):
        if abs(seconds := ahead_s.get(host, 0.0)) > MAX_CLOCK_S:
            where = "ahead of" if seconds > 0 else "behind"
            yield (
                f"clocks: that of {name} is {abs(seconds):.1f} s {where} that of {cluster.names[0]}, which has rank 0; "
                f"synchronize it (chronyc makestep, or timedatectl set-ntp true)"
            )


def unreachable_faults(cluster: Cluster, failures: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield a line for each host that could not connect to others.

    Args:
        failures: Host -> host that it could not connect to -> the reason.
    """
    names = dict(zip(cluster.hosts, cluster.names, strict=True))
    for host, others in failures.items():
        if others:
            (target, reason), more = next(iter(others.items())), len(others) - 1
            further = f" and {more} more hosts" if more else ""
            yield (
                f"ports: {names[host]} cannot connect to {names[target]}{further} ({reason}); let hosts of the cluster "
                f"connect to all ports above 1024 of each other, on the interface of GLOO_SOCKET_IFNAME"
            )


def missing_faults(world_size: int, came: Mapping[int, str], waited_s: float) -> list[str]:
    """Return a line about ranks that have not come.

    Args:
        came: Rank -> name of the host of each rank that has come.
    """
    missing = [rank for rank in range(world_size) if rank not in came]
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    for rank, name in sorted(came.items()):
        hosts[name].append(rank)
    there = ", ".join(f"{name} (rank {format_ranks(ranks)})" for name, ranks in hosts.items())
    return [
        f"ranks: {format_ranks(missing)} of {world_size} have not come in {waited_s:.0f} s, and those of {there} have; "
        f"look at the launcher's log of the missing host, and whether it resolves and reaches the address of rank 0"
    ]


# ---- the table
def describe_hosts(cluster: Cluster, ahead_s: Mapping[str, float], links: LinkTable | None) -> str:
    """Return a table with a line for each host."""
    header = ("host", "ranks", "GPUs", "/dev/shm", "disk", "open files", "clock", "sends at", "receives at")
    rows: list[tuple[str, ...]] = [header]
    for node, (host, ranks) in enumerate(cluster.hosts.items()):
        facts = cluster.ranks[ranks[0]]
        gpus = len({gpu for rank in ranks for gpu in cluster.ranks[rank].gpus})
        shared = "none" if facts.shared_bytes is None else gibibytes(facts.shared_bytes)
        clock = f"{1e3 * ahead_s[host]:+.1f} ms" if host in ahead_s else "unknown"
        rates = (_median_rate(links, node, end) for end in (0, 1))
        room = shared, gibibytes(facts.disk_bytes), f"{facts.max_descriptors:,}"
        rows.append((cluster.names[node], format_ranks(ranks), str(gpus), *room, clock, *rates))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _median_rate(links: LinkTable | None, node: int, end: int) -> str:
    rates = [] if links is None else [link.bytes_per_s for ends, link in links.links.items() if ends[end] == node]
    return f"{median(rates) / 1e9:.3g} GB/s" if rates else "-"


def describe_versions(cluster: Cluster) -> str:
    """Return the versions of rank 0, and the drivers of all hosts."""
    versions = [f"{name} {version}" for name, version in cluster.ranks[0].place.versions.items()]
    drivers: defaultdict[str, list[str]] = defaultdict(list)
    for name, facts in _each_host(cluster):
        if facts.driver is not None:
            drivers[facts.driver].append(name)
    several = [f"driver {one} on {', '.join(names)}" for one, names in drivers.items()]
    return ", ".join([*versions, *(several if len(several) != 1 else [f"driver {next(iter(drivers))}"])])
