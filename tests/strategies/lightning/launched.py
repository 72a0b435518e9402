"""User script for the tests of launchers: fit SFT on two devices, under each strategy named on the command line.

A strategy named ``alone`` fits on one device in this process, as a trial before the others.
Every rank writes its results to a folder. The process that called ``fit`` writes sums of its final weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from tests.strategies import runs
from tests.strategies.runs import Batches


def listening_addresses(port: int) -> set[str]:
    """Return the addresses, in hexadecimal digits, at which any process of this host listens on a port; Linux alone."""
    tables = [table for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if table.exists()]
    lines = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    places = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


class Witness(Callback):
    """Writes a rank's results of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write one file per rank."""
        seen = {
            "world_size": trainer.world_size,
            "steps": trainer.global_step,
            "logged": runs.numbers(trainer.logged_metrics),
            "launcher": type(trainer.strategy.launcher).__name__,
            "process": os.getpid(),
            "store": sorted(listening_addresses(int(os.environ["MASTER_PORT"]))),
        }
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


def main(folder: Path, *strategies: str) -> None:
    """Fit once under each strategy."""
    for name in strategies:
        if name == "alone":
            runs.trainer("realloc", 1).fit(runs.sft(), Batches(2, responses=True))
            continue
        (folder / name).mkdir(exist_ok=True, parents=True)
        module: Any = runs.sft()
        trainer = runs.trainer(name, 2, callbacks=[Witness(folder / name)])
        trainer.fit(module, Batches(2, responses=True))
        # Under a script or torchrun this process is a rank; otherwise it has the weights that the ranks returned.
        is_rank = dist.is_initialized()
        weights = trainer.strategy.full_weights("actor") if is_rank else module.actor.state_dict()
        if trainer.is_global_zero:
            sums = {key: float(value.abs().sum()) for key, value in weights.items()}
            seen = {"process": os.getpid(), "sums": sums, "steps": trainer.global_step, "epoch": trainer.current_epoch}
            (folder / name / "caller.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
