"""Equal pipeline stages are priced once: those that are left out need no more bytes than those that are priced."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.tuning.memory.memory_model import MemoryModel
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from tests.tuning.examples import SMALL, role_of, with_adapters

TRAIN = ModelFunctionCall("actor.train", "train", "actor", "loss", ("batch",))
FLOW = Dataflow((TRAIN,))
DEEP = SMALL.replace("layers=4", "layers=12")
ROLES = (role_of(DEEP), role_of(DEEP, scores=True), with_adapters(role_of(DEEP), rank=6))


@given(
    role=st.sampled_from(ROLES),
    pp=st.integers(2, 9),
    vpp=st.sampled_from((1, 1, 2)),
    shards=st.sampled_from(((1, 1), (2, 1), (1, 2))),
    num_sequences=st.integers(1, 40),
    micro_batch=st.integers(1, 4),
    recomputes=st.booleans(),
    is_delayed=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_stage_needs_more_bytes_than_the_fullest_stages(
    role: RoleMemory,
    pp: int,
    vpp: int,
    shards: tuple[int, int],
    num_sequences: int,
    micro_batch: int,
    recomputes: bool,
    is_delayed: bool,
) -> None:
    vpp = vpp if pp * vpp <= role.model.num_blocks else 1
    fsdp, tp = shards
    layout = Layout(ParallelDims(pp=pp, vpp=vpp, fsdp=fsdp, tp=tp), tuple(range(pp * fsdp * tp)))
    load = Workload(num_sequences=num_sequences, prompt_tokens=20, response_tokens=44)
    plan = CallPlan(layout, 64 * micro_batch, recomputes, pipeline_schedule="zero_bubble" if is_delayed else "1f1b")
    model = MemoryModel(FLOW, {"actor": role}, MemorySettings(), load)
    elements = model.elements["actor"]
    every = [elements.on_rank(layout, rank) for rank in layout.ranks]
    most = max(model.call_memory(TRAIN, plan, sizes, is_home=True).peak.total for sizes in every)
    assert max(stage.peak.total for stage in model.on_fullest_stages(TRAIN, plan, is_home=True)) == most
