"""A step of GRPO for `benchmarks.one_gpu`, next to TRL with its default generation and with continuous batching.

All arms train the same random model from the same folder, on the same number of prompts, responses and tokens, with
fp32 weights under bf16 autocast. TRL keeps its defaults where the workload fixes nothing, such as gradient
checkpointing. No arm has a reference model. Each arm is a part with a process of its own, because Lightning and
Accelerate both read the environment of a process group.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.one_gpu_iterations import (
    LEAST_MFU,
    IterationClock,
    SyncCounter,
    fit,
    free_memory,
    make_grpo,
    save_model,
    share_of_even_ids,
    train_flops,
)
from benchmarks.one_gpu_setting import Recorder, Scale, Setting
from benchmarks.workload import random_texts
from lightning_realloc.algorithms.base.generation_options import FreeCache

OVER_TRL, OVER_BATCHING = 3.0, 2.0
"""How many times as long TRL's step has to take, with its default generation and with continuous batching."""
NUM_STEPS = 3
"""Steps up to the measured one, when kernels are loaded and all memory is reserved."""
CPU_BATCHING = {"page_size": 32, "num_blocks": 32, "max_batch_tokens": 64}
"""Settings of continuous batching on a CPU, where its defaults allocate 13 GB."""


@dataclass(slots=True)
class StepSeconds:
    """Seconds of one step."""

    total: float = 0.0
    generate: float = 0.0
    rollout: float = 0.0
    """Generation with rewards, and log-probabilities where the trainer computes some."""

    @property
    def infer(self) -> float:
        """Seconds of rewards and log-probabilities."""
        return self.rollout - self.generate

    @property
    def train(self) -> float:
        """Seconds of training, with the optimizer."""
        return self.total - self.rollout


def grpo_cases(scale: Scale) -> tuple[str, ...]:
    """Return the cases of :func:`measure_grpo`."""
    return (f"realloc {_work(scale)}", "waits for the device in a step", f"realloc {_work(scale)}, cache freed")


def trl_cases(scale: Scale) -> tuple[str, ...]:
    """Return the case of TRL's parts."""
    return (f"trl {_work(scale)}",)


def measure_grpo(setting: Setting, recorder: Recorder) -> None:
    """Time this package's step, and one that captures its graphs anew."""
    usual, waits, freed = grpo_cases(setting.scale)
    counter = SyncCounter(setting, iteration=NUM_STEPS)
    step = step_of_realloc(setting, counter, extra_steps=1)
    _ours(setting).write_text(json.dumps(step.total))
    mfu = _add_row(recorder, usual, step, setting, step=NUM_STEPS)
    recorder.at_least("MFU of training", mfu, LEAST_MFU)
    places = "; ".join(f"{place} x{count}" for place, count in counter.places.most_common(12))
    recorder.row(waits, count=counter.places.total(), places=places or "none")
    free_memory(setting)
    _add_row(recorder, freed, step_of_realloc(setting, free_cache=True), setting, step=NUM_STEPS)


def measure_trl(setting: Setting, recorder: Recorder) -> None:
    """Time TRL's step with `generate`."""
    _measure_trl(setting, recorder, batching=False, target=OVER_TRL)


def measure_trl_batching(setting: Setting, recorder: Recorder) -> None:
    """Time TRL's step with transformers' continuous batching."""
    _measure_trl(setting, recorder, batching=True, target=OVER_BATCHING)


def _measure_trl(setting: Setting, recorder: Recorder, *, batching: bool, target: float) -> None:
    (case,) = trl_cases(setting.scale)
    missing = [name for name in ("trl", "datasets", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        recorder.skip(case, f"{', '.join(missing)} not installed; see --wheels")
        return
    ours = json.loads(_ours(setting).read_text()) if _ours(setting).exists() else None

    def add_row(number: int, step: StepSeconds) -> None:
        over = None if ours is None else step.total / ours
        _add_row(recorder, case, step, setting, step=number, over_ours=over)

    last = step_of_trl(setting, add_row, batching=batching)
    if ours is not None:
        recorder.at_least("seconds over ours", last.total / ours, target)


def _add_row(recorder: Recorder, case: str, spent: StepSeconds, setting: Setting, **cells: Any) -> float:
    """Hand on a row, and return the MFU of training."""
    num_sequences = _num_sequences(setting.scale)
    mfu = train_flops(setting.scale, num_sequences) / spent.train / setting.peak_flops_per_s()
    recorder.row(
        case, seconds=spent.total, generate_s=spent.generate, infer_s=spent.infer, train_s=spent.train,
        sequences_per_s=num_sequences / spent.total, train_mfu=mfu, **cells,
    )  # fmt: skip
    return mfu


def _ours(setting: Setting) -> Path:
    """Return the file with the seconds of this package's step, which TRL's parts compare with."""
    return setting.folder / "grpo.json"


def _work(scale: Scale) -> str:
    return f"{scale.num_prompts} x {scale.num_responses} x {scale.response_tokens} tokens"


def _num_sequences(scale: Scale) -> int:
    return scale.num_prompts * scale.num_responses


def step_of_realloc(
    setting: Setting, *callbacks: Callback, free_cache: FreeCache = "auto", extra_steps: int = 0
) -> StepSeconds:
    """Return the seconds of the measured step; ``extra_steps`` follow it."""
    clock, module = IterationClock(setting), make_grpo(setting, free_cache=free_cache)
    iterations = NUM_STEPS + extra_steps
    fit(setting, module, setting.scale.num_prompts, iterations=iterations, callbacks=[clock, *callbacks])
    calls, total = clock.calls[NUM_STEPS - 1], clock.iterations[NUM_STEPS - 1]
    return StepSeconds(total, generate=calls["actor.generate"], rollout=total - calls["actor.train"])


# --- TRL --------------------------------------------------------------------------------------------------------------


OnStep = Callable[[int, StepSeconds], None]
"""Receives the number of a step, from 1 on, and its seconds."""


@dataclass(slots=True)
class _TrlClock:
    """Collects the seconds of TRL's steps."""

    setting: Setting
    on_step: OnStep
    steps: list[StepSeconds] = field(default_factory=list)
    begin: float = 0.0

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Add the seconds of ``work`` to a field of the current step, and return its result."""
        self.setting.synchronize()
        begin = time.perf_counter()
        result = work()
        self.setting.synchronize()
        setattr(self.steps[-1], name, getattr(self.steps[-1], name) + time.perf_counter() - begin)
        return result


def step_of_trl(setting: Setting, on_step: OnStep, *, batching: bool) -> StepSeconds:
    """Return the seconds of TRL's second step; call ``on_step`` after each."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    folder, scale, clock = save_model(setting), setting.scale, _TrlClock(setting, on_step)
    prompts = random_texts(2 * scale.num_prompts, length=scale.prompt_tokens, seed=1)
    trainer = _trainer_class(clock)(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=_trl_config(setting, batching=batching),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=share_of_even_ids,
        callbacks=[_trl_callback(clock)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock.steps[-1]


def _trl_config(setting: Setting, *, batching: bool) -> Any:
    from trl import GRPOConfig

    scale = setting.scale
    options: dict[str, Any] = {}
    if batching:
        options["use_transformers_continuous_batching"] = True
        if not setting.is_gpu:
            options["transformers_continuous_batching_config"] = CPU_BATCHING
    else:
        options["generation_kwargs"] = {"min_new_tokens": scale.response_tokens}
    return GRPOConfig(
        output_dir=str(setting.folder / "trl"), use_cpu=not setting.is_gpu, bf16=setting.is_gpu,
        per_device_train_batch_size=scale.trl_micro_batch,
        gradient_accumulation_steps=_num_sequences(scale) // scale.trl_micro_batch,
        num_generations=scale.num_responses, max_completion_length=scale.response_tokens, learning_rate=1e-6,
        lr_scheduler_type="constant", max_steps=2, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, dataloader_num_workers=0, seed=0, **options,
    )  # fmt: skip


def _trainer_class(clock: _TrlClock) -> Any:
    from trl import GRPOTrainer

    class ClockedTrainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
            generate = super()._generate_single_turn
            return clock.timed("generate", lambda: generate(*args, **options))

        def _generate_and_score_completions(self, *args: Any, **options: Any) -> Any:
            roll_out = super()._generate_and_score_completions
            return clock.timed("rollout", lambda: roll_out(*args, **options))

    return ClockedTrainer


def _trl_callback(clock: _TrlClock) -> Any:
    from transformers.trainer_callback import TrainerCallback

    class StepClock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.setting.synchronize()
            clock.steps.append(StepSeconds())
            clock.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.setting.synchronize()
            clock.steps[-1].total = time.perf_counter() - clock.begin
            clock.on_step(len(clock.steps), clock.steps[-1])

    return StepClock()
