"""Bring the ranks of a launcher together, check their cluster within two minutes, and report on rank 0.

Stages follow each other, so that no rank enters a collective that must hang: ranks meet, hosts connect to each other,
and only then a process group starts, which compares clocks and measures links.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lightning_realloc.layout import format_ranks
from lightning_realloc.runtime.measure.link_table import LinkTable, num_rounds, partner_of
from lightning_realloc.runtime.measure.links import measure_pairs
from lightning_realloc.strategies.cluster_check.facts import RankFacts
from lightning_realloc.strategies.cluster_check.faults import (
    Cluster,
    clock_faults,
    describe_hosts,
    describe_versions,
    find_faults,
    missing_faults,
    unreachable_faults,
)
from lightning_realloc.strategies.cluster_check.launch import Launch
from lightning_realloc.strategies.cluster_check.meeting import CONNECT_S, Doorway, Meeting, failed_connections

MEET_S = 60.0
"""Seconds in which all ranks must come."""
PORTS_S = 3 * CONNECT_S
"""Seconds in which hosts try to connect to each other."""
LIMIT_S = 110.0
"""Seconds after which the check ends in any case, and names the ranks that have not come so far."""
_PINGS = 7
"""Exchanges of times with each host, of which the fastest counts."""
_TAG = 7106
Write = Callable[[str], object]
Value = TypeVar("Value")


def run_cluster_check(write: Write) -> int:
    """Check the cluster of the launcher that started this process, and return the exit code.

    Rank 0 writes a table, and a line for each fault; 1 is its exit code if there is one. Another rank writes, and
    returns 1, if it does not find rank 0. Collective over all ranks of the launcher.

    Raises:
        ConfigError: without a launcher.
    """
    launch, began_at = Launch.from_environment(os.environ), time.monotonic()
    try:
        meeting = Meeting(launch, deadline=began_at + MEET_S)
    except RuntimeError as error:
        if launch.rank == 0 or launch.local_rank == 0:
            write(f"{_without_store(launch, error)}\n")
        return 1
    check = _Check(launch, meeting, write, began_at)
    with check.ending_late():
        return check.run()


def _without_store(launch: Launch, error: RuntimeError) -> str:
    reason, here = next(iter(str(error).splitlines()), "without a message"), socket.gethostname()
    place = f"{launch.address}:{launch.port}"
    if launch.rank == 0:
        return (
            f"failed: rank 0 on {here} cannot listen at {place} ({reason}); export MASTER_ADDR with an address of its "
            f"host, and MASTER_PORT with a free port"
        )
    return (
        f"failed: rank {launch.rank} on {here} has not reached rank 0 at {place} in {MEET_S:.0f} s ({reason}); check "
        f"that rank 0 runs, that {here} resolves and reaches its address (MASTER_ADDR), and that its port is open"
    )


@dataclass(slots=True)
class _Check:
    """One rank's part in a check."""

    launch: Launch
    meeting: Meeting
    write: Write
    began_at: float
    faults: list[str] = field(default_factory=list)
    """Faults so far, on rank 0."""
    stage: str = "start"

    def run(self) -> int:
        """Run all stages, and return the exit code."""
        doorway: Doorway | None = None
        try:
            facts = RankFacts.of_this_process(self.launch)
            doorway = Doorway(facts.address if self.launch.local_rank == 0 else None)
            cluster, places = self._meet(facts, doorway.place)
            if cluster is None:
                return self._conclude(None, {}, None)
            self._connect_hosts(cluster, places)
            if not self._agree("is_connected", not self.faults_of_ports):
                return self._conclude(cluster, {}, None)
            ahead_s, links = self._measure(cluster)
            return self._conclude(cluster, ahead_s, links)
        except (RuntimeError, TimeoutError) as error:
            return self._fail(error)
        finally:
            if doorway is not None:
                doorway.close()

    @property
    def faults_of_ports(self) -> list[str]:
        """Faults that keep a process group from starting."""
        return [line for line in self.faults if line.startswith("ports:")]

    def _begin(self, stage: str) -> None:
        self.stage = stage
        self.meeting.enter(stage)

    def _agree(self, name: str, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        if self.launch.rank == 0:
            self.meeting.give(name, value)
            return value
        return cast(Value, self.meeting.wait_for(name, self.began_at + LIMIT_S))

    # ---- stages
    def _meet(
        self, facts: RankFacts, place: tuple[str, int] | None
    ) -> tuple[Cluster | None, dict[str, tuple[str, int]]]:
        """Return the facts of all ranks, and the open port of each host; no facts if ranks are missing."""
        self._begin("meeting")
        rank, world_size = self.launch.rank, self.launch.world_size
        self.meeting.give(f"facts/{rank}", (facts, place))
        came: dict[int, Any] = {}
        if rank == 0:
            came = self.meeting.wait_for_all("facts", range(world_size), self.began_at + MEET_S)
            if len(came) < world_size:
                hosts = {one: found.place.host_name for one, (found, _) in came.items()}
                self.faults += missing_faults(world_size, hosts, time.monotonic() - self.began_at)
        came = self._agree("everyone", came if len(came) == world_size else {})
        if not came:
            return None, {}
        cluster = Cluster([came[one][0] for one in range(world_size)])
        if rank == 0:
            self.faults += find_faults(cluster)
        places = [came[one][1] for one in cluster.leaders]
        return cluster, {host: found for host, found in zip(cluster.hosts, places, strict=True) if found is not None}

    def _connect_hosts(self, cluster: Cluster, places: Mapping[str, tuple[str, int]]) -> None:
        """Let each host connect to the hosts that it meets in the tournament, and note failures on rank 0."""
        self._begin("connecting hosts")
        rank, leaders, hosts = self.launch.rank, cluster.leaders, list(cluster.hosts)
        if rank in leaders:
            node = leaders.index(rank)
            partners = [partner_of(node, number, len(hosts)) for number in range(num_rounds(len(hosts)))]
            targets = [hosts[one] for one in partners if one is not None and hosts[one] in places]
            self.meeting.give(f"ports/{rank}", failed_connections({host: places[host] for host in targets}))
        if rank == 0:
            answers = self.meeting.wait_for_all("ports", leaders, time.monotonic() + PORTS_S)
            failures = {cluster.ranks[leader].host: failed for leader, failed in answers.items()}
            self.faults += unreachable_faults(cluster, failures)

    def _measure(self, cluster: Cluster) -> tuple[dict[str, float], LinkTable | None]:
        """Start a process group, compare clocks, and measure links where hosts have equal numbers of ranks."""
        self._begin("starting a process group")
        launch, device = self.launch, torch.device("cpu")
        own_gpu = cluster.ranks[launch.rank].own_gpu
        if own_gpu is not None and cluster.has_own_gpus and dist.is_nccl_available():
            device = torch.device("cuda", own_gpu)
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", self.meeting.store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=max(1.0, self.began_at + LIMIT_S - time.monotonic())),
        )
        self._begin("comparing clocks")
        offsets = clock_offsets(cluster.leaders)
        ahead_s = {host: offsets[rank] for host, rank in zip(cluster.hosts, cluster.leaders, strict=True)}
        links = None
        if len(cluster.hosts) > 1 and cluster.ranks_per_host is not None:
            self._begin("measuring links")
            links = measure_pairs(device, cluster.names, cluster.ranks_per_host)
        dist.barrier()  # a rank that leaves early breaks the connections of the others
        if launch.rank == 0:
            self.faults += clock_faults(cluster, ahead_s)
            self.faults += [] if links is None else list(links.warnings())
        return ahead_s, links

    # ---- the end
    def _conclude(self, cluster: Cluster | None, ahead_s: Mapping[str, float], links: LinkTable | None) -> int:
        """Write the report on rank 0, leave, and return the exit code."""
        self.stage = "end"
        if self.launch.rank == 0:
            if cluster is not None:
                self.write(f"{describe_hosts(cluster, ahead_s, links)}\n{describe_versions(cluster)}\n")
                self.write(f"{self.launch.world_size} ranks by {self.launch.launcher}, which meet at ")
                self.write(f"{self.launch.address}:{self.launch.port}\n")
            if links is not None:
                self.write(f"{links.describe()}\n")
            self._write_faults()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.meeting.leave()
        return int(bool(self.faults))

    def _write_faults(self) -> None:
        for line in self.faults:
            self.write(f"failed: {line}\n")
        took = f"{time.monotonic() - self.began_at:.0f} s"
        count = f"{len(self.faults)} fault{'s' if len(self.faults) > 1 else ''}" if self.faults else "no fault"
        self.write(f"{count} found in {took}\n")

    def _fail(self, error: Exception) -> int:
        """Report an error of a stage on this rank, which may be alone with it."""
        if self.launch.rank == 0:
            self.faults.append(f"{self.stage}: {_first_line(error)}{self._late_ranks()}")
            self._write_faults()
        elif self.launch.local_rank == 0:
            here = socket.gethostname()
            self.write(f"failed: rank {self.launch.rank} on {here}, {self.stage}: {_first_line(error)}\n")
        return 1

    def _late_ranks(self) -> str:
        """Return the ranks that are in earlier stages than this one."""
        try:
            stages = self.meeting.ranks_by_stage()
        except RuntimeError:
            return ""
        others = {stage: ranks for stage, ranks in stages.items() if stage != self.stage}
        texts = [
            f"rank {format_ranks(ranks)} {'has not come' if s == 'start' else f'is {s}'}" for s, ranks in others.items()
        ]
        return f" ({', '.join(texts)})" if texts else ""

    def ending_late(self) -> _Alarm:
        """Return a context that ends this process after `LIMIT_S`, wherever it waits; rank 0 first."""
        return _Alarm(self.began_at + LIMIT_S + (5.0 if self.launch.rank else 0.0), self._end_late)

    def _end_late(self) -> None:
        if self.launch.rank == 0:
            reason = f"not done after {LIMIT_S:.0f} s{self._late_ranks()}; look at the hosts of these ranks"
            self.faults.append(f"{self.stage}: {reason}")
            self._write_faults()
        os._exit(1)  # the main thread may wait in a collective for ever


@dataclass(slots=True)
class _Alarm:
    """Context that calls a function in a thread if it lasts too long."""

    moment: float
    act: Callable[[], None]
    _timer: threading.Timer | None = None

    def __enter__(self) -> None:
        self._timer = threading.Timer(max(0.0, self.moment - time.monotonic()), self.act)
        self._timer.daemon = True
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        assert self._timer is not None, "started on entering"
        self._timer.cancel()


def clock_offsets(leaders: Sequence[int], clock: Callable[[], float] = time.time) -> dict[int, float]:
    """Return rank -> seconds by which its clock is ahead of rank 0's, on rank 0; zeros elsewhere. Collective.

    Rank 0 asks one rank after the other. Half of the fastest round trip bounds the error.

    Args:
        leaders: A rank of each host, rank 0 among them.
        clock: Returns the time of day in seconds.
    """
    found, rank = dict.fromkeys(leaders, 0.0), dist.get_rank()
    times = torch.zeros(1, dtype=torch.float64)
    for leader in leaders:
        best = float("inf")
        for _ in range(_PINGS if leader and rank in (0, leader) else 0):
            if rank == leader:
                dist.recv(times, 0, tag=_TAG)
                dist.send(torch.tensor([clock()], dtype=torch.float64), 0, tag=_TAG)
                continue
            began_at = clock()
            dist.send(times, leader, tag=_TAG)
            dist.recv(times, leader, tag=_TAG)
            ended_at = clock()
            if ended_at - began_at < best:
                best, found[leader] = ended_at - began_at, float(times[0]) - (began_at + ended_at) / 2
    return found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'without a message')}"
