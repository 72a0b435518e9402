"""Drafters that are kept or made anew when the plan changes. Runs without a process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_realloc.algorithms.base.generation_options import GenerationOptions
from lightning_realloc.generation import SamplingParams, Speculation
from lightning_realloc.layout.dims import Layout
from lightning_realloc.runtime.measure.usage import PeakMemory
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.engine_pool import EnginePool
from lightning_realloc.strategies.calls.weight_updates import VersionLog
from tests.models import tiny_model

CALL: Any = SimpleNamespace(name="actor.generate", partners=())


def generators(drafter: str, *, shares_model: bool = False) -> EnginePool:
    """Return the engine pool of the only rank, or of one that shares its model with others."""
    speculation = Speculation(drafter=drafter, draft_blocks=1 if drafter == "blocks" else None)  # type: ignore[arg-type]
    module = SimpleNamespace(
        speculation=speculation, engine="native", tokenizer=None, generation_options=GenerationOptions()
    )
    group = object() if shares_model else None
    meshes = SimpleNamespace(tensor_group=lambda layout: group, batch_group=lambda layout: None)
    plan = SimpleNamespace(call=lambda name: SimpleNamespace(max_slots=4))
    pool = SimpleNamespace(meshes=meshes, plan=plan, streams=SimpleNamespace(is_allowed=lambda call: False))
    mailbox, device = SimpleNamespace(), torch.device("cpu")
    return EnginePool(
        CallContext(module, pool, mailbox, device, PeakMemory(device), 0, VersionLog(0, None))  # type: ignore[arg-type]
    )


def replica() -> Any:
    """Return a fresh replica of the actor, as another plan makes it."""
    return SimpleNamespace(role="actor", layout=Layout.parse("dp1@0"), model=tiny_model("llama"))


def test_a_drafter_keeps_its_history_under_the_next_plan() -> None:
    made, params = generators("history"), SamplingParams(max_new_tokens=8)
    first, second = replica(), replica()
    before = made.engine_for(CALL, first)
    before.engine.generate([[5, 6, 7]], params)
    made.forget()
    after = made.engine_for(CALL, second)
    assert after.drafter is before.drafter and after.engine is not before.engine
    after.engine.generate([[5, 6, 7]], params)
    # The same prompt, weights and seed: all drafts are accepted.
    assert after.engine.stats.accepted_tokens == after.engine.stats.verified_tokens


@pytest.mark.parametrize(("drafter", "shares_model"), [("blocks", False), ("history", True)])
def test_a_drafter_with_a_model_or_on_ranks_that_share_one_is_made_anew(drafter: str, *, shares_model: bool) -> None:
    made = generators(drafter, shares_model=shares_model)
    before = made.engine_for(CALL, replica())
    made.forget()
    assert made.engine_for(CALL, replica()).drafter is not before.drafter
