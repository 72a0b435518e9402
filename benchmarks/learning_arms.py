"""One run of GRPO or DPO with this package or with TRL, from the same folder and rows with the same settings.

Settings that are not fixed here are TRL's defaults, with these exceptions:

- a constant learning rate,
- rows in their order,
- the mean over each response's tokens and then over responses,
- no recomputed activations.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness import be_quiet
from benchmarks.learning_task import Task, draw_rows, held_out_accuracy
from benchmarks.workload import make_trainer, share_of_vowels

ARMS = ("trl", "realloc")
SCORES = {"grpo": ("reward", "reward"), "dpo": ("rewards/accuracies", "actor/accuracy")}
"""Family -> names of a step's score in TRL's log and in ours."""
LAST_STEPS = 5
"""Last steps whose mean reward is the final score of a run."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Scores and times of one run."""

    scores: tuple[float, ...]
    """Score of each step: mean reward, or share of its pairs judged right before the step."""
    cpu_s: tuple[float, ...]
    """CPU time of the process at the end of each step, from the start of the first step."""
    wall_s: tuple[float, ...]
    """The same in wall time."""
    final: float
    """Mean reward of the last steps, or accuracy on held-out pairs."""

    def seconds_to(self, score: float, *, window: int) -> float | None:
        """Return the CPU time when the mean of ``window`` steps first reached ``score``; None if it never did."""
        for end in range(window, len(self.scores) + 1):
            if fmean(self.scores[end - window : end]) >= score:
                return self.cpu_s[end - 1]
        return None


class Diary:
    """Keeps the scores and times of a run."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.times: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Record the start of the first step."""
        self._began = time.process_time(), time.perf_counter()

    def step(self) -> None:
        """Record the end of a step."""
        self.times.append((time.process_time() - self._began[0], time.perf_counter() - self._began[1]))

    def curve(self, final: float | None) -> Curve:
        """Return the curve; if ``final`` is None, it is the mean of the last scores."""
        cpu_s, wall_s = zip(*self.times, strict=True)
        assert len(self.scores) == len(cpu_s), f"{len(self.scores)} scores of {len(cpu_s)} steps"
        return Curve(tuple(self.scores), cpu_s, wall_s, fmean(self.scores[-LAST_STEPS:]) if final is None else final)


def prepare_process() -> None:
    """Prepare a process for its runs."""
    import datasets
    import transformers

    be_quiet()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def run(arm: str, family: str, task: Task, folder: str, seed: int) -> Curve:
    """Train once."""
    train = {"trl": train_with_trl, "realloc": train_with_realloc}[arm]
    curve = train(family, task, folder, seed)
    gc.collect()  # a Trainer and its strategy refer to each other
    return curve


def train_with_realloc(family: str, task: Task, folder: str, seed: int) -> Curve:
    """Train with ``Trainer(strategy="realloc")`` on one device."""
    import lightning as L

    diary = Diary()

    class Clock(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                diary.begin()

        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            diary.step()
            diary.scores.append(float(trainer.callback_metrics[SCORES[family][1]]))

    module, data = _parts(family, task, folder, seed)
    trainer = make_trainer(
        strategy="realloc", max_steps=task.num_steps(family), callbacks=[Clock()], log_every_n_steps=1
    )
    trainer.fit(module, data)
    weights = trainer.strategy.full_weights("actor")
    return diary.curve(held_out_accuracy(task, folder, weights) if family == "dpo" else None)


def _parts(family: str, task: Task, folder: str, seed: int) -> tuple[Any, Any]:
    from lightning_realloc import DPO, GRPO, PreferenceDataModule, PromptDataModule, SamplingParams

    rows = draw_rows(task, family, seed)
    if family == "dpo":
        module = DPO(folder, beta=task.beta, learning_rate=task.dpo_learning_rate, seed=seed)
        return module, PreferenceDataModule(rows, batch_size=task.num_pairs, shuffle=False)
    sampling = SamplingParams(n=task.group_size, max_new_tokens=task.new_tokens)
    grpo = GRPO(
        folder, share_of_vowels, sampling=sampling, kl_coef=task.kl_coef, loss_average="sequence",
        learning_rate=task.grpo_learning_rate, seed=seed,
    )  # fmt: skip
    return grpo, PromptDataModule(rows, batch_size=task.num_prompts, shuffle=False)


def train_with_trl(family: str, task: Task, folder: str, seed: int) -> Curve:
    """Train with ``trl.GRPOTrainer`` or ``trl.DPOTrainer``."""
    from transformers.trainer_callback import PrinterCallback, TrainerCallback

    diary = Diary()

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:
                diary.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            diary.step()

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **_: Any) -> None:
            if SCORES[family][0] in logs:
                diary.scores.append(float(logs[SCORES[family][0]]))

    trainer = _trl_trainer(family, task, folder, seed, Clock())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    accuracy = held_out_accuracy(task, folder, trainer.model.state_dict()) if family == "dpo" else None
    return diary.curve(accuracy)


def _trl_trainer(family: str, task: Task, folder: str, seed: int, clock: Any) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    shared: dict[str, Any] = {
        "output_dir": str(Path(folder) / "trl"), "use_cpu": True, "bf16": False, "fp16": False,
        "gradient_checkpointing": False, "gradient_accumulation_steps": 1, "lr_scheduler_type": "constant",
        "max_steps": task.num_steps(family), "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "dataloader_num_workers": 0, "seed": seed,
    }  # fmt: skip
    parts: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        "processing_class": AutoTokenizer.from_pretrained(folder),
        "train_dataset": Dataset.from_list(draw_rows(task, family, seed)),
        "callbacks": [clock],
    }
    if family == "dpo":
        settings = DPOConfig(
            per_device_train_batch_size=task.num_pairs, beta=task.beta, learning_rate=task.dpo_learning_rate,
            train_sampling_strategy="sequential", **shared,
        )  # fmt: skip
        return DPOTrainer(args=settings, **parts)
    grpo_settings = GRPOConfig(
        per_device_train_batch_size=task.num_prompts * task.group_size, num_generations=task.group_size,
        num_iterations=1, max_completion_length=task.new_tokens, beta=task.kl_coef, loss_type="grpo",
        learning_rate=task.grpo_learning_rate, shuffle_dataset=False, **shared,
    )  # fmt: skip
    return GRPOTrainer(args=grpo_settings, reward_funcs=share_of_vowels, **parts)
