"""Samples to a held-out accuracy, with prompts drawn by a curriculum and with all prompts equally often.

The examples' task, words whose letters are to be sorted from a to z, with a spread of difficulty. The model first
imitates demonstrations, which are all right for short words, all wrong (from z to a) for long ones, and seldom right
for those between. So most prompts are solved or hopeless when learning from rewards begins, as in practice, where a data
set is wider than what a model can learn at the moment. Both arms start from the same weights, in turns, and answer the
same held-out words, which have the same spread.

Run ``python -m benchmarks.curriculum``.
"""

from __future__ import annotations

import random
import string
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from transformers import LlamaForCausalLM

from benchmarks.harness import BenchmarkReport, be_quiet, make_parser
from benchmarks.learning_task import response_logprobs
from examples import sorting
from lightning_realloc import GRPO, Curriculum, PromptDataModule, SamplingParams, exact_match

ARMS: dict[str, Curriculum | None] = {"uniform": None, "curriculum": Curriculum()}
TARGET_RATIO = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Sizes and settings, the same for both arms."""

    kinds: tuple[tuple[int, float, float], ...] = ((3, 0.4, 1.0), (5, 0.2, 0.15), (7, 0.4, 0.0))
    """Letters of a word, share of the prompts, share of the demonstrations that are right."""
    warm_up_steps: int = 500
    demonstrations_per_step: int = 48
    num_prompts: int = 240
    num_held_out: int = 120
    held_out_responses: int = 4
    iterations: int = 60
    prompts_per_iteration: int = 16
    responses_per_prompt: int = 8
    learning_rate: float = 5e-4
    share_to_reach: float = 0.9
    """Share of the distance between the first accuracy and the best one of the uniform arm that is to be covered."""
    evaluate_every: int = 2


def words(task: Task, count: int, rng: random.Random) -> list[str]:
    """Return different words, with the kinds in the proportions of the prompts."""
    found: dict[str, None] = {}
    for letters, share, _ in task.kinds:
        size = len(found) + round(count * share)
        while len(found) < size:
            found["".join(rng.sample(string.ascii_lowercase, letters))] = None
    return list(found)


def warm_model(task: Task, folder: str, seed: int) -> None:
    """Write the model that both arms start from: it imitated demonstrations."""
    torch.manual_seed(seed)
    model, tokenizer, rng = LlamaForCausalLM(sorting.tiny_llama()), sorting.byte_tokenizer(), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, task.warm_up_steps)
    for _ in range(task.warm_up_steps):
        shown = []
        for _ in range(task.demonstrations_per_step):
            letters, _, right = rng.choice(task.kinds)
            word = "".join(rng.sample(string.ascii_lowercase, letters))
            shown.append(sorting.demonstration(word, right=rng.random() < right))
        texts = [(one["prompt"], one["completion"]) for one in shown]
        loss = -torch.cat(response_logprobs(model, tokenizer, texts)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Diary(Callback):
    """Notes held-out accuracies with the samples generated before, and metrics of the batches."""

    def __init__(self, samples_per_iteration: int) -> None:
        self.curve: list[tuple[int, float]] = []
        self.signal: list[float] = []
        self._samples_per_iteration = samples_per_iteration

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Note an accuracy."""
        samples = trainer.global_step * self._samples_per_iteration
        self.curve.append((samples, float(trainer.callback_metrics["val/reward"])))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Note the share of groups whose rewards differ."""
        self.signal.append(1.0 - float(trainer.callback_metrics["frac_reward_zero_std"]))


def run_arm(task: Task, folder: str, seed: int, curriculum: Curriculum | None) -> Diary:
    """Train the warm model with GRPO."""
    rng = random.Random(f"prompts {seed}")
    rows = [sorting.problem(word) for word in words(task, task.num_prompts + task.num_held_out, rng)]
    rng.shuffle(rows)
    data = PromptDataModule(
        rows[task.num_held_out :], val_data=rows[: task.num_held_out], batch_size=task.prompts_per_iteration, seed=seed,
        curriculum=curriculum,
    )  # fmt: skip
    longest = max(letters for letters, *_ in task.kinds) + 2
    model = GRPO(
        folder, exact_match, sampling=SamplingParams(n=task.responses_per_prompt, max_new_tokens=longest),
        evaluation_sampling=SamplingParams(n=task.held_out_responses, max_new_tokens=longest),
        learning_rate=task.learning_rate, kl_coef=0.0, seed=seed,
    )  # fmt: skip
    diary = Diary(task.prompts_per_iteration * task.responses_per_prompt)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy="realloc", max_steps=task.iterations, max_epochs=-1, logger=False,
        val_check_interval=task.evaluate_every, check_val_every_n_epoch=None, callbacks=[diary],
        num_sanity_val_steps=0, enable_model_summary=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.validate(model, data, verbose=False)
    trainer.fit(model, data)
    return diary


def samples_to(curve: Sequence[tuple[int, float]], accuracy: float) -> float:
    """Return the samples after which the mean of two accuracies in a row reaches one; infinity: it never does."""
    for (_, before), (samples, after) in pairwise(curve):
        if (before + after) / 2 >= accuracy:
            return float(samples)
    return float("inf")


def main(arguments: list[str] | None = None) -> int:
    """Run both arms in turns."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of data, weights and sampling")
    parser.add_argument("--iterations", type=int, default=Task().iterations, help="iterations of each run")
    options = parser.parse_args(arguments)
    be_quiet()
    task = replace(Task(), iterations=options.iterations)
    report = BenchmarkReport("curriculum", seeds=tuple(options.seeds), settings=asdict(task), group_by="seed")
    ratios = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            warm_model(task, folder, seed)
            arms = {name: run_arm(task, folder, seed, curriculum) for name, curriculum in ARMS.items()}
        before, best = arms["uniform"].curve[0][1], max(fmean(p) for p in _pairs(arms["uniform"].curve))
        goal = before + task.share_to_reach * (best - before)
        needed = {name: samples_to(diary.curve, goal) for name, diary in arms.items()}
        ratios.append(needed["uniform"] / needed["curriculum"])
        for name, diary in arms.items():
            report.add_row(
                seed=seed, arm=name, before=before, goal=goal, samples=needed[name],
                at_end=fmean(accuracy for _, accuracy in diary.curve[-3:]), with_signal=fmean(diary.signal),
            )  # fmt: skip
            report.settings.setdefault("curves", {})[f"{name}, seed {seed}"] = diary.curve
        print(f"seed {seed}: {needed}, {ratios[-1]:.2f}", flush=True)
        report.write(options.json)
    report.require_at_least("samples of uniform over those of the curriculum, median", median(ratios), TARGET_RATIO)
    return report.finish(options)


def _pairs(curve: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    return [(first, second) for (_, first), (_, second) in pairwise(curve)]


if __name__ == "__main__":
    sys.exit(main())
