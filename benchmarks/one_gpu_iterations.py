"""Iterations of GRPO and PPO for `benchmarks.one_gpu`: seconds by call, peak memory, and the first iteration."""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from transformers import LlamaForSequenceClassification

from benchmarks.llamas import build_llama
from benchmarks.one_gpu_setting import Recorder, Scale, Setting
from benchmarks.workload import byte_tokenizer, random_texts
from lightning_realloc import (
    GRPO,
    PPO,
    GenerationOptions,
    MemoryMonitor,
    PromptDataModule,
    ReallocStrategy,
    SamplingParams,
    TrainOptions,
)
from lightning_realloc.algorithms.base.generation_options import FreeCache
from lightning_realloc.callbacks.run_view import run_view
from lightning_realloc.generation.forward.cuda_graphs import StepGraphs
from lightning_realloc.tuning.memory.forecast import forecast_memory
from lightning_realloc.tuning.memory.parts import Workload

MODEL = "1b"
PEAK_TOLERANCE = 0.1
MAX_EXTRA_S = 60.0
"""Seconds by which the first iteration may exceed later ones."""
LEAST_MFU = 0.4
EXTRA_CASES = ("engine as it starts", "blocks compiled")


def share_of_even_ids(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Reward even token ids, which differ between responses of a random model."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


class IterationClock(L.Callback):
    """Seconds of every iteration, and of each of its calls."""

    def __init__(self, setting: Setting) -> None:
        self.iterations: list[float] = []
        self.calls: list[dict[str, float]] = []
        self._setting = setting
        self._begin = 0.0
        self._before: dict[str, float] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the clock."""
        self._setting.synchronize()
        self._before = dict(run_view(trainer).runner.seconds)
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Keep the seconds."""
        self._setting.synchronize()
        self.iterations.append(time.perf_counter() - self._begin)
        after = run_view(trainer).runner.seconds
        self.calls.append({call: spent - self._before.get(call, 0.0) for call, spent in after.items()})


class SyncCounter(L.Callback):
    """Counts, in one iteration, the places in Python code that make the host wait for the device.

    Torch warns of each such operation if it is asked to, which slows the iteration down.

    Args:
        setting: Device; on a CPU nothing is counted.
        iteration: Number of the iteration, from 0 on.
    """

    def __init__(self, setting: Setting, iteration: int) -> None:
        self.places: Counter[str] = Counter()
        self._is_gpu = setting.is_gpu
        self._iteration = iteration
        self._recorded = ExitStack()
        self._caught: list[warnings.WarningMessage] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to count in the chosen iteration."""
        if self._is_gpu and batch_idx == self._iteration:
            self._caught = self._recorded.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop counting."""
        if self._is_gpu:
            torch.cuda.set_sync_debug_mode("default")
        self._recorded.close()
        self.places.update(f"{'/'.join(Path(one.filename).parts[-2:])}:{one.lineno}"
                           for one in self._caught if "synchronizing CUDA operation" in str(one.message))  # fmt: skip
        self._caught = []


def save_model(setting: Setting) -> str:
    """Write the model and its tokenizer once for all arms that read files; return the folder."""
    folder = setting.folder / MODEL
    if not folder.exists():
        build_llama(setting.scale.shapes[MODEL], setting.device).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return str(folder)


def save_scorer(setting: Setting) -> str:
    """Write a sequence classifier of the same shape with one label; return the folder."""
    folder = setting.folder / f"{MODEL} scorer"
    if not folder.exists():
        config = setting.scale.shapes[MODEL].config(torch.bfloat16)
        config.num_labels = 1
        with torch.device(setting.device):
            LlamaForSequenceClassification._from_config(config).to(torch.bfloat16).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return str(folder)


def make_grpo(setting: Setting, compile_backend: str | None = None, *, free_cache: FreeCache = "auto") -> GRPO:
    """Return GRPO on the saved model, with responses of equal length."""
    scale = setting.scale
    options = TrainOptions(micro_batch_tokens=scale.micro_batch_tokens, compile=compile_backend)
    return GRPO(
        save_model(setting), share_of_even_ids, sampling=_sampling(scale, scale.num_responses), learning_rate=1e-6,
        seed=0, train_options=options, generation=GenerationOptions(free_cache=free_cache),
    )  # fmt: skip


def make_ppo(setting: Setting) -> PPO:
    """Return PPO with four models of the saved one's shape: a random reward model judges, and the critic is new."""
    scale = setting.scale
    options = TrainOptions(micro_batch_tokens=scale.micro_batch_tokens)
    return PPO(
        save_model(setting), save_scorer(setting), sampling=_sampling(scale, 1), tokenizer=byte_tokenizer(),
        learning_rate=1e-6, seed=0, train_options=options,
    )  # fmt: skip


def _sampling(scale: Scale, num_responses: int) -> SamplingParams:
    return SamplingParams(n=num_responses, max_new_tokens=scale.response_tokens, ignore_eos=True)


def fit(setting: Setting, module: Any, num_prompts: int, *, iterations: int, callbacks: Sequence[L.Callback]) -> Any:
    """Train for a few iterations on this one device; return the Trainer."""
    scale = setting.scale
    texts = random_texts(num_prompts * iterations, length=scale.prompt_tokens, seed=1)
    data = PromptDataModule([{"prompt": text} for text in texts], batch_size=num_prompts)
    trainer = L.Trainer(
        accelerator="gpu" if setting.is_gpu else "cpu", devices=1, strategy=ReallocStrategy("static"),
        precision=scale.precision, max_steps=iterations, max_epochs=-1, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


def free_memory(setting: Setting) -> None:
    """Free the models of an earlier fit."""
    gc.collect()  # a Trainer and its strategy refer to each other
    if setting.is_gpu:
        torch.cuda.empty_cache()


def train_flops(scale: Scale, num_sequences: int) -> float:
    """Return the operations of training once on all sequences: three forwards, without recomputation."""
    lengths = [scale.prompt_tokens + scale.response_tokens] * num_sequences
    num_outputs = num_sequences * scale.response_tokens
    return 3 * scale.shapes[MODEL].forward_flops(lengths, num_outputs=num_outputs)


# --- PPO --------------------------------------------------------------------------------------------------------------


def ppo_cases(scale: Scale) -> tuple[str, ...]:
    """Return the cases of :func:`measure_ppo`: the calls of an iteration."""
    return ("actor.generate", "reference.infer", "reward.infer", "critic.infer", "actor.train", "critic.train")


def measure_ppo(setting: Setting, recorder: Recorder) -> None:
    """Train with four models on one device: peak bytes of each call, predicted and measured, and its seconds."""
    num_sequences = setting.scale.num_prompts * setting.scale.num_responses
    module, monitor, clock = make_ppo(setting), MemoryMonitor(), IterationClock(setting)
    trainer = fit(setting, module, num_sequences, iterations=3, callbacks=[monitor, clock])
    predicted = predict_peaks(trainer.strategy, setting.scale, num_sequences)
    for call in ppo_cases(setting.scale):
        measured = max(monitor.phases[call], monitor.transitions[call])
        error = predicted[call] / measured - 1
        recorder.row(
            call, seconds=median(spent[call] for spent in clock.calls[1:]), first_s=clock.calls[0][call],
            predicted_gb=predicted[call] / 1e9, measured_gb=measured / 1e9, error=error,
        )  # fmt: skip
        recorder.at_most(f"{call}, error of the predicted peak", abs(error), PEAK_TOLERANCE)


def predict_peaks(strategy: Any, scale: Scale, num_sequences: int) -> dict[str, int]:
    """Return call -> predicted peak bytes of the call and of the transition to it, as the strategy forecasts them."""
    builder = strategy._placed.builder()
    settings = builder.memory_settings().with_kept_caches(strategy.runner.engines.keeps_caches)
    load = Workload(
        num_sequences=num_sequences, prompt_tokens=scale.prompt_tokens, response_tokens=scale.response_tokens,
        micro_batch_tokens=scale.micro_batch_tokens,
    )  # fmt: skip
    forecast = forecast_memory(strategy.dataflow, strategy.plan, builder.describe_roles(), settings, load, ranks=(0,))
    peaks: dict[str, int] = {}
    for entry in forecast.iteration_phases:
        call = entry.phase.removeprefix("-> ")
        peaks[call] = max(peaks.get(call, 0), entry.parts.total)
    return peaks


# --- the first iteration ----------------------------------------------------------------------------------------------


def start_up_cases(scale: Scale) -> tuple[str, ...]:
    """Return the cases of :func:`measure_start_up`."""
    return EXTRA_CASES


def measure_start_up(setting: Setting, recorder: Recorder) -> None:
    """Time what the first iteration takes beyond later ones, with the seconds of captures and of each call's part."""
    for case, backend in zip(EXTRA_CASES, (None, setting.scale.compile_backend), strict=True):
        clock, captures = IterationClock(setting), list[float]()
        with _timed_captures(setting, captures):
            fit(setting, make_grpo(setting, backend), setting.scale.num_prompts, iterations=3, callbacks=[clock])
        (first, *_, later), (first_calls, *_, later_calls) = clock.iterations, clock.calls
        recorder.row(
            case, first_s=first, later_s=later, extra_s=first - later, captures=len(captures), capture_s=sum(captures),
            **{f"extra_s of {call}": seconds - later_calls[call] for call, seconds in first_calls.items()},
        )  # fmt: skip
        recorder.at_most(f"{case}, extra seconds of the first iteration", first - later, MAX_EXTRA_S)
        free_memory(setting)


@contextmanager
def _timed_captures(setting: Setting, seconds: list[float]) -> Iterator[None]:
    """Append the seconds of each capture of a CUDA graph, its first run included."""
    capture: Callable[..., Any] = StepGraphs._capture

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        graph = capture(*args, **kwargs)
        setting.synchronize()
        seconds.append(time.perf_counter() - begin)
        return graph

    StepGraphs._capture = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepGraphs._capture = capture  # type: ignore[method-assign]
