"""Forecast bytes of the cache, packed weights and draft models equal the sizes of the engine's tensors."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.generation import GenerationEngine, SamplingParams, Speculation, Turn
from lightning_realloc.generation.forward.packed_linear import packed_linears, packs
from lightning_realloc.generation.speculative.draft_distillation import Distillation
from lightning_realloc.generation.speculative.draft_model import ModelDrafter
from lightning_realloc.generation.speculative.drafter import Drafter
from lightning_realloc.layout.dims import Layout
from lightning_realloc.runtime.measure.memory_stats import StorageMeter
from lightning_realloc.strategies.pool.memory_check import describe_roles
from lightning_realloc.tuning.memory.call_memory import CallMemory
from lightning_realloc.tuning.memory.forecast import forecast_memory
from lightning_realloc.tuning.memory.generation_memory import draft_bytes, packed_bytes
from lightning_realloc.tuning.memory.parts import DraftMemory, EngineMemory, MemorySettings, Workload
from lightning_realloc.tuning.shapes.role_elements import RoleElements
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from tests.matrices import matrix
from tests.models import tiny_model

SLOTS = 8
LOAD = Workload(num_sequences=16, prompt_tokens=8, response_tokens=40)
ALONE = Layout.parse("dp1")
THREE_AHEAD = Speculation(num_draft_tokens=3)


def described(model: nn.Module) -> RoleMemory:
    return describe_roles([Role(name="actor", source=model, trained=False)], {})["actor"]


def call_of(model: nn.Module, engine: EngineMemory, load: Workload = LOAD) -> CallMemory:
    role = described(model)
    return CallMemory(
        role=role,
        kind="generate",
        plan=CallPlan(ALONE, max_slots=SLOTS),
        settings=MemorySettings(engine=engine),
        workload=load,
        sizes=RoleElements(role).on_rank(ALONE, 0),
        is_home=False,
        is_trained=False,
    )


def target() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=512)


def drafter() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=512, num_hidden_layers=1, hidden_size=32, intermediate_size=64)


class Measured(GenerationEngine):
    """An engine that has generated once, with the lengths of the workload."""

    def __init__(
        self,
        model: nn.Module,
        load: Workload = LOAD,
        *,
        max_cache_bytes: int | None = None,
        speculation: Speculation | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__(
            model, max_slots=SLOTS, max_cache_bytes=max_cache_bytes, speculation=speculation, drafter=drafter
        )
        prompts = [[3 + number] * load.prompt_tokens for number in range(load.num_sequences)]
        meter = StorageMeter()
        meter.start()
        before = meter.current_bytes
        self.generate(prompts, SamplingParams(max_new_tokens=load.response_tokens, ignore_eos=True))
        meter.stop()
        self.peak_bytes = meter.take_peak() - before


@pytest.mark.parametrize(
    ("bound", "drafts"), matrix(product([60_000, 150_000, 1_000_000], [False, True]), (150_000, True))
)
def test_a_bounded_cache_takes_the_forecast_pages_and_buffer(bound: int, *, drafts: bool) -> None:
    blocks = Speculation(drafter="blocks", draft_blocks=1, num_draft_tokens=2)
    load = replace(LOAD, num_sequences=10)
    # The blocks drafter uses the target's own cache.
    counted = call_of(target(), EngineMemory(max_cache_bytes=bound), load)
    cache = counted.cache
    assert cache is not None
    measured = Measured(target(), load, max_cache_bytes=bound, speculation=blocks if drafts else None)
    assert cache.final_bytes == measured.stats.cache_bytes <= bound
    assert counted.peak.total >= 0.85 * measured.peak_bytes


def test_groups_of_a_pipeline_have_equal_shares_of_a_bound() -> None:
    counted = call_of(target(), EngineMemory(max_cache_bytes=300_000), replace(LOAD, num_sequences=10)).cache
    assert counted is not None
    half = replace(counted, max_bytes=150_000, slots=-(-counted.slots // 2))
    assert replace(counted, num_groups=2).final_bytes == 2 * half.final_bytes <= 300_000


def test_a_cache_for_samples_of_other_ranks_takes_almost_all_of_its_bound() -> None:
    counted = call_of(target(), EngineMemory(max_cache_bytes=400_000)).cache
    assert counted is not None
    filled = replace(counted, fills=True)
    page = 16 * 2 * 2 * 2 * 16 * 4  # positions, layers, keys and values, heads, head size, fp32
    assert counted.final_bytes < 400_000 - page < filled.final_bytes <= 400_000


def test_a_stage_holds_the_keys_values_and_packed_weights_of_its_own_layers() -> None:
    whole = call_of(target(), EngineMemory(draft=DraftMemory(model=described(target()))))
    layout = Layout.parse("pp2")
    stages = [
        replace(whole, plan=CallPlan(layout, max_slots=SLOTS), sizes=RoleElements(whole.role).on_rank(layout, rank))
        for rank in range(2)
    ]
    caches = [stage.cache for stage in stages]
    assert whole.cache is not None and caches[0] is not None and caches[1] is not None
    # The whole model has two layers and its draft model two; the last stage has one and these two.
    assert 4 * caches[0].final_bytes == 4 * caches[1].final_bytes // 3 == whole.cache.final_bytes
    assert stages[0].draft_bytes == 0 < stages[1].draft_bytes == whole.draft_bytes
    given = {"tp": 1, "element_bytes": 2, "num_steps": 64}
    engine = EngineMemory(packs_weights=True)
    packed = [packed_bytes(whole.role, engine, stage=(stage, 2), **given) for stage in range(2)]
    assert 0 < packed[0] < packed[1]  # the last one has the head
    assert sum(packed) == packed_bytes(whole.role, engine, **given)


async def answer_late(turn: Turn) -> list[int]:
    """Answer after all samples have had their first turn."""
    await asyncio.sleep(0.05 if turn.number == 1 else 0)
    return [5] * 12


@pytest.mark.parametrize(("share", "slots"), [(SLOTS, SLOTS), (12, 12), (40, 2 * SLOTS)])
def test_waiting_samples_hold_the_forecast_slots_and_pages(share: int, slots: int) -> None:
    load = replace(LOAD, num_sequences=share)
    prompts = [[3 + number] * load.prompt_tokens for number in range(share)]
    params = SamplingParams(max_new_tokens=load.response_tokens, stop_token_ids=tuple(range(512)))
    for bound in (None, 150_000):
        cache = call_of(target(), EngineMemory(max_cache_bytes=bound, has_environment=True), load).cache
        assert cache is not None and cache.slots == (slots if bound is None else share)
        engine = GenerationEngine(target(), max_slots=SLOTS, max_cache_bytes=bound)
        engine.generate(prompts, params, environment=answer_late)
        assert cache.final_bytes == pytest.approx(engine.stats.cache_bytes, rel=0.05)


@pytest.mark.parametrize("prompt", matrix([8, 64], 64))
def test_an_unbounded_cache_and_that_of_a_draft_model_are_counted(prompt: int) -> None:
    load, model, small = replace(LOAD, prompt_tokens=prompt), target(), drafter()
    # 47 or 103 positions; two layers of two heads of 16, keys and values, in fp32.
    plain, drafting = (
        call_of(model, EngineMemory(draft=draft), load).cache for draft in (None, DraftMemory(model=described(small)))
    )
    assert plain is not None
    assert drafting is not None
    measured = Measured(model, load)
    assert plain.final_bytes == pytest.approx(measured.stats.cache_bytes, rel=0.05)
    # The drafter's one layer takes half as many bytes, in its own slots.
    assert drafting.final_bytes - plain.final_bytes == SLOTS * (prompt + 40) * (2 * 2 * 8) * 4
    of_drafts = Measured(model, load, speculation=THREE_AHEAD, drafter=ModelDrafter(small, model))
    with_drafter = EngineMemory(draft=DraftMemory(model=described(small)), num_ahead=3)
    for engine, found in ((EngineMemory(), measured), (with_drafter, of_drafts)):
        assert call_of(model, engine, load).peak.total == pytest.approx(found.peak_bytes, rel=0.2)


@pytest.mark.parametrize("bound", [None, 60_000])
def test_latents_take_the_forecast_bytes(bound: int | None) -> None:
    model, load = tiny_model("minicpm3", vocab_size=512), replace(LOAD, num_sequences=10)
    cache = call_of(model, EngineMemory(max_cache_bytes=bound), load).cache
    assert cache is not None and cache.position_bytes == 2 * (16 + 16) * 4  # layers, features, fp32
    measured = Measured(model, load, max_cache_bytes=bound).stats.cache_bytes
    assert cache.final_bytes == (measured if bound is not None else pytest.approx(measured, rel=0.05))


def test_a_draft_model_keeps_weights_and_a_distilled_one_also_its_optimizer() -> None:
    model, small = target(), drafter()
    weights = sum(parameter.nbytes for parameter in small.parameters())
    fixed, learning = (DraftMemory(model=described(small), learns=learns) for learns in (False, True))
    assert draft_bytes(fixed, element_bytes=4) == weights
    assert draft_bytes(fixed, element_bytes=2) == weights // 2
    distillation = Distillation(small, learning_rate=1e-3)
    of_drafts = ModelDrafter(small, model, distillation=distillation)
    measured = Measured(model, speculation=THREE_AHEAD, drafter=of_drafts)
    state = [value for kept in distillation._optimizer.state.values() for value in kept.values() if value.dim()]
    assert draft_bytes(learning, element_bytes=2) == weights + sum(value.nbytes for value in state)
    peak = call_of(model, EngineMemory(draft=learning, num_ahead=3)).peak
    assert peak.drafts == weights  # gradients, at the end
    assert peak.total + sum(value.nbytes for value in state) == pytest.approx(measured.peak_bytes, rel=0.15)


FLOW = Dataflow(
    (
        ModelFunctionCall("actor.generate", "generate", "actor", "roll_out", ("batch",), ("rollout",)),
        ModelFunctionCall("reference.infer", "infer", "reference", "score", ("rollout",), ("ref",)),
        ModelFunctionCall("actor.train", "train", "actor", "loss", ("rollout", "ref")),
    )
)


def test_draft_models_count_in_every_call_on_their_targets_generating_ranks() -> None:
    role, small = described(target()), described(drafter())
    plan = ExecutionPlan.from_mapping(
        {"calls": {"actor.generate": "dp2@0-1", "reference.infer": "dp4", "actor.train": "fsdp4"}}
    )
    settings = MemorySettings(copy_bytes=2, engine=EngineMemory(draft=DraftMemory(model=small)))
    forecast = forecast_memory(FLOW, plan, {"actor": role, "reference": role}, settings, None, ranks=range(4))
    kept = 2 * small.model.num_elements
    for call in ("actor.generate", "reference.infer", "actor.train"):
        assert [forecast.at(call, rank).drafts for rank in range(4)] == [kept, kept, 0, 0]


def test_packed_weights_take_the_forecast_memory_of_the_process() -> None:
    if not packs(torch.float32):
        pytest.skip("this torch packs no weights on this processor")
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 2048, "num_hidden_layers": 3}
    model = tiny_model("llama", **sizes, num_key_value_heads=4).requires_grad_(False)
    counted = packed_bytes(described(model), EngineMemory(packs_weights=True), tp=1, element_bytes=4, num_steps=64)
    # Queries, keys, values, output and three MLP projections of three blocks; and the head.
    assert counted == 4 * (3 * (4 * 1024**2 + 3 * 1024 * 2048) + 1024 * 2048)
    gc.collect()
    before = resident_bytes()
    with packed_linears(model, num_steps=64):
        measured = resident_bytes() - before
    joined = 4 * 2 * 1024 * 2048  # gate and up are concatenated before packing
    assert counted + joined == pytest.approx(measured, rel=0.1)


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_the_layers_that_decoding_absorbs_are_not_packed() -> None:
    role = described(tiny_model("minicpm3"))
    assert role.shape is not None and role.shape.latent is not None
    expanding = replace(role.shape, latent=replace(role.shape.latent, is_cached=False))
    packing, given = EngineMemory(packs_weights=True), {"tp": 1, "element_bytes": 2, "num_steps": 64}
    absorbed, whole = (packed_bytes(one, packing, **given) for one in (role, replace(role, shape=expanding)))
    assert whole - absorbed == 2 * 2 * 16 * 4 * (16 + 16)  # bytes, layers, rank, heads, keys and values


def test_weights_are_packed_only_if_it_pays_and_products_are_not_summed() -> None:
    model = described(tiny_model("qwen2", hidden_size=64))  # its head is tied to the embedding of 128 tokens
    packing = EngineMemory(packs_weights=True)

    def counted(engine: EngineMemory = packing, **changes: int) -> int:
        given = {"tp": 1, "element_bytes": 2, "num_steps": 64} | changes
        return packed_bytes(model, engine, **given)

    of_block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert counted() == 2 * (2 * of_block + 128 * 64)
    assert counted(EngineMemory()) == 0
    assert counted(num_steps=16) == 0  # too few steps to pay for the copies
    assert counted(element_bytes=4) == 0  # the matrices are too small in fp32
    columns = 64 * 64 + 2 * 64 * 32 + 2 * 64 * 128  # the other products are summed over ranks
    assert counted(tp=2) == 2 * (2 * columns + 128 * 64) // 2
