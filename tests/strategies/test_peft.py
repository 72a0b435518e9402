"""Adapters of a role under every plan: the same training as on one device, a base that moves once and is there once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.strategies import runs
from tests.strategies.peft_runs import train
from tests.strategies.runs import calls
from tests.workers import WorkerPool

PLANS = [
    calls(actor_train="dp2", actor_generate="dp2", reference_infer="dp2"),
    calls(actor_train="fsdp2", actor_generate="tp2", reference_infer="dp2"),
    calls(actor_train="pp2", actor_generate="dp2", reference_infer="tp2"),
    calls(actor_train="tp2", actor_generate="dp1@1", reference_infer="fsdp2"),
]


def test_adapters_train_alike_under_every_plan(workers: WorkerPool) -> None:
    alone: Any = workers.run(train, ["heuristic"], {}, world_size=1, init_process_group=False, deadline_s=90.0)
    together: Any = workers.run(train, PLANS, {}, world_size=2, init_process_group=False, deadline_s=150.0)
    ((expected, moved),) = alone[0]
    assert not moved
    assert expected.logged[0]["actor/kl"] > 1e-3  # the adapters matter from the beginning
    adapters = sum(4 * weight.numel() for name, weight in expected.weights.items() if "lora_" in name)
    everything = sum(4 * weight.numel() for weight in expected.weights.values())
    for (outcome, moved), base_moves in zip(together[0], (False, True, True, True), strict=True):
        assert outcome.tokens == expected.tokens
        for ours, theirs in zip(outcome.logged, expected.logged, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5, rel=1e-4)
        assert runs.largest_difference(outcome.weights, expected.weights) <= 1e-5
        first = sum(size for iteration, _, size in moved if iteration == 0)
        assert (first > everything / 2) == base_moves
        for later in (1, 2):
            sizes = {call: size for iteration, call, size in moved if iteration == later}
            assert sizes.keys() == ({"actor.generate"} if base_moves else set())
            assert sum(sizes.values()) <= adapters
