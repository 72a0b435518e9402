"""Bytes and seconds that a vLLM next to generating ranks takes, in forecasts of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_realloc.algorithms.base.generation_options import GenerationOptions
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.generation import VLLMOptions
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout
from lightning_realloc.strategies.pool.memory_check import memory_of_vllm
from lightning_realloc.tuning.estimate.hardware import Efficiency
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.forecast import MemoryForecast, forecast_memory
from lightning_realloc.tuning.memory.parts import EngineMemory, MemorySettings, Workload
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from tests.tuning.examples import PPO_FLOW, SMALL, roles_of, with_adapters

LOAD = Workload(num_sequences=8, prompt_tokens=16, response_tokens=16)
GIB = 1 << 30


def plan(generate: str) -> ExecutionPlan:
    calls = {call.name: "dp2@0-1" for call in PPO_FLOW.model_calls}
    return ExecutionPlan.from_mapping({"calls": calls | {"actor.train": "fsdp2@0-1", "actor.generate": generate}})


def forecast(engine: EngineMemory, generate: str = "dp2@0-1") -> MemoryForecast:
    settings = MemorySettings(engine=engine)
    return forecast_memory(PPO_FLOW, plan(generate), roles_of(SMALL), settings, LOAD, ranks=(0, 1))


def on_gpu(**options: object) -> EngineMemory:
    bound = options.pop("max_cache_bytes", None)
    vllm = VLLMOptions(**options)  # type: ignore[arg-type]
    return memory_of_vllm(GenerationOptions(vllm=vllm, max_cache_bytes=bound), 80 * GIB)  # type: ignore[arg-type]


@pytest.mark.parametrize(("generate", "divisor"), [("dp2@0-1", 1), ("tp2@0-1", 2)])
def test_a_vllm_holds_its_own_weights_keys_and_values_in_every_call(generate: str, divisor: int) -> None:
    weights = 4 * roles_of(SMALL)["actor"].model.num_elements
    found = forecast(memory_of_vllm(GenerationOptions(max_cache_bytes=1_000_000), None), generate)
    for phase in ("actor.generate", "actor.train", "-> actor.generate"):
        size = found.at(phase, 0).vllm - 1_000_000
        # Norms are whole on both ranks.
        assert weights / divisor <= size < 1.01 * weights / divisor
    assert found.at("actor.generate", 0).kv_cache == 0
    assert found.at("actor.generate", 0).staging >= weights // divisor, "weights go through shared memory"
    assert forecast(EngineMemory(), generate).at("actor.train", 0).vllm == 0


def test_without_a_bound_it_takes_a_share_of_the_gpu_and_one_gibibyte_beside_weights_on_cpu() -> None:
    assert forecast(on_gpu()).at("actor.train", 0).vllm == int(0.3 * 80 * GIB)
    assert forecast(on_gpu(memory_share=0.5)).at("actor.generate", 1).vllm == 40 * GIB
    weights = 4 * roles_of(SMALL)["actor"].model.num_elements
    assert forecast(on_gpu(max_cache_bytes=GIB)).at("actor.generate", 0).vllm == weights + GIB
    assert forecast(memory_of_vllm(GenerationOptions(), None)).at("actor.train", 0).vllm == weights + GIB


def test_one_that_sleeps_takes_memory_in_its_call_alone_and_a_server_none() -> None:
    asleep = forecast(on_gpu(sleep=True))
    assert asleep.at("actor.generate", 0).vllm > 0
    assert asleep.at("actor.train", 0).vllm == asleep.at("-> actor.generate", 0).vllm == 0
    server = forecast(on_gpu(address="http://127.0.0.1:8000"))
    assert {entry.parts.vllm for entry in server.phases} == {0}


def adapted(role: RoleMemory) -> RoleMemory:
    return with_adapters(role, rank=4)


def test_adapters_that_go_alone_are_not_merged_on_the_rank() -> None:
    roles = roles_of(SMALL) | {"actor": adapted(roles_of(SMALL)["actor"])}

    def copies(engine: EngineMemory) -> int:
        found = forecast_memory(PPO_FLOW, plan("dp2@0-1"), roles, MemorySettings(engine=engine), LOAD, ranks=(0,))
        return found.at("actor.generate", 0).copies

    alone = copies(on_gpu(max_cache_bytes=GIB))
    assert copies(on_gpu(max_cache_bytes=GIB, merge_adapters=True)) > alone


def test_the_hand_over_takes_seconds_for_the_bytes_that_are_given() -> None:
    cluster, call = ClusterSpec.local(2, "h100"), CallPlan(Layout.parse("dp2"))
    roles = roles_of(SMALL)
    efficiency = replace(Efficiency(), hand_over_share=0.25)

    def seconds(engine: EngineMemory, actor: RoleMemory) -> float:
        settings = MemorySettings(copy_bytes=2, engine=engine)
        estimator = RooflineEstimator(
            PPO_FLOW, cluster, roles | {"actor": actor}, settings, LOAD, efficiency=efficiency
        )
        return estimator.call_seconds("actor.generate", call).total

    def taking(num_elements: float) -> float:
        return 2 * num_elements / (0.25 * cluster.device_memory_bytes_per_s)

    whole, small = roles["actor"], adapted(roles["actor"])
    own = seconds(EngineMemory(), whole)
    assert seconds(on_gpu(), whole) - own == pytest.approx(taking(whole.model.num_elements))
    merged, alone = (seconds(on_gpu(merge_adapters=merges), small) for merges in (True, False))
    given = small.model.num_elements, 2 * 64 * 4 * 4
    assert merged - alone == pytest.approx(taking(given[0]) - taking(given[1]))
