"""Every call reports all of its parts as finished at its end, in every layout and on every rank."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest

from lightning_realloc.callbacks.phase import PhaseCallback
from lightning_realloc.runtime.messages.flight_record import ActivityProgress
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool


class Ends(PhaseCallback):
    """Records the progress of every call at its end."""

    def __init__(self) -> None:
        self.found: dict[str, ActivityProgress | None] = {}

    def on_phase_end(self, trainer: L.Trainer, pl_module: L.LightningModule, phase: str) -> None:
        """Read the progress of the call."""
        read = trainer.strategy.runner.record.current()[0].read_progress  # type: ignore[attr-defined]
        self.found[phase] = None if read is None else read()


def progress_of(layouts: dict[str, str]) -> dict[str, ActivityProgress | None]:
    """Return the progress of every call at its end."""
    ends, algorithm = Ends(), runs.grpo(train_options=runs.options(micro_batch_tokens=20, num_minibatches=2))
    runs.train(algorithm, runs.calls(**layouts), runs.world_size(), Batches(1), callbacks=[ends])
    return ends.found


@pytest.mark.parametrize("layout", matrix(["dp2", "fsdp2", "pp2", "tp2"], "dp2", "pp2"))
def test_a_call_ends_with_all_parts_done(workers: WorkerPool, layout: str) -> None:
    layouts: dict[str, Any] = {"actor_train": layout, "reference_infer": layout, "actor_generate": "dp2"}
    for found in workers.run(progress_of, layouts, world_size=2, init_process_group=False):
        train, infer = found["actor.train"], found["reference.infer"]
        assert train is not None and train.unit == "micro-batches" and train.done == train.total
        assert infer is not None and infer.unit == "micro-batches" and infer.done == infer.total
        assert train.done > 2 and infer.done > 1, "small micro-batches"
