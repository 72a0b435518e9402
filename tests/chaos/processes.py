"""Start the ranks of a run in the trial of faults, list their processes, and end them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.chaos import victim
from tests.chaos.agents import end_server, start_server
from tests.workers import PRELOADED, rank_environments


@dataclass(slots=True)
class Run:
    """Processes of one run, all in one session of their own."""

    folder: Path
    leaders: list[Any] = field(default_factory=list)
    """Processes that were started: the launcher, or every rank."""
    sessions: list[int] = field(default_factory=list)
    """Session of each of them."""
    server: Any = None
    """Server of the run's environments; None: they have none."""

    def processes(self) -> list[int]:
        """Return the ids of all living processes of the sessions."""
        return [pid for session in self.sessions for pid in _living(session)]

    @property
    def is_running(self) -> bool:
        """Whether a started process or one of its session lives: a process needs a moment to open its session."""
        alive = (leader.is_alive() if hasattr(leader, "is_alive") else leader.poll() is None for leader in self.leaders)
        return any(alive) or bool(self.processes())

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for leader in self.leaders:
            leader.join() if hasattr(leader, "join") else leader.wait()
        if self.server is not None:
            end_server(self.server)

    def log(self) -> str:
        """Return everything that the processes wrote."""
        return "\n".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("*.log")))


def _living(session: int) -> list[int]:
    """Return the processes of a session that are no zombies."""
    lines = subprocess.run(["ps", "-s", str(session), "-o", "pid=,stat="], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in lines.splitlines() if not line.split()[1].startswith("Z")]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether the condition came true in time."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.05)
    return True


# ---- starting
def start(case: dict[str, Any]) -> Run:
    """Start the ranks of a case."""
    folder = Path(case["folder"])
    folder.mkdir(parents=True)
    run = Run(folder)
    if case["algorithm"] == "agents":
        run.server, case["address"] = start_server()
    file = folder / "case.json"
    file.write_text(json.dumps(case))
    if case["launcher"] == "environment":
        context = get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "tests.chaos.victim"])
        for variables in rank_environments(case["world_size"]):
            process = context.Process(target=_run_rank, args=(case, variables))
            process.start()
            run.leaders.append(process)
    else:
        script = [str(Path(victim.__file__)), str(file)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case['world_size']}"]
        command = [sys.executable, *(torchrun if case["launcher"] == "torchrun" else []), *script]
        with (folder / "launcher.log").open("w") as log:
            process = subprocess.Popen(command, env=_environment(), stdout=log, stderr=log, start_new_session=True)
        run.leaders.append(process)
        (folder / "launcher").write_text(str(process.pid))
    run.sessions = [leader.pid for leader in run.leaders]
    return run


def _run_rank(case: dict[str, Any], variables: dict[str, str]) -> None:
    """Run one rank in a forked process, with the variables of torchrun."""
    os.setsid()
    log = os.open(Path(case["folder"]) / f"rank{variables['RANK']}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= _environment() | variables
    torch.set_num_threads(1)
    victim.train(case)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
