"""Profiles cover all passes that a run's plans need, are measured once, and are reused only on the same machine."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from pytest import MonkeyPatch

from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.layout.dims import ParallelDims
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.measure import profiler, profiling
from lightning_realloc.strategies.measure.profiling import Profile
from lightning_realloc.tuning.estimate.pass_samples import Size
from lightning_realloc.tuning.estimate.profile import ProfileTable
from lightning_realloc.tuning.memory.parts import usable_bytes
from lightning_realloc.tuning.shapes.lengths import Lengths
from tests.devices import CPU_ALONE
from tests.models import byte_tokenizer
from tests.strategies import runs
from tests.strategies.algorithms import preferences
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

PAIRS = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "x" * (1 + n % 3)} for n in range(12)]
LENGTHS = [Lengths((6, 6, 6), (5, 6, 7))]


class Profiles(Callback):
    """Profiles the models after the first iteration."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.found: dict[str, Profile | None] = {}
        self.warnings: list[str] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        before = {name: parameter.clone() for name, parameter in trainer.lightning_module.named_parameters()}
        self.found["first"] = strategy.profile(LENGTHS, cache=self.cache)
        self.found["again"] = strategy.profile(LENGTHS, cache=self.cache)
        self.found["no time"] = strategy.profile(LENGTHS, cache=None, seconds=1e-3)
        with MonkeyPatch.context() as patch:
            patch.setattr(profiling, "MIN_PROFILE_S", 0.0)
            self.found["far too slow"] = strategy.profile(LENGTHS, cache=None, seconds=1e-3)
            patch.setattr(profiler, "MAX_BASE_OVERRUN", 1e6)
            self._pretend_another_machine(trainer)
            with _LogMessages(self.warnings):
                self.found["elsewhere, in a hurry"] = strategy.profile(LENGTHS, cache=self.cache, seconds=1e-3)
        after = dict(trainer.lightning_module.named_parameters())
        assert all(bool((after[name] == value).all()) for name, value in before.items())

    def _pretend_another_machine(self, trainer: L.Trainer) -> None:
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            (path,) = self.cache.glob("*.json")
            content = json.loads(path.read_text())
            content["machine"]["torch"] = "1.0"
            path.write_text(json.dumps(content))
        trainer.strategy.barrier()


class _LogMessages(logging.Handler):
    """Collects the messages of profiling's logger."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.messages = messages

    def __enter__(self) -> None:
        logging.getLogger("lightning_realloc.strategies.measure.profiling").addHandler(self)

    def __exit__(self, *error: object) -> None:
        logging.getLogger("lightning_realloc.strategies.measure.profiling").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _profiles(cache: str) -> tuple[dict[str, str | None], dict[str, str], list[str]]:
    """Return the tables, the shapes of the roles, and the log messages."""
    profiles = Profiles(Path(cache))
    runs.trainer(ReallocStrategy(), 2, callbacks=[profiles], max_steps=1).fit(runs.grpo(), Batches(1))
    first = profiles.found["first"]
    assert first is not None
    tables = {name: None if one is None else one.table.to_json() for name, one in profiles.found.items()}
    return tables, dict(first.models), profiles.warnings


@CPU_ALONE
def test_a_run_measures_all_passes_of_plans_and_stores_them(workers: WorkerPool, tmp_path: Path) -> None:
    everyone = workers.run(_profiles, str(tmp_path), world_size=2, init_process_group=False, deadline_s=120.0)
    tables, models, warnings = everyone[0]
    assert everyone[1][0] == tables, "ranks must agree on every second"
    first = ProfileTable.from_json(str(tables["first"]))
    assert set(models) == {"actor", "reference"}
    assert models["actor"] == models["reference"], "models of one shape are measured once"
    assert {(key.kind, key.dims) for key in first.passes} == {
        *((kind, dims) for kind in ("infer", "decode") for dims in _degrees(dp=False)),
        *((kind, dims) for kind in ("train", "train_last") for dims in _degrees(dp=True)),
    }
    for times in first.passes.values():
        assert times.block(20, 12) + times.rest(20, 12) > 0
    assert first.crowding[1].points[0] == (1.0, 1.0) and first.slowdown_of(2) >= 1.0
    assert first.offload is not None and 0 < first.offload(1 << 22) < 1.0, "4 MiB from a file in a second at most"
    assert tables["again"] == tables["first"], "the second time it is read from disk"
    # The stored one is of another machine, so the models are measured anew.
    hurried = ProfileTable.from_json(str(tables["elsewhere, in a hurry"]))
    assert {key.dims for key in hurried.passes} == {ParallelDims()}, "what is needed of every model"
    assert len(hurried.moves) == 1 and hurried.offload is None and len(first.moves) > 1
    assert tables["no time"] is None and tables["far too slow"] is None
    (warning,) = warnings
    assert "another machine (torch 1.0, now" in warning


def _degrees(*, dp: bool) -> list[ParallelDims]:
    replicas = [ParallelDims(dp=2)] if dp else []
    return [ParallelDims(), ParallelDims(fsdp=2), ParallelDims(tp=2), *replicas]


def test_tokens_of_measured_passes_differ_since_equal_ones_reach_the_same_few_experts() -> None:
    packed = profiler._pack(Size(2, 3, 4), torch.device("cpu"), 7)()
    assert packed.lengths == (7, 7) and packed.input_ids.flatten().bincount().tolist() == [2] * 7


class _Profiled(Callback):
    """Profiles the models after the only iteration."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Profile them."""
        self.profile: Profile = trainer.strategy.profile(LENGTHS, cache=None)  # type: ignore[attr-defined]


class _Judged(Callback):
    """Evaluates other plans after the first iteration, and installs one."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Evaluate, propose, and install a plan."""
        strategy: Any = trainer.strategy
        if trainer.global_step > 1:
            return
        self.start = strategy.plan
        plan_evaluator = strategy.plan_evaluator(LENGTHS)
        assert plan_evaluator.task.usable_bytes == usable_bytes(strategy.cluster.device_memory_bytes)
        self.seconds = plan_evaluator.call_seconds(strategy.plan)
        self.bytes = max(plan_evaluator.peak_bytes(strategy.plan).values())
        proposed = [candidate.plan for candidate in plan_evaluator.propose(strategy.plan, seconds=0.2, seed=0)]
        self.proposed = strategy.broadcast(proposed)  # searches have a time limit, so ranks may differ
        for plan in self.proposed[:1]:
            strategy.set_plan(plan)


def _judge_compiled() -> tuple[int, bool]:
    """Return the number of programs compiled for measuring, and whether a frozen role shares a profile."""
    profiled = _Profiled()
    module = runs.grpo(train_options=runs.options(compile="eager"))
    trainer = runs.trainer(ReallocStrategy(), 1, callbacks=[profiled], max_steps=1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with MonkeyPatch.context() as patch:
        # Training does not compile here, so that only programs of measuring count.
        patch.setattr("lightning_realloc.strategies.calls.train_call.compiled_blocks", lambda *_: nullcontext())
        trainer.fit(module, Batches(1))
    names = profiled.profile.models
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], names["actor"] == names["reference"]


@pytest.mark.exhaustive
def test_compiled_training_is_measured_with_compiled_blocks(workers: WorkerPool) -> None:
    ((programs, is_shared),) = workers.run(_judge_compiled, world_size=1, init_process_group=False, deadline_s=120.0)
    assert programs > 0
    assert is_shared


def _judge_precomputed(precompute: bool) -> tuple[dict[str, float], int, list[Any], Any]:
    """Return seconds by call, peak bytes, the proposed plans, and the running one."""
    judged = _Judged()
    module = preferences.dpo(precompute_reference=precompute)
    trainer = runs.trainer(ReallocStrategy(), 2, callbacks=[judged], max_steps=2)
    data = PreferenceDataModule(PAIRS, tokenizer=byte_tokenizer(), batch_size=4)
    trainer.fit(module, datamodule=data)
    return judged.seconds, judged.bytes, [plan.to_mapping() for plan in judged.proposed], judged.start.to_mapping()


def test_a_precomputed_reference_costs_no_time_and_no_memory(workers: WorkerPool) -> None:
    (asked, asked_bytes, _, _), (ahead, bytes_ahead, proposed, start) = (
        workers.run(_judge_precomputed, once, world_size=2, init_process_group=False, deadline_s=120.0)[0]
        for once in (False, True)
    )
    assert "reference.infer" in asked and asked.keys() - {"reference.infer"} == ahead.keys()
    assert bytes_ahead < asked_bytes
    assert proposed, "the test installs a plan"
    assert all(plan["calls"]["reference.infer"] == start["calls"]["reference.infer"] for plan in proposed)
