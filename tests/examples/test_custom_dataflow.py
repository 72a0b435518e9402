"""The example of a custom dataflow: two reward models, and a reference that averages the actor."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

from tests.workers import WorkerPool

EXAMPLE = "examples.06_custom_dataflow"


def _run() -> dict[str, float]:
    trainer: Any = importlib.import_module(EXAMPLE).main(num_iterations=2)
    assert trainer.global_step == 2
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.exhaustive
def test_two_reward_models_score_and_the_reference_follows_the_actor(workers: WorkerPool) -> None:
    everyone = workers.run(_run, world_size=4, init_process_group=False, deadline_s=90.0)
    assert everyone == [everyone[0]] * 4
    for name in ("reward", "actor/kl", "actor/loss", "seconds/helpful.infer", "seconds/harmless.infer", "idle_share"):
        assert math.isfinite(everyone[0][name]), name
    assert everyone[0]["seconds/helpful.infer"] > 0
