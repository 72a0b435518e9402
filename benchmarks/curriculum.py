"""Samples to a held-out accuracy, with prompts drawn by a curriculum and with all prompts equally often.

The examples' task, words whose letters are to be sorted from a to z, in kinds that a letter before the word names. The
model first imitates demonstrations, which are all right for some kinds, all wrong (from z to a) for others, and seldom
right for the rest. So most prompts are solved or hopeless when learning from rewards begins, as in practice, where a
data set is wider than what a model can learn at the moment. Both arms start from the same weights, in turns, and answer
the same held-out words, which have the same spread.

Run ``python -m benchmarks.curriculum``.
"""

from __future__ import annotations

import random
import string
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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

    kinds: tuple[float | None, ...] = (*(1.0,) * 9, 0.15, 0.12, 0.1, 0.08, *(None,) * 11)
    """Share of the demonstrations that are right, for each kind of prompts; None: none is, and the right answer is one
    that the model never saw."""
    letters: int = 3
    warm_up_steps: int = 700
    demonstrations_per_step: int = 32
    num_prompts: int = 120
    num_held_out: int = 120
    iterations: int = 150
    prompts_per_iteration: int = 8
    responses_per_prompt: int = 8
    learning_rate: float = 1.5e-4
    share_to_reach: float = 0.9
    """Part of what the uniform arm gains in all its iterations."""


def problems(task: Task, count: int, rng: random.Random) -> list[sorting.Row]:
    """Return prompts with different words, equally many of each kind."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.sample(string.ascii_lowercase, task.letters))] = None
    rows = [_of_kind(place % len(task.kinds), sorting.problem(word)) for place, word in enumerate(found)]
    for place, row in enumerate(rows):
        if task.kinds[place % len(task.kinds)] is None:
            row["answer"] = row["answer"].upper()
    return rows


def _of_kind(kind: int, row: sorting.Row) -> sorting.Row:
    return {**row, "prompt": row["prompt"].replace("sort", string.ascii_uppercase[kind])}


def warm_model(task: Task, folder: str, seed: int) -> None:
    """Write the model that both arms start from: it imitated demonstrations."""
    torch.manual_seed(seed)
    model, tokenizer, rng = LlamaForCausalLM(sorting.tiny_llama()), sorting.byte_tokenizer(), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, task.warm_up_steps)
    for _ in range(task.warm_up_steps):
        shown = []
        for _ in range(task.demonstrations_per_step):
            kind, word = rng.randrange(len(task.kinds)), "".join(rng.sample(string.ascii_lowercase, task.letters))
            shown.append(_of_kind(kind, sorting.demonstration(word, right=rng.random() < (task.kinds[kind] or 0.0))))
        texts = [(one["prompt"], one["completion"]) for one in shown]
        loss = -torch.cat(response_logprobs(model, tokenizer, texts)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Diary(Callback):
    """Notes after each iteration the samples generated so far with the held-out accuracy, and the useful groups.

    The accuracy is the mean probability of the right answers, from padded transformers, so that no sampling blurs it.
    """

    def __init__(self, task: Task, held_out: Sequence[sorting.Row], tokenizer: Any) -> None:
        self.curve: list[tuple[int, float]] = []
        self.signal: list[float] = []
        self._texts = [(row["prompt"], row["answer"]) for row in held_out]
        self._samples_per_iteration = task.prompts_per_iteration * task.responses_per_prompt
        self._tokenizer = tokenizer

    def note(self, model: Any, iterations: int) -> None:
        """Note the model's accuracy."""
        with torch.no_grad():
            logprobs = response_logprobs(model, self._tokenizer, self._texts)
        accuracy = fmean(float(one.sum().exp()) for one in logprobs)
        self.curve.append((iterations * self._samples_per_iteration, round(accuracy, 4)))

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Note the accuracy of the model that both arms start from."""
        self.note(pl_module.actor, 0)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        """Note the accuracy, and the share of groups whose rewards differ."""
        self.note(pl_module.actor, trainer.global_step)
        self.signal.append(1.0 - float(trainer.callback_metrics["frac_reward_zero_std"]))


def run_arm(task: Task, folder: str, seed: int, curriculum: Curriculum | None) -> Diary:
    """Train the warm model with GRPO."""
    rows = problems(task, task.num_prompts + task.num_held_out, random.Random(f"prompts {seed}"))
    data = PromptDataModule(
        rows[task.num_held_out :], batch_size=task.prompts_per_iteration, seed=seed, curriculum=curriculum
    )
    model = GRPO(
        folder, exact_match, learning_rate=task.learning_rate, kl_coef=0.0, seed=seed,
        sampling=SamplingParams(n=task.responses_per_prompt, max_new_tokens=task.letters + 1),
    )  # fmt: skip
    diary = Diary(task, rows[: task.num_held_out], model.tokenizer)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy="realloc", max_steps=task.iterations, max_epochs=-1, logger=False,
        callbacks=[diary], enable_model_summary=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(model, data)
    return diary


def samples_to(curve: Sequence[tuple[int, float]], accuracy: float) -> float:
    """Return the samples after which an accuracy is reached; infinity: it never is."""
    return next((float(samples) for samples, found in curve if found >= accuracy), float("inf"))


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
        before, best = arms["uniform"].curve[0][1], arms["uniform"].curve[-1][1]
        goal = before + task.share_to_reach * (best - before)
        needed = {name: samples_to(diary.curve, goal) for name, diary in arms.items()}
        ratios.append(needed["uniform"] / needed["curriculum"])
        for name, diary in arms.items():
            report.add_row(
                seed=seed, arm=name, before=before, goal=goal, samples=needed[name],
                at_end=fmean(accuracy for _, accuracy in diary.curve[-5:]), with_signal=fmean(diary.signal),
            )  # fmt: skip
            report.settings.setdefault("curves", {})[f"{name}, seed {seed}"] = diary.curve[::10]
        print(f"seed {seed}: {needed}, {ratios[-1]:.2f}", flush=True)
        report.write(options.json)
    report.require_at_least("samples of uniform over those of the curriculum, median", median(ratios), TARGET_RATIO)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
