"""Each fault of a cluster is one line that names the host and the way out; a sound cluster has none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.measure.link_table import Link, LinkTable
from lightning_realloc.runtime.measure.nodes import RankHost
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
from lightning_realloc.strategies.lightning.process_group import needed_descriptors

VERSIONS = {"Python": "3.11", "torch": "2.13.0"}
GPUS = tuple(f"GPU-{number}" for number in range(2))


def facts(rank: int, host: str, **others: object) -> RankFacts:
    """Return the facts of a sound rank of two on its host."""
    known: dict[str, object] = {
        "place": RankHost(f"{host}/boot", VERSIONS), "local_rank": rank % 2, "address": f"10.0.0.{ord(host) - 96}",
        "interface": "eth0", "gpus": GPUS, "own_gpu": rank % 2, "shared_bytes": 8 << 30, "disk_bytes": 100 << 30,
        "folder": "/runs", "max_descriptors": 65536, "driver": "550.54.15",
    }  # fmt: skip
    return RankFacts(**(known | others))  # type: ignore[arg-type]


def cluster(last: dict[str, object] | None = None, hosts: str = "aabb") -> Cluster:
    """Return two hosts of two ranks; the last host's ranks have other facts."""
    own = [{} if host == "a" else last or {} for host in hosts]
    return Cluster([facts(rank, host, **more) for rank, (host, more) in enumerate(zip(hosts, own, strict=True))])


def test_a_sound_cluster_has_no_fault() -> None:
    sound = cluster()
    assert find_faults(sound) == []
    assert sound.ranks_per_host == 2 and sound.has_own_gpus and sound.leaders == [0, 2]
    assert list(clock_faults(sound, {"a/boot": 0.0, "b/boot": -0.9})) == []


@pytest.mark.parametrize(
    ("last", "line"),
    [
        (
            {"place": RankHost("b/boot", VERSIONS | {"torch": "2.12.0"})},
            "versions: rank 2 on b has torch 2.12.0, rank 0 on a has torch 2.13.0; install the same versions on every",
        ),
        (
            {"shared_bytes": 64 << 20},
            "shared memory: b has 64.00 MiB free in /dev/shm; start its container with --shm-size=8g or --ipc=host",
        ),
        ({"disk_bytes": 1 << 30}, "disk: b has 1.00 GiB free in /runs; free some, or let runs write to another disk"),
        (
            {"max_descriptors": 100},
            "descriptors: b allows a process 100 open files, and 4 ranks need about 144; raise it before the launcher",
        ),
        (
            {"address": "127.0.1.1"},
            "ports: the name of b means 127.0.1.1, where other hosts cannot reach its ranks; export GLOO_SOCKET_IFNAME "
            "and NCCL_SOCKET_IFNAME with its interface (eth0), or correct /etc/hosts",
        ),
        ({"address": None}, "ports: b has no interface of GLOO_SOCKET_IFNAME with an address; export GLOO_SOCKET_IFN"),
        ({"own_gpu": 0}, "GPUs: ranks 2-3 on b use the same GPU-0; leave CUDA_VISIBLE_DEVICES to the launcher, or giv"),
        (
            {"gpus": (), "own_gpu": None},
            "GPUs: ranks 2-3 on b have none of the 0 GPUs that they see; start at most one rank for each GPU, or look",
        ),
    ],
)
def test_a_fault_names_its_host_and_the_way_out(last: dict[str, object], line: str) -> None:
    (found,) = find_faults(cluster(last))
    assert found.startswith(line)


def test_a_loopback_address_is_fine_on_one_host() -> None:
    alone = Cluster([facts(rank, "a", address="127.0.0.1") for rank in range(2)])
    assert find_faults(alone) == []


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        ("aaab", "ranks: a has 0-2, b has 3; start the same number of processes on every host"),
        ("abab", "ranks: a has 0,2, b has 1,3; number the ranks host by host (srun --distribution=block, mpirun"),
    ],
)
def test_other_numbers_of_ranks_are_named(hosts: str, line: str) -> None:
    found = cluster({}, hosts)
    own = [replace(one, own_gpu=None, gpus=()) for one in found.ranks]
    (fault,) = find_faults(Cluster(own))
    assert fault.startswith(line)
    assert Cluster(own).ranks_per_host is None


def test_clocks_apart_are_named_with_their_host() -> None:
    (line,) = clock_faults(cluster(), {"a/boot": 0.0, "b/boot": -37.2})
    assert line == (
        "clocks: that of b is 37.2 s behind that of a, which has rank 0; synchronize it (chronyc makestep, or "
        "timedatectl set-ntp true)"
    )


def test_hosts_that_cannot_connect_are_named() -> None:
    failures = {"a/boot": {}, "b/boot": {"a/boot": "10.0.0.1:41234: timed out"}}
    (line,) = unreachable_faults(cluster(), failures)
    assert line.startswith("ports: b cannot connect to a (10.0.0.1:41234: timed out); let hosts of the cluster connect")


def test_ranks_that_have_not_come_are_named() -> None:
    (line,) = missing_faults(6, {0: "a", 1: "a", 3: "b"}, 60.0)
    assert line.startswith("ranks: 2,4-5 of 6 have not come in 60 s, and those of a (rank 0-1), b (rank 3) have; look")


def test_descriptors_grow_with_the_ranks_alone() -> None:
    assert needed_descriptors(512) == 128 + 4 * 512


def test_the_table_has_a_line_for_each_host() -> None:
    links = LinkTable(("a", "b"), {(0, 1): Link(1e9, 1e-4), (1, 0): Link(5e8, 1e-4)})
    lines = describe_hosts(cluster(), {"a/boot": 0.0, "b/boot": -0.0012}, links).splitlines()
    assert [line.split() for line in lines] == [
        ["host", "ranks", "GPUs", "/dev/shm", "disk", "open", "files", "clock", "sends", "at", "receives", "at"],
        ["a", "0-1", "2", "8.00", "GiB", "100.00", "GiB", "65,536", "+0.0", "ms", "1", "GB/s", "0.5", "GB/s"],
        ["b", "2-3", "2", "8.00", "GiB", "100.00", "GiB", "65,536", "-1.2", "ms", "0.5", "GB/s", "1", "GB/s"],
    ]
    other = cluster({"driver": "560.35.03"})
    assert describe_versions(cluster()).endswith("torch 2.13.0, driver 550.54.15")
    assert describe_versions(other).endswith("driver 550.54.15 on a, driver 560.35.03 on b")


TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "node[7-8]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "launcher", "address", "port"),
    [
        (TORCHRUN, "torchrun", "head", 29501),
        (SRUN, "srun", "node7", 15234),
        (MPIRUN | {"MASTER_ADDR": "head"}, "mpirun", "head", 29500),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "mpirun", "127.0.0.1", 29500),
    ],
)
def test_launchers_are_told_by_their_variables(
    variables: dict[str, str], launcher: str, address: str, port: int
) -> None:
    found = Launch.from_environment(variables)
    assert (found.launcher, found.address, found.port) == (launcher, address, port)
    assert (found.rank, found.local_rank, found.world_size) == (3, 1, 4)
    assert found.has_agent == (launcher == "torchrun")


@pytest.mark.parametrize(
    ("variables", "message"),
    [({}, "runs on every rank of a launcher, and there is none; start it by 'torchrun"), (MPIRUN, "export MASTER_ADD")],
)
def test_ranks_without_a_launcher_or_an_address_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Launch.from_environment(variables)
