"""Keys, values and graphs are freed after each generation, or kept for the next one."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_realloc import PromptDataModule, ReallocStrategy
from lightning_realloc.algorithms.base.generation_options import FreeCache, GenerationOptions
from lightning_realloc.generation import GenerationEngine, SamplingParams, engine_parts
from lightning_realloc.generation.forward.cuda_graphs import StepGraphs
from tests.devices import CPU_ALONE
from tests.generation.forward.test_cuda_graphs import Recorder
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerPool

SAMPLING = SamplingParams(n=2, max_new_tokens=8, ignore_eos=True)


class Kept(Callback):
    """Records, after every iteration, the graphs captured so far and the bytes of the engine's cache."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.captured: list[int] = []
        self.cache_bytes: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Read the engine."""
        self.captured.append(self.recorder.num_captured)
        self.cache_bytes.append(sum(engine._cache.num_bytes for engine in ENGINES))


ENGINES: list[GenerationEngine] = []


class ListedEngine(GenerationEngine):
    """Makes the engines of a run known to this module."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        ENGINES.append(self)


def run_grpo(free_cache: FreeCache) -> tuple[Outcome, list[int], list[int]]:
    """Train for four iterations, with graphs that run their work again."""
    ENGINES.clear()
    recorder = Recorder()
    kept = Kept(recorder)
    captured = partial(StepGraphs, make_record=lambda: recorder, device_type="cpu")
    module = runs.grpo(sampling=SAMPLING, generation=GenerationOptions(free_cache=free_cache))
    target = "lightning_realloc.strategies.calls.native_engines.GenerationEngine"
    with mock.patch.object(engine_parts, "StepGraphs", captured), mock.patch(target, ListedEngine):
        plan = runs.calls(actor_generate="dp1", reference_infer="dp1", actor_train="dp1")
        outcome = runs.train(module, plan, 1, Batches(4), callbacks=[kept])
    return outcome, kept.captured, kept.cache_bytes


@CPU_ALONE
def test_a_kept_cache_keeps_its_graphs_over_changes_of_the_weights(workers: WorkerPool) -> None:
    ((freed, captured, freed_bytes),), ((kept, captured_once, kept_bytes),) = (
        workers.run(run_grpo, free, world_size=1, init_process_group=False) for free in (True, False)
    )
    assert kept.tokens == freed.tokens
    assert kept.rewards == freed.rewards
    assert runs.largest_difference(kept.weights, freed.weights) < 1e-5
    assert freed_bytes == [0] * 4
    assert kept_bytes[0] > 0 and len(set(kept_bytes)) == 1
    assert captured[0] < captured[1] < captured[2] < captured[3]
    assert 0 < captured_once[1] == captured_once[2] == captured_once[3]


PLAN = runs.calls(actor_generate="dp1", reference_infer="dp1", actor_train="dp1")
ROWS = [{"prompt": "one and two"}, {"prompt": "three"}] * 5


class Held(Callback):
    """Records whether engines keep their caches, and after every iteration the engine's graphs and bytes."""

    def __init__(self) -> None:
        self.keeps = False
        self.graphs: list[list[int]] = []
        self.cache_bytes: list[int] = []
        self.capture_s: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Read the strategy and the engine."""
        self.keeps = trainer.strategy.runner.engines.keeps_caches  # type: ignore[attr-defined]
        (engine,) = ENGINES
        assert engine._graphs is not None
        self.graphs.append(list(map(id, engine._graphs._graphs.values())))
        self.cache_bytes.append(engine._cache.num_bytes)
        self.capture_s.append(float(trainer.callback_metrics["capture_s/actor.generate"]))


def fit_on_gpu(
    free_cache: FreeCache, deterministic: bool, memory: str | None, peft: dict[str, Any] | None = None
) -> tuple[bool, list[list[int]], list[int]]:
    """Train for five iterations; return what `Held` records, with the bytes after the fit as the last ones.

    Without captures in the last iteration, its graphs are those of the one before.
    """
    ENGINES.clear()
    held = Held()
    models = {name: tiny_model("llama", vocab_size=300) for name in ("actor", "reference")}
    settings = GenerationOptions(free_cache=free_cache)
    module = runs.grpo(**models, peft_config=peft, sampling=SAMPLING, generation=settings)
    options = {"precision": "bf16-mixed", "accelerator": "cuda", "deterministic": deterministic}
    with mock.patch("lightning_realloc.strategies.calls.native_engines.GenerationEngine", ListedEngine):
        trainer = runs.trainer(ReallocStrategy(PLAN, memory_per_device=memory), 1, callbacks=[held], **options)
        trainer.fit(module, PromptDataModule(ROWS, batch_size=2))
    (engine,) = ENGINES
    assert "_kept_merged_weights" not in vars(engine._model)
    assert held.capture_s[0] > 0
    assert (held.capture_s[-1] == 0) is held.keeps
    return held.keeps, held.graphs, [*held.cache_bytes, engine._cache.num_bytes]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("free_cache", "deterministic", "memory", "keeps"),
    [
        ("auto", False, None, True),
        ("auto", False, "2500KB", False),  # enough for weights and optimizer, but not for all next to each other
        ("auto", True, None, False),
        (True, False, None, False),
        (False, True, "2500KB", True),
    ],
)
def test_a_gpu_keeps_caches_and_graphs_where_memory_suffices(
    workers: WorkerPool, free_cache: FreeCache, deterministic: bool, memory: str | None, keeps: bool
) -> None:
    ((kept, graphs, (*cache_bytes, bytes_after)),) = workers.run(
        fit_on_gpu, free_cache, deterministic, memory, world_size=1, init_process_group=False
    )
    assert kept is keeps
    assert all((size > 0) is keeps for size in cache_bytes)
    assert bool(graphs[-1]) is keeps
    assert graphs[-1] == graphs[-2]
    assert bytes_after == 0


@pytest.mark.gpu
def test_graphs_outlive_the_adapters_that_each_generation_merges(workers: WorkerPool) -> None:
    peft = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
    ((kept, graphs, (*_, bytes_after)),) = workers.run(
        fit_on_gpu, "auto", False, None, peft, world_size=1, init_process_group=False
    )
    assert kept
    assert graphs[-1] and graphs[-1] == graphs[-2]
    assert bytes_after == 0
