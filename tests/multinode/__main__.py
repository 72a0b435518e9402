"""Trial of runs over several hosts: ``python -m tests.multinode``; Linux and root.

Hosts are network namespaces with addresses, names, clocks and shared memory of their own, behind a switch of limited
bandwidth; torchrun starts the ranks. Checked are:

- GRPO and PPO over two and four hosts end with the weights of one host, bit for bit;
- moving weights sends as many bytes between hosts as the plan's minimum, by the kernel's counters of the interfaces;
- ranks of another host end within the deadline when a host is cut off, and name it; torchrun's restart goes on from the
  last checkpoint, and ends with the weights of a run without faults, bit for bit;
- measured links have the bandwidth of the switch, and ranks that are spread unevenly are refused;
- ``doctor --cluster`` names a slow host and one with few descriptors, and ranks that have not come within two minutes.

Prints a line for each check, and ``checks passed: N/N`` at the end.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.chaos.processes import Run, wait_for
from tests.chaos.processes import start as start_here
from tests.multinode import member, traffic
from tests.multinode.hosts import Host, Hosts, UnavailableError

ROOT = Path(__file__).parents[2]
PORT = 29400
START_S = 180.0
"""Longest wait for a run, in seconds."""
DEADLINE_S = 30.0
"""Seconds from the loss of a host to the end of the other ranks, at most."""
TRAFFIC_TOLERANCE = 0.05
"""Part of the minimum by which the interfaces may count more: headers, and the messages that agree on a move."""
RATE, BYTES_PER_S = "1gbit", 1.25e8


# ---- starting
@contextmanager
def ranks(
    hosts: Sequence[Host], script: Path, argument: Path, folder: Path, *, per_node: int | Sequence[int],
    max_restarts: int = 0,
) -> Iterator[Run]:  # fmt: skip
    """Run a script by torchrun on all hosts, and end what is left of it."""
    run = Run(folder)
    counts = [per_node] * len(hosts) if isinstance(per_node, int) else per_node
    try:
        for host, count in zip(hosts, counts, strict=True):
            start_agent(run, host, [str(script), str(argument)], hosts, per_node=count, max_restarts=max_restarts)
        yield run
    finally:
        run.end()


def start_agent(
    run: Run, host: Host, program: Sequence[str], hosts: Sequence[Host], *, per_node: int, max_restarts: int
) -> None:
    """Start torchrun on one host."""
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--nproc-per-node={per_node}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:{PORT}", f"--local-addr={host.address}",
        f"--max-restarts={max_restarts}", f"--rdzv-conf=is_host={int(host is hosts[0])}", *program,
    ]  # fmt: skip
    with (run.folder / f"{host.name}.log").open("a") as log:
        # Otherwise torchrun keeps the addresses of the ranks before, and restarted ranks do not find each other.
        variables = {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        agent = host.start(command, log=log, variables=variables)
    run.leaders.append(agent)
    run.sessions.append(agent.pid)


def new_case(folder: Path, **settings: Any) -> Path:
    """Write a case, and return its file."""
    (folder / "run").mkdir()
    file = folder / "case.json"
    file.write_text(json.dumps({"folder": str(folder / "run"), "launcher": "torchrun", **settings}))
    return file


# ---- weights
@cache
def weights_of_one_host(algorithm: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return the trained weights of four ranks on one host."""
    with tempfile.TemporaryDirectory() as folder:
        case = {"folder": f"{folder}/run", "algorithm": algorithm, "world_size": 4, "launcher": "environment"}
        run = start_here(case)
        try:
            wait_for(lambda: not run.is_running, START_S)
        finally:
            run.end()
        return torch.load(f"{folder}/run/weights.pt")


def differences(algorithm: str, folder: Path) -> list[str]:
    """Return how the weights of a run differ from those of one host."""
    file = folder / "run/weights.pt"
    if not file.exists():
        return [f"the run wrote no weights, see {folder}"]
    weights = torch.load(file)
    names = [
        f"{role}.{name}"
        for role, tensors in weights_of_one_host(algorithm).items()
        for name, tensor in tensors.items()
        if not torch.equal(tensor, weights[role][name])
    ]
    return [f"{len(names)} weights differ, first {names[0]}"] if names else []


# ---- checks
def check_equal(algorithm: str, num_hosts: int, folder: Path) -> list[str]:
    """Train over several hosts."""
    with Hosts(num_hosts, RATE) as hosts:
        case = new_case(folder, algorithm=algorithm, world_size=4, num_nodes=num_hosts)
        with ranks(hosts, Path(member.__file__), case, folder, per_node=4 // num_hosts) as run:
            if not wait_for(lambda: not run.is_running, START_S):
                return [f"the run did not end in {START_S:g} s, see {folder}"]
        return differences(algorithm, folder) + wrong_links(run.log())


def wrong_links(log: str) -> list[str]:
    """Return how the measured bandwidth between hosts differs from the switch's, if it does."""
    found = re.search(r"sends at ([0-9.e+-]+) GB/s and \d+ us between nodes", log)
    if found is None:
        return ["no link was measured"]
    share = float(found[1]) * 1e9 / BYTES_PER_S
    return [] if 0.2 < share < 1.3 else [f"links were measured at {share:.2f} times the switch's bandwidth"]


def check_traffic(num_hosts: int, folder: Path) -> list[str]:
    """Move weights, and compare the interfaces' counters with the plans' minimum."""
    problems = []
    with Hosts(num_hosts, RATE) as hosts:
        per_node = 4 // num_hosts
        with ranks(hosts, Path(traffic.__file__), folder, folder, per_node=per_node) as run:
            for number, (source, target) in enumerate(traffic.MOVES):
                move = f"{source} -> {target}"
                if not all_ranks_wrote(run, f"ready{number}"):
                    return [f"{move} did not come, see {folder}"]
                before = sum(host.received_bytes() for host in hosts)
                (folder / f"go{number}").touch()
                if not all_ranks_wrote(run, f"done{number}"):
                    return [f"{move} did not end, see {folder}"]
                received = sum(host.received_bytes() for host in hosts) - before
                problems += wrong_traffic(move, received, [read(folder, number, rank) for rank in range(4)])
                (folder / f"read{number}").touch()
            wait_for(lambda: not run.is_running, START_S)
    return problems


def all_ranks_wrote(run: Run, name: str) -> bool:
    """Wait for a file of each of the four ranks; return whether they came."""
    wait_for(lambda: len(list(run.folder.glob(f"{name}.*"))) == 4 or not run.is_running, START_S)
    return len(list(run.folder.glob(f"{name}.*"))) == 4


def read(folder: Path, number: int, rank: int) -> dict[str, Any]:
    """Return what a rank wrote about a move."""
    return json.loads((folder / f"move{number}.{rank}.json").read_text())


def wrong_traffic(move: str, received: int, results: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with a move; print its bytes."""
    minimum, transport = results[0]["minimum"], results[0]["transport"]
    print(f"  {move}: {received / 1e6:.2f} MB between hosts, minimum {minimum / 1e6:.2f} MB ({transport})", flush=True)
    problems = [] if all(result["right"] for result in results) else [f"{move} gives wrong weights"]
    if not minimum <= received <= (1 + TRAFFIC_TOLERANCE) * minimum:
        problems.append(f"{move} sent {received / minimum:.3f} times the minimum")
    return problems


def check_cut_host(folder: Path) -> list[str]:
    """Cut a host off in an iteration, connect it again once the others have ended, and let torchrun start again."""
    fault = {"signal": "SIGWINCH", "target": "one", "rank": 3, "moment": "generation", "occurrence": 20}
    with Hosts(2, RATE) as hosts:
        case = new_case(folder, algorithm="grpo", world_size=4, num_nodes=2, fault=fault, stall_timeout=10.0)
        with ranks(hosts, Path(member.__file__), case, folder, per_node=2, max_restarts=1) as run:
            struck = folder / "run/struck"
            if not wait_for(lambda: struck.exists() or not run.is_running, START_S) or not run.is_running:
                return [f"the moment did not come, see {folder}"]
            hosts[1].set_link(up=False)
            first = ranks_on(hosts[0])
            ended = wait_for(lambda: not first & ranks_on(hosts[0]), DEADLINE_S)
            problems = [] if ended else [f"ranks live on {DEADLINE_S:g} s after the host was cut off"]
            if not re.search(r"rank [23]", (folder / "host0.log").read_text()):
                problems.append("no rank of the other host is named")
            hosts[1].set_link(up=True)
            if not wait_for(lambda: not run.is_running, START_S):
                problems.append(f"the run did not end in {START_S:g} s after it, see {folder}")
        return problems + differences("grpo", folder)


def ranks_on(host: Host) -> set[int]:
    """Return the processes of a host that train."""
    return {pid for pid, command in host.processes().items() if f"-u {member.__file__}" in command}


def check_uneven(folder: Path) -> list[str]:
    """Start three ranks on one host, and one on the other."""
    with Hosts(2, RATE) as hosts:
        case = new_case(folder, algorithm="grpo", world_size=4, num_nodes=2)
        with ranks(hosts, Path(member.__file__), case, folder, per_node=(3, 1)) as run:
            ended = wait_for(lambda: not run.is_running, START_S)
        said = (
            "3 processes were started on host0, but Trainer(devices=2, num_nodes=2) asks for 2; start the same number",
            "1 processes were started on host1",
        )
        return (
            []
            if ended and all(text in run.log() for text in said)
            else [f"uneven ranks were not refused by name, see {folder}"]
        )


def check_doctor(folder: Path) -> list[str]:
    """Check three hosts, of which one sends slowly and one allows few open files."""
    with Hosts(3, RATE) as hosts:
        hosts[2].set_rate("50mbit")
        log = examined(hosts, hosts, folder, {1: ["sh", "-c", 'ulimit -n 100; exec "$@"', "sh"]})
    said = (
        r"failed: descriptors: host1 allows a process 100 open files, and 3 ranks need about 140",
        r"failed: slow host: host2 sends at 0\.00[5-7]\d* GB/s on all of its links",
        r"\nhost2 +2 ",
        r"\n2 faults found in",
    )
    return [f"{text!r} was not written, see {folder}" for text in said if not re.search(text, log)]


def check_missing_host(folder: Path) -> list[str]:
    """Check three hosts, of which the last one does not answer."""
    with Hosts(3, RATE) as hosts:
        hosts[2].set_link(up=False)
        log = examined(hosts, hosts[:2], folder, {})
    took = re.search(r"1 fault found in (\d+) s", log)  # without the imports, which wait for other programs
    said = "failed: ranks: 2 of 3 have not come in 60 s, and those of host0 (rank 0), host1 (rank 1) have"
    problems = [] if said in log else [f"the missing rank was not named, see {folder}"]
    return problems + ([] if took and int(took[1]) < 120 else ["it did not end in two minutes"])


def examined(
    hosts: Sequence[Host], started: Sequence[Host], folder: Path, prefixes: Mapping[int, list[str]]
) -> str:  # fmt: skip
    """Run ``doctor --cluster`` with a rank on each started host, and return what they wrote.

    ``prefixes``: Rank -> program that starts the check there.
    """
    run = Run(folder)
    command = [sys.executable, "-m", "lightning_realloc", "doctor", "--cluster"]
    try:
        for rank, host in enumerate(started):
            variables = {
                "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(hosts)),
                "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT),
            }  # fmt: skip
            with (folder / f"{host.name}.log").open("a") as log:
                run.leaders.append(host.start([*prefixes.get(rank, []), *command], log=log, variables=variables))
            run.sessions.append(run.leaders[-1].pid)
        wait_for(lambda: not run.is_running, START_S)
    finally:
        run.end()
    return run.log()


CHECKS: dict[str, Callable[[Path], list[str]]] = {
    "grpo over 2 hosts": lambda folder: check_equal("grpo", 2, folder),
    "grpo over 4 hosts": lambda folder: check_equal("grpo", 4, folder),
    "ppo over 2 hosts": lambda folder: check_equal("ppo", 2, folder),
    "ppo over 4 hosts": lambda folder: check_equal("ppo", 4, folder),
    "traffic of 2 hosts": lambda folder: check_traffic(2, folder),
    "traffic of 4 hosts": lambda folder: check_traffic(4, folder),
    "a host is cut off": check_cut_host,
    "uneven ranks": check_uneven,
    "doctor of 3 hosts": check_doctor,
    "doctor without a host": check_missing_host,
}


def main() -> int:
    """Run the checks, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), help="run these checks only")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs here")
    options = parser.parse_args()
    names, passed = options.only or list(CHECKS), 0
    for number, name in enumerate(names):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="multinode-") as temporary:
            folder = Path(temporary) if options.keep is None else options.keep / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                problems = CHECKS[name](folder)
            except UnavailableError as error:
                print(f"skipped: {error}")
                return 0
        passed += not problems
        print(f"{name}  {time.monotonic() - began:.0f} s  {'; '.join(problems) or 'passed'}", flush=True)
    print(f"checks passed: {passed}/{len(names)}")
    return passed < len(names)


if __name__ == "__main__":
    sys.exit(main())
