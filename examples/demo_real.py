"""GRPO on a real model, SmolLM2-135M-Instruct, on two CPU ranks: ``python -m examples.demo_real``. No network, no GPU.

The model learns to add and subtract two numbers, once with all its weights and once with LoRA. `gsm8k` has the training
itself. ``make demo-real`` installs what is needed. Lightning starts this script again for rank 1; only the first
process writes output.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import reasoning_gym
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from rich.table import Table

from examples import report
from examples.gsm8k import train
from examples.resident_memory import resident_bytes, start_measuring
from examples.smollm2 import model_folder
from lightning_realloc import GenerationOptions, RolloutTable, Timeline, VLLMOptions

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "all weights": {"learning_rate": 2e-5},
    "LoRA": {"learning_rate": 5e-4, "peft_config": {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}},
}
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "native": {},
    "vllm": {
        "engine": "vllm",
        "generation": GenerationOptions(max_cache_bytes=256 << 20, vllm=VLLMOptions(max_length=512)),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the demo. Batch sizes count both ranks together."""

    folder: Path = Path("runs/real")
    seed: int = 0
    num_ranks: int = 2
    iterations: int = 30
    prompts_per_iteration: int = 4
    max_new_tokens: int = 24
    num_held_out: int = 64
    engine: Literal["native", "vllm"] = "native"


@dataclass
class Meter(Callback):
    """Sums the seconds of each call, and measures and predicts the memory of this process."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    predicted_bytes: int = 0
    """Peak of weights, gradients, optimizer, activations and caches on the fullest rank, as `plan` predicts it."""
    peak_bytes: int = 0
    """Peak of this process until training ended; `Timeline` restarts the system's own count in every call."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Add the logged seconds."""
        for name, value in trainer.callback_metrics.items():
            if name.startswith("seconds/actor."):
                self.seconds[name.removeprefix("seconds/")] += float(value)

    def on_train_end(self, trainer: Trainer, *_: object) -> None:
        """Measure the peak, and predict it for the lengths of the last iteration."""
        strategy: Any = trainer.strategy
        self.peak_bytes = strategy.runner.peak_memory.of_run()
        self.predicted_bytes = max(strategy.plan_evaluator([strategy.lengths]).peak_bytes(strategy.plan).values())


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a variant."""

    before: float
    """Share of held-out questions answered right by the pretrained model, greedily."""
    after: float
    wall_s: float
    seconds: Mapping[str, float]
    """Call -> seconds of all iterations."""
    peak_bytes: int | None
    """Peak memory of this process, without what it held before; None where the system does not tell."""
    predicted_bytes: int


def main(arguments: Sequence[str] | None = None) -> dict[str, Outcome]:
    """Run both variants with the settings of the command line, in every process; return what each has learned."""
    settings, names = read_arguments(arguments)
    report.silence_hints()
    rows = {"train": 8 * settings.iterations * settings.prompts_per_iteration, "held_out": settings.num_held_out}
    if report.is_first_process():
        report.heading("SmolLM2-135M-Instruct, and sums and differences of numbers below 100")
        model_folder()
        for number, (name, count) in enumerate(rows.items()):
            write_problems(settings.folder / f"{name}.jsonl", count, seed=2 * settings.seed + number)
    outcomes = {name: learn(name, settings) for name in names}
    if report.is_first_process():
        conclude(outcomes, settings)
    return outcomes


def write_problems(path: Path, count: int, *, seed: int) -> None:
    """Write problems with their answers, one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    problems = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2, size=count, seed=seed
    )
    lines = [json.dumps({"question": each["question"], "answer": each["answer"]}) for each in problems]
    path.write_text("\n".join(lines) + "\n")


def learn(name: str, settings: Settings) -> Outcome:
    """Train one variant."""
    report.heading(f"GRPO, {name}: {settings.iterations} iterations on {settings.num_ranks} ranks")
    meter, began, held_bytes = Meter(), time.perf_counter(), start_measuring()
    _, before, after = train(
        str(model_folder()),
        str(settings.folder / "train.jsonl"),
        str(settings.folder / "held_out.jsonl"),
        settings.folder / name.replace(" ", "_"),
        prompts=settings.prompts_per_iteration,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        trainer={
            "accelerator": "cpu", "devices": settings.num_ranks, "max_steps": settings.iterations, "max_epochs": -1,
            "logger": CSVLogger(settings.folder, name="logs", version=name.replace(" ", "_")),
            "callbacks": [meter, report.Progress(), Timeline(), RolloutTable(every_n_steps=5)], "log_every_n_steps": 1,
            "num_sanity_val_steps": 0, "enable_checkpointing": False, "enable_model_summary": False,
        },
        **ENGINES[settings.engine],
        **VARIANTS[name],
    )  # fmt: skip
    grown = None if held_bytes is None else max(meter.peak_bytes, resident_bytes("VmHWM")) - held_bytes
    return Outcome(before, after, time.perf_counter() - began, dict(meter.seconds), grown, meter.predicted_bytes)


def conclude(outcomes: Mapping[str, Outcome], settings: Settings) -> None:
    """Show the figures, and the answers to some held-out questions."""
    table = Table(title=f"{settings.num_held_out} held-out questions, and what it took", title_justify="left")
    for column in ("", *outcomes):
        table.add_column(column, justify="right" if column else "left")
    rows: dict[str, list[str]] = defaultdict(list)
    for one in outcomes.values():
        rows["answered right before"].append(f"{one.before:.1%}")
        rows["answered right after"].append(f"[bold green]{one.after:.1%}[/]")
        rows["wall time, with evaluation"].append(f"{one.wall_s:.0f} s")
        for call, seconds in one.seconds.items():
            rows[f"{call} of an iteration"].append(f"{seconds / settings.iterations:.1f} s")
        measured = "unknown" if one.peak_bytes is None else f"{one.peak_bytes / 2**30:.1f} GiB"
        rows["memory of a process, predicted / at most"].append(f"{one.predicted_bytes / 2**30:.1f} / {measured}")
    for label, values in rows.items():
        table.add_row(label, *values)
    report.console.print(table)
    folders = {name: settings.folder / name.replace(" ", "_") for name in outcomes}
    show_answers({"before": model_folder()} | folders, settings)


def show_answers(folders: Mapping[str, Path], settings: Settings, *, num_rows: int = 6) -> None:
    """Show what the models answer to some held-out questions."""
    lines = (settings.folder / "held_out.jsonl").read_text().splitlines()[:num_rows]
    rows = [json.loads(line) for line in lines]
    answers = [greedy_answers(folder, [row["question"] for row in rows]) for folder in folders.values()]
    table = Table(title="Most likely answers to some of them", title_justify="left")
    for column in ("question", "right", *folders):
        table.add_column(column)
    for row, *said in zip(rows, *answers, strict=True):
        table.add_row(row["question"].rpartition(": ")[2], row["answer"], *said)
    report.console.print(table)


def greedy_answers(folder: Path, questions: Sequence[str]) -> list[str]:
    """Return the greedy answer to every question, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    answers = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**ids, do_sample=False, max_new_tokens=24)
        answers.append(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def read_arguments(arguments: Sequence[str] | None) -> tuple[Settings, list[str]]:
    """Return the settings and the names of the variants to run."""
    usual = Settings()
    parser = argparse.ArgumentParser(prog="python -m examples.demo_real", description=__doc__)
    parser.add_argument("--seed", type=int, default=usual.seed, help="of problems and sampling")
    parser.add_argument("--num-ranks", type=int, default=usual.num_ranks, help="processes, one core each")
    parser.add_argument("--iterations", type=int, default=usual.iterations, help="iterations of a variant")
    parser.add_argument("--prompts-per-iteration", type=int, default=usual.prompts_per_iteration, help="prompts")
    parser.add_argument("--num-held-out", type=int, default=usual.num_held_out, help="questions that are not trained")
    parser.add_argument("--folder", type=Path, default=usual.folder, help="where everything is written")
    parser.add_argument("--engine", choices=tuple(ENGINES), default=usual.engine, help="vllm: needs `make vllm-env`")
    parser.add_argument("--only", choices=tuple(VARIANTS), nargs="+", default=list(VARIANTS), help="variants to run")
    given = vars(parser.parse_args(arguments))
    names: list[str] = given.pop("only")
    if given["engine"] == "vllm" and "LoRA" in names:
        parser.error("vLLM takes over whole weights, and LoRA trains adapters; add --only 'all weights'")
    return Settings(**given), names


if __name__ == "__main__":
    main()
