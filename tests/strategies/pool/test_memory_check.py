"""Predicted memory matches measured memory, and plans that do not fit are refused before a model is built."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lightning_realloc.algorithms.base.generation_options import GenerationOptions
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.callbacks import MemoryMonitor
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.generation import SamplingParams, Speculation
from lightning_realloc.layout import Layout
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.runtime.measure.memory_stats import StorageMeter
from lightning_realloc.runtime.transfer.agreement import TransportName
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.pool.memory_check import describe_roles, engine_memory, has_room_for_caches
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.forecast import forecast_memory
from lightning_realloc.tuning.memory.parts import HEADROOM, MemorySettings, Workload
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from tests.devices import CPU_ALONE
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.runs import calls
from tests.tuning.memory.test_forecast import FLOW, ROLES
from tests.workers import WorkerPool

# Every prompt and response has the same length, so that the test compares only the arithmetic.
LOAD = Workload(
    num_sequences=16, prompt_tokens=8, response_tokens=32, micro_batch_tokens=160, samples_per_prompt=2
)  # fmt: skip
SETTINGS = MemorySettings(shares_memory=True, builds_on_device=True)
MEDIUM: dict[str, Any] = {  # 10 million weights in few layers: time grows with the number of monitored operations
    "vocab_size": 3072, "hidden_size": 384, "intermediate_size": 1248, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
TOLERANCE = 0.1

Comparison = dict[str, tuple[int, int]]
"""Call -> bytes predicted and measured, on one rank."""


class EvenBatches:
    """Three batches of eight prompts of equal length."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Samples]:
        for index in range(3):
            rows = [torch.arange(3, 3 + LOAD.prompt_tokens) + number for number in range(8)]
            columns = {"prompt_ids": Ragged.from_list(rows), "prompt": tuple(f"prompt {number}" for number in range(8))}
            yield Samples(torch.arange(8) + 8 * index, columns)


class IterationPeaks(MemoryMonitor):
    """Records the peaks of every iteration separately.

    A gloo thread holds a collective's buffer until the thread runs again. On a busy machine that may be after the
    next allocation, which then counts both. Such a delay only adds bytes, and to some iterations alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.iterations: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Record the iteration's peaks, and reset them."""
        super().on_train_batch_end(trainer, *args)
        self.iterations.append(self.phases)
        self.phases = {}

    def least(self) -> dict[str, int]:
        """Return call -> its smallest peak from the second iteration on, when all state exists."""
        return {call: min(peaks[call] for peaks in self.iterations[1:]) for call in self.iterations[0]}


@dataclass(frozen=True)
class Measured:
    """A run's pool of models, its memory settings, and this rank's bytes in every call."""

    pool: Any
    roles: dict[str, RoleMemory]
    settings: MemorySettings
    rank: int
    peaks: dict[str, int]


def compare(
    plan: dict[str, Any], family: str = "llama", generation: dict[str, Any] | None = None, **given: Any
) -> Comparison:
    """Train for some iterations; return this rank's measured and predicted bytes."""
    return compare_forecast(measure(plan, family, generation, **given))


def compare_forecast(run: Measured) -> Comparison:
    """Return this rank's forecast and measured bytes."""
    forecast = forecast_memory(run.pool.dataflow, run.pool.plan, run.roles, run.settings, LOAD, ranks=(run.rank,))
    return {call: (forecast.at(call, run.rank).total, peak) for call, peak in run.peaks.items()}


def measure(
    plan: dict[str, Any],
    family: str = "llama",
    generation: dict[str, Any] | None = None,
    peft: dict[str, Any] | None = None,
    precision: str = "32-true",
    transport: TransportName = "auto",
    **sizes: Any,
) -> Measured:
    """Train for three iterations; return this rank's measured bytes."""
    world_size, monitor = runs.world_size(), IterationPeaks()
    config = tiny_model(family, **sizes).config
    standing = _bytes_alive()  # memory that earlier tests left in this process, and the models of `tiny_model`
    sampling = SamplingParams(n=LOAD.samples_per_prompt, max_new_tokens=LOAD.response_tokens, ignore_eos=True)
    options = runs.options(micro_batch_tokens=LOAD.micro_batch_tokens)
    given = {"sampling": sampling, "train_options": options, "tokenizer": byte_tokenizer(), **(generation or {})}
    reference = None if peft else config
    module = runs.RecordedGRPO(
        config, runs.low_tokens, reference=reference, learning_rate=1e-2, peft_config=peft, **given
    )
    module.share_prompts = False
    strategy = ReallocStrategy(plan, transport=transport)
    trainer = runs.trainer(strategy, world_size, callbacks=[monitor], precision=precision)
    trainer.fit(module, EvenBatches())  # type: ignore[arg-type]
    # Packed weights lie in memory that torch did not allocate, and the monitor does not count: tests/tuning does.
    engine = replace(engine_memory(module, torch.device("cpu"), torch.float32), packs_weights=False)
    half = {"copy_bytes": 2, "gathered_bytes": 2} if precision == "bf16-mixed" else {}
    settings = replace(SETTINGS, engine=engine, shares_memory=transport == "auto", **half)
    draft = None if module.speculation is None else module.speculation.draft_model
    standing -= 0 if draft is None else _mapped_bytes(draft)
    return Measured(
        strategy.pool, describe_roles(module.roles(), {}), settings, trainer.global_rank,
        {call: peak - standing for call, peak in monitor.least().items()},
    )  # fmt: skip


def _bytes_alive() -> int:
    meter = StorageMeter()
    meter.start()
    meter.stop()
    return meter.current_bytes


def _mapped_bytes(folder: str) -> int:
    """Return the bytes of weights in memory that torch did not allocate, which the monitor does not count."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    return sum(weight.nbytes for weight in loaded.parameters() if not weight.untyped_storage().resizable())


def check(found: list[Comparison], tolerance: float = TOLERANCE) -> None:
    """Check that every call on every rank used the predicted bytes, within the tolerance."""
    for rank, comparison in enumerate(found):
        assert set(comparison) == {"actor.generate", "reference.infer", "actor.train"}
        for call, (predicted, measured) in comparison.items():
            error = predicted / measured - 1
            assert abs(error) <= tolerance, f"rank {rank}, {call}: {predicted} predicted, {measured} measured"


@CPU_ALONE
@pytest.mark.parametrize(
    ("train", "generate", "infer"),
    matrix(
        [("dp2", "dp2", "dp2"), ("fsdp2", "dp2", "fsdp2"), ("tp2", "dp2", "tp2"), ("fsdp2", "tp2", "dp1@1")],
        ("fsdp2", "tp2", "dp1@1"),  # a role is absent on one rank
    ),
)
def test_peaks_of_a_tiny_model_are_predicted(workers: WorkerPool, train: str, generate: str, infer: str) -> None:
    plan = calls(actor_train=train, actor_generate=generate, reference_infer=infer)
    check(workers.run(compare, plan, world_size=2, init_process_group=False, deadline_s=120.0))


@pytest.mark.exhaustive
@CPU_ALONE
def test_peaks_are_predicted_on_a_mesh_of_two_axes(workers: WorkerPool) -> None:
    plan = calls(actor_train="fsdp2.tp2@0-3", actor_generate="dp2.tp2@0-3", reference_infer="dp2@2-3")
    check(workers.run(compare, plan, world_size=4, init_process_group=False, deadline_s=150.0))


@pytest.mark.exhaustive  # few logits: above
@CPU_ALONE
def test_peaks_are_predicted_where_ranks_share_many_logits(workers: WorkerPool) -> None:
    plan = calls(actor_train="tp2", actor_generate="tp2", reference_infer="tp2")
    check(workers.run(compare_many_logits, plan, world_size=2, init_process_group=False, deadline_s=120.0))


def compare_many_logits(plan: dict[str, Any]) -> Comparison:
    """Compare a model whose logits need the most memory."""
    return compare(plan, vocab_size=8192, hidden_size=32, intermediate_size=64)


PEFT = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
ADAPTED = {"vocab_size": 1024, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "peft": PEFT}
"""A model of 1.5 million weights."""


@CPU_ALONE
@pytest.mark.parametrize(
    ("train", "generate", "infer", "precision"),
    # The test of kept caches trains adapters, too.
    matrix([("fsdp2", "tp2", "dp2", "bf16-mixed"), ("tp2", "dp2", "tp2", "32-true")]),
)
def test_peaks_are_predicted_where_adapters_are_trained(
    workers: WorkerPool, train: str, generate: str, infer: str, precision: str
) -> None:
    plan = calls(actor_train=train, actor_generate=generate, reference_infer=infer)
    found = workers.run(compare_adapted, plan, precision, world_size=2, init_process_group=False, deadline_s=120.0)
    check(found, tolerance=0.12)  # activations, which are predicted less exactly, have a larger share


def compare_adapted(plan: dict[str, Any], precision: str) -> Comparison:
    """Compare predicted and measured bytes of adapters."""
    return compare(plan, "qwen3", precision=precision, **ADAPTED)


@pytest.mark.exhaustive  # counted by hand: tests/tuning
@CPU_ALONE
def test_peaks_are_predicted_where_adapters_of_experts_are_trained(workers: WorkerPool) -> None:
    plan = calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="dp2")
    found = workers.run(compare_adapted_experts, plan, world_size=2, init_process_group=False, deadline_s=120.0)
    check(found, tolerance=0.12)


def compare_adapted_experts(plan: dict[str, Any]) -> Comparison:
    """Compare predicted and measured bytes of a mixture of experts, most of whose weights are experts."""
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    peft = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "target_parameters": experts}
    return compare(plan, "mixtral", vocab_size=1024, hidden_size=192, intermediate_size=512, peft=peft)


@pytest.mark.exhaustive  # counted by hand: tests/tuning
def test_forecasts_and_searches_count_the_measured_bytes_if_two_roles_share_a_base(workers: WorkerPool) -> None:
    plan = calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="dp2")
    found = workers.run(compare_with_search, plan, world_size=2, init_process_group=False, deadline_s=120.0)
    for comparisons in zip(*found, strict=True):
        check(list(comparisons), tolerance=0.12)


def compare_with_search(plan: dict[str, Any]) -> tuple[Comparison, Comparison]:
    """Compare the forecast, and what a search counts: each role's home, a shared base once, and each replica once."""
    run = measure(plan, "qwen3", transport="direct", **ADAPTED)
    flow, chosen = run.pool.dataflow, run.pool.plan
    prices = RooflineEstimator(flow, ClusterSpec.local(2), run.roles, run.settings, LOAD)
    homes = {role: chosen.layout(flow.home_call(role).name) for role in {prices.owner(role) for role in flow.roles}}
    places = {(prices.owner(str(call.role)), chosen.layout(call.name)) for call in flow.model_calls}
    kept = sum(prices.resident_bytes(role, layout, is_home=layout == homes[role]) for role, layout in places)
    counted = {call: (kept + prices.active_bytes(call, chosen.call(call)), peak) for call, peak in run.peaks.items()}
    return compare_forecast(run), counted


@pytest.mark.exhaustive  # a llama: above; activations of experts: tests/tuning/shapes/test_experts.py
@CPU_ALONE
@pytest.mark.parametrize("family", ["qwen3", "gemma", "phi3", "gpt_neox", "gpt2", "opt", "mixtral"])
def test_peaks_of_other_families_are_predicted(workers: WorkerPool, family: str) -> None:
    plan = calls(actor_train="dp1", actor_generate="dp1", reference_infer="dp1")
    check(workers.run(compare, plan, family, world_size=1, init_process_group=False, deadline_s=120.0))


@pytest.mark.exhaustive
@CPU_ALONE
def test_peaks_are_predicted_where_a_draft_model_learns_and_the_cache_is_bounded(
    workers: WorkerPool, tmp_path: Path
) -> None:
    tiny_model("llama", hidden_size=96, num_hidden_layers=3).save_pretrained(tmp_path)
    drafts = Speculation(drafter="model", draft_model=str(tmp_path), draft_learning_rate=1e-3, num_draft_tokens=2)
    plan = calls(actor_train="dp2", actor_generate="dp2", reference_infer="dp2")
    settings = {"speculation": drafts, "generation": GenerationOptions(max_cache_bytes=300_000)}
    check(workers.run(compare, plan, "llama", settings, world_size=2, init_process_group=False))


def has_room(budget: float, offload: tuple[str, ...] = (), frees_copies: bool = False) -> bool:
    """Return whether caches may be kept, with a budget on rank 0 as a part of the peak with kept caches."""
    plan = replace(ExecutionPlan.static(FLOW, Layout.parse("dp2@0-1")), offload=offload)
    kept = forecast_memory(FLOW, plan, ROLES, MemorySettings().with_kept_caches(), LOAD, ranks=(0,))
    most = kept.iteration_peak.parts.total
    rank, settings = int(os.environ.get("RANK", "0")), MemorySettings(frees_copies=frees_copies)
    budget_bytes = int(budget * most / (1 - HEADROOM)) + 2 if rank == 0 else 1 << 40
    return has_room_for_caches(FLOW, plan, ROLES, settings, LOAD, rank=rank, budget_bytes=budget_bytes)


def test_caches_are_kept_where_every_rank_has_room_and_nothing_leaves_memory(workers: WorkerPool) -> None:
    assert has_room(1.0)
    assert not has_room(0.99)
    assert not has_room(1.0, offload=("reference",))
    assert not has_room(1.0, frees_copies=True)
    assert workers.run(has_room, 1.0, world_size=2) == [True, True]
    assert workers.run(has_room, 0.99, world_size=2) == [False, False]


def compare_kept(plan: dict[str, Any], sizes: dict[str, Any]) -> Comparison:
    """Compare a run whose engines keep their caches."""
    return compare(plan, "llama", {"generation": GenerationOptions(free_cache=False)}, **sizes)


@CPU_ALONE
@pytest.mark.exhaustive  # whether they fit: above; their bytes: tests/tuning/memory
@pytest.mark.parametrize("trained", ["all weights", "adapters"])
def test_peaks_are_predicted_where_the_cache_is_kept(workers: WorkerPool, trained: str) -> None:
    plan = calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="dp2")
    sizes = ADAPTED if trained == "adapters" else {}
    check(workers.run(compare_kept, plan, sizes, world_size=2, init_process_group=False))


@pytest.mark.exhaustive
@CPU_ALONE
@pytest.mark.slow
def test_peaks_of_a_medium_model_are_predicted(workers: WorkerPool) -> None:
    plan = calls(actor_train="fsdp2", actor_generate="tp2", reference_infer="fsdp2")
    check(workers.run(compare_medium, plan, world_size=2, init_process_group=False, deadline_s=170.0))


def compare_medium(plan: dict[str, Any]) -> Comparison:
    """Compare a model of 10 million weights."""
    return compare(plan, **MEDIUM)


class _Unbuilt(Role):
    """A role whose weights must not be loaded."""

    def build(self, *, seed: int) -> Any:
        """Fail: the plan must be refused earlier."""
        raise AssertionError(f"{self.name} was built, seed {seed}")


def refused(plan: Any, budget: str) -> str:
    """Return the error of a fit."""
    config: PreTrainedConfig = tiny_model("llama").config
    module = runs.grpo(actor=config, reference=config)
    roles = [_Unbuilt(name=role.name, source=role.source, trained=role.trained) for role in module.roles()]
    module.roles = lambda: tuple(roles)
    strategy = ReallocStrategy(plan, memory_per_device=budget)
    with pytest.raises(PlanError) as error:
        runs.trainer(strategy, runs.world_size()).fit(module, EvenBatches())  # type: ignore[arg-type]
    return str(error.value)


def test_a_plan_over_the_budget_is_refused_on_every_rank_before_a_model_is_built(workers: WorkerPool) -> None:
    found = workers.run(refused, "static", "500KB", world_size=2, init_process_group=False, deadline_s=60.0)
    assert found[0] == found[1]
    assert re.match(r"the plan needs [0-9.]+ MiB on rank 0 in actor.train, and a device has 0.48 MiB \(", found[0])
    assert re.search(r"no change that was tried makes it fit \(the nearest: .*\); use more ranks", found[0])
    assert re.search(r"none of the [0-9]+ plans tried fits, even without .* or adapters", found[0])
    own = calls(actor_train="dp2", actor_generate="dp2", reference_infer="dp2")
    other, _ = workers.run(refused, own, "1MB", world_size=2, init_process_group=False, deadline_s=60.0)
    assert other.endswith("without plan=, or with plan='heuristic', the run takes one that fits")
    (none,) = workers.run(refused, "heuristic", "50KB", world_size=1, init_process_group=False, deadline_s=60.0)
    assert re.search(r"none of the [0-9]+ plans tried fits, even without .* use at least [0-9]+ such devices", none)
    (cheaper,) = workers.run(refused, "static", "1300KB", world_size=1, init_process_group=False, deadline_s=60.0)
    assert re.search(
        r"one of these would fit: .*peft_config=\{'peft_type': 'LORA', .*\} \([0-9.]+ MiB\); "
        r"or Trainer\(precision='bf16-true'\) \([0-9.]+ MiB\); or both",
        cheaper,
    )


def test_waiting_samples_count_where_an_algorithm_has_an_environment() -> None:
    config, settings = tiny_model("llama").config, {"tokenizer": byte_tokenizer()}
    counted = [
        engine_memory(module, torch.device("cpu"), torch.float32).has_environment
        for module in (
            runs.RecordedGRPO(config, runs.low_tokens, **settings),
            runs.RecordedGRPO(config, runs.low_tokens, environment=lambda turn: None, **settings),
        )
    ]
    assert counted == [False, True]


def test_a_budget_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(PlanError, match="'much' is no amount of memory"):
        ReallocStrategy(memory_per_device="much")
