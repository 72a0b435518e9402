"""The plan that needs no measurement trains sharded, and cuts copies only as far as memory asks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.model import ModelSpec, ParamSpec
from lightning_realloc.layout.sharding import TensorParallelCut
from lightning_realloc.tuning.dataflow import Dataflow
from lightning_realloc.tuning.heuristic import WEIGHTS_SHARE_OF_MEMORY, heuristic_plan
from tests.tuning.test_dataflow import GENERATE, JUDGE, SCORE, TRAIN

FLOW = Dataflow((GENERATE, SCORE, JUDGE, TRAIN))
NUM_ELEMENTS = 1024 * 64
MODEL = ModelSpec(
    (ParamSpec("block.0.weight", (1024, 64), TensorParallelCut(0, num_units=4), "block", 0),), num_blocks=1
)
UNCUT = ModelSpec((ParamSpec("block.0.weight", (1024, 64), None, "block", 0),), num_blocks=1, tp_refusal="no plan")


def layouts(model: ModelSpec, device_memory_bytes: float, *, world_size: int = 8) -> dict[str, str]:
    """Return call name -> layout on ``world_size`` devices of one node."""
    cluster = replace(ClusterSpec.local(world_size), device_memory_bytes=int(device_memory_bytes))
    plan = heuristic_plan(FLOW, {"actor": model, "reference": model}, cluster, world_size=world_size, element_bytes=2)
    plan.check(FLOW, world_size)
    return {name: str(call.layout) for name, call in plan.calls}


def test_with_room_every_rank_generates_with_a_whole_copy() -> None:
    copy_bytes = 2 * NUM_ELEMENTS
    assert layouts(MODEL, copy_bytes / WEIGHTS_SHARE_OF_MEMORY + 1) == {
        "actor.train": "fsdp8@0-7",
        "actor.generate": "dp8@0-7",
        "reference.infer": "dp8@0-7",
    }


def test_copies_are_cut_by_the_smallest_degree_that_fits() -> None:
    copy_bytes = 2 * NUM_ELEMENTS
    halves = layouts(MODEL, copy_bytes / 2 / WEIGHTS_SHARE_OF_MEMORY + 1)
    assert halves["actor.generate"].startswith("dp4.tp2@")
    assert halves["reference.infer"] == "dp4.tp2@0-7"
    quarters = layouts(MODEL, copy_bytes / 4 / WEIGHTS_SHARE_OF_MEMORY + 1)
    assert quarters["actor.generate"].startswith("dp2.tp4@")


def test_a_model_that_fits_nowhere_stays_sharded() -> None:
    # Four heads allow no tp beyond 4, and an eighth of the memory would be needed.
    assert set(layouts(MODEL, 2 * NUM_ELEMENTS / 8 / WEIGHTS_SHARE_OF_MEMORY).values()) == {"fsdp8@0-7"}
    assert set(layouts(UNCUT, NUM_ELEMENTS / WEIGHTS_SHARE_OF_MEMORY).values()) == {"fsdp8@0-7"}


def test_any_number_of_ranks_gets_a_plan() -> None:
    for world_size in (1, 2, 3, 6, 7):
        found = layouts(MODEL, NUM_ELEMENTS / WEIGHTS_SHARE_OF_MEMORY + 1, world_size=world_size)
        assert all(layout.endswith(f"0-{world_size - 1}") or "@" in layout for layout in found.values())


def test_a_role_without_a_model_is_named() -> None:
    with pytest.raises(PlanError, match=r"call 'reference\.infer' needs a model for role 'reference'; there are actor"):
        heuristic_plan(FLOW, {"actor": MODEL}, ClusterSpec.local(2), world_size=2, element_bytes=2)
