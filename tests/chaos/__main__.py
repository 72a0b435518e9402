"""Trial of faults: kill, stop and signal processes of tiny runs of GRPO, PPO and agents, and check how they end.

    python -m tests.chaos --faults 60 --seed 0

A fault is survived if all other processes end within the deadline, a survivor names the lost rank, no process and no
shared memory is left, all checkpoints are intact, and a run that resumes from the newest one ends with the weights of
a run without faults, bit for bit. Environments of agents fail in these runs, too, which leave open nothing of theirs:
threads, sockets, tasks, processes. Prints a line for each fault, and ``faults survived: N/N`` at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lightning_realloc.errors import CheckpointError
from lightning_realloc.strategies.checkpoints.checkpoint_files import check_files, read_description
from tests.chaos.agents import STALL_TIMEOUT_S
from tests.chaos.faults import Fault, draw_faults
from tests.chaos.processes import start, wait_for

START_S = 120.0
"""Seconds from the start of a run to its fault, at most."""
DEADLINE_S = 30.0
"""Seconds from the fault to the end of all other processes, at most."""
TORCHRUN_S = DEADLINE_S + 30.0
"""The same under torchrun, which itself gives a stopped process 30 s once the others have ended."""
SHARED_MEMORY = Path("/dev/shm")


# ---- one fault
def trial(fault: Fault, folder: Path) -> list[str]:
    """Run one fault, and return what went wrong."""
    shared = _shared_memory()
    case = {"folder": str(folder / "run"), "fault": fault.to_mapping()} | _settings(fault)
    run = start(case)
    problems: list[str] = []
    try:
        if not wait_for(lambda: (run.folder / "struck").exists() or not run.is_running, START_S):
            return [f"the moment did not come in {START_S:g} s"]
        if not (run.folder / "struck").exists():
            return ["the run ended before the fault"]
        stopped = _stopped(fault, run.folder)
        deadline_s = TORCHRUN_S if stopped and fault.launcher == "torchrun" else DEADLINE_S
        if fault.algorithm == "agents":  # whose ranks wait longer before they give up another one
            deadline_s += STALL_TIMEOUT_S
        if not wait_for(lambda: not set(run.processes()) - stopped, deadline_s):
            problems.append(f"processes {set(run.processes()) - stopped} live {deadline_s:g} s after the fault")
        if fault.signal != "SIGTERM" and fault.target == "one" and not _names(fault, run.log()):
            problems.append(f"no survivor names rank {fault.rank}")
    finally:
        run.end()
    if left := _shared_memory() - shared:
        problems.append(f"shared memory is left: {', '.join(sorted(left))}")
    problems += _damaged(run.folder / "checkpoints")
    if fault.is_gentle and fault.moment != "start-up" and not (run.folder / "checkpoints/on_exception.ckpt").exists():
        problems.append("no checkpoint was saved")
    return problems + _resume(fault, run.folder / "checkpoints", folder / "resumed")


def _settings(fault: Fault) -> dict[str, Any]:
    return {"algorithm": fault.algorithm, "world_size": fault.world_size, "launcher": fault.launcher}


def _stopped(fault: Fault, folder: Path) -> set[int]:
    """Return the process that the fault stopped, which cannot end by itself."""
    return {int((folder / f"pid{fault.rank}").read_text())} if fault.signal == "SIGSTOP" else set()


def _names(fault: Fault, log: str) -> bool:
    if fault.rank == 0 and "mostly rank 0" in log:
        return True
    return any(f"rank {fault.rank}" in line and f"rank {fault.rank} has waited" not in line for line in log.split("\n"))


def _damaged(folder: Path) -> list[str]:
    problems = []
    for checkpoint in folder.glob("*.ckpt"):
        try:
            check_files(checkpoint, read_description(checkpoint))
        except CheckpointError as error:
            problems.append(f"{checkpoint.name} is damaged: {error}")
    return problems


def _resume(fault: Fault, checkpoints: Path, folder: Path) -> list[str]:
    """Resume from the newest checkpoint, and compare the trained weights with those of a run without faults."""
    saved = sorted(checkpoints.glob("*.ckpt"), key=lambda path: (path / "realloc.json").stat().st_mtime)
    case = {"folder": str(folder), "ckpt_path": str(saved[-1]) if saved else None}
    weights = _weights(case | _settings(fault) | {"launcher": "environment"})
    if weights is None:
        return [f"the run does not resume from {saved[-1] if saved else 'the beginning'}, see {folder}"]
    left = {file.name: file.read_text() for file in folder.glob("left_open*") if json.loads(file.read_text())}
    if left:
        return [f"the resumed run leaves more open than its first iteration: {left}"]
    reference = _reference(fault.algorithm, fault.world_size)
    differing = [
        f"{role}.{name}"
        for role, tensors in reference.items()
        for name, tensor in tensors.items()
        if not torch.equal(tensor, weights[role][name])
    ]
    return [f"resumed weights differ: {differing[0]} and {len(differing) - 1} more"] if differing else []


@cache
def _reference(algorithm: str, world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the trained weights of a run without faults."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"algorithm": algorithm, "world_size": world_size, "launcher": "environment"}
        weights = _weights({"folder": f"{folder}/run"} | settings)
        assert weights is not None, "a run without a fault ends"
        return weights


def _weights(case: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]] | None:
    """Run a case to its end, and return the trained weights; None if it fails."""
    run, file = start(case), Path(case["folder"]) / "weights.pt"
    try:
        wait_for(lambda: not run.is_running, START_S)
    finally:
        run.end()
    return torch.load(file) if file.exists() else None


def _shared_memory() -> set[str]:
    names = {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
    return {name for name in names if not name.startswith("sem.mp-")}  # Python's tracker removes these with the trial


@contextmanager
def _folder(keep: Path | None, number: int) -> Iterator[Path]:
    """Yield a folder for one fault, which is deleted unless ``keep`` is given."""
    if keep is not None:
        yield keep / str(number)
        return
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        yield Path(folder)


def main() -> int:
    """Run the trial, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of their order, targets and moments")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="run these faults only")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and checkpoints here")
    options = parser.parse_args()
    faults = [f for f in draw_faults(options.faults, options.seed) if options.only is None or f.number in options.only]
    survived = 0
    for fault in faults:
        began = time.monotonic()
        with _folder(options.keep, fault.number) as folder:
            problems = trial(fault, folder)
        survived += not problems
        print(f"{fault}  {time.monotonic() - began:.0f} s  {'; '.join(problems) or 'survived'}", flush=True)
    print(f"faults survived: {survived}/{len(faults)}")
    return survived < len(faults)


if __name__ == "__main__":
    sys.exit(main())
