"""A GRPO step of SmolLM2-135M-Instruct with this package and with TRL: sequences per CPU-second, and memory.

Both arms train the same pretrained model on the same chat prompts, with responses that end by themselves or after 64
tokens. TRL runs with its default micro-batch of sequences and with others; this package with its default, which packs
the whole batch, and with micro-batches of about as many tokens as TRL's. Each arm has its own process with one thread,
and the processes take turns. Peak memory is that of the whole process, with libraries.

Run ``python -m benchmarks.real_model`` after ``make demo-real``, which brings the model.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness import BenchmarkReport, make_parser, paired_ratio
from benchmarks.trl import Turn, fit_grpo, fit_trl, take_turns

QUESTIONS = (
    "Name three large cities.", "What is a glacier?", "Write one sentence about rain.", "Why is the sky blue?",
    "What do bees make?", "Give a tip for learning to swim.", "What is the capital of France?", "Define gravity.",
)  # fmt: skip
"""Prompts of every step."""
DEFAULT_MICRO_BATCH = 8
"""TRL's default of ``per_device_train_batch_size``."""
FEW_TOKENS = 1024
"""Tokens of a micro-batch, about as many as in TRL's default of eight sequences."""
SMALL = f"realloc, {FEW_TOKENS} tokens a micro-batch"
"""Name of the arm with these micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Batch and number of steps."""

    num_generations: int = 8
    new_tokens: int = 64
    learning_rate: float = 1e-6
    steps: int = 1
    warmup: int = 1
    micro_batch: int = DEFAULT_MICRO_BATCH
    """Sequences of a forward and backward pass of TRL."""

    @property
    def num_sequences(self) -> int:
        """Sequences per optimizer step."""
        return len(QUESTIONS) * self.num_generations


def share_of_letters(completions: Any, **_: object) -> list[float]:
    """Reward the share of letters in a completion."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in texts]


def train_with_realloc(work: Workload, folder: str, **options: Any) -> Turn:
    """Train with ``Trainer(strategy="realloc")`` on one device; ``options`` are those of `TrainOptions`."""
    from lightning_realloc import GRPO, PromptDataModule, SamplingParams, TrainOptions

    sampling = SamplingParams(n=work.num_generations, max_new_tokens=work.new_tokens)
    module = GRPO(
        folder, share_of_letters, sampling=sampling, learning_rate=work.learning_rate, seed=0,
        train_options=TrainOptions(**options),
    )  # fmt: skip
    rows = [{"prompt": question} for question in QUESTIONS]
    data = PromptDataModule(rows, batch_size=len(rows), text_prompts="user")
    return fit_grpo(module, data, warmup=work.warmup, steps=work.steps)


def train_with_trl(work: Workload, folder: str) -> Turn:
    """Train with ``trl.GRPOTrainer``, with its defaults where the workload fixes nothing."""
    return fit_trl(
        folder,
        [[{"role": "user", "content": question}] for question in QUESTIONS],
        share_of_letters,
        warmup=work.warmup,
        steps=work.steps,
        options={
            "per_device_train_batch_size": work.micro_batch,
            "gradient_accumulation_steps": work.num_sequences // work.micro_batch,
            "num_generations": work.num_generations,
            "max_completion_length": work.new_tokens,
            "learning_rate": work.learning_rate,
        },
    )


def train_with_trl_in(micro_batch: int, work: Workload, folder: str) -> Turn:
    """Train with TRL in micro-batches of another size."""
    from dataclasses import replace

    return train_with_trl(replace(work, micro_batch=micro_batch), folder)


def fill(report: BenchmarkReport, work: Workload, measured: Mapping[str, list[Turn]]) -> None:
    """Add a row for each arm, and the targets."""
    for arm, turns in measured.items():
        tokens = median(turn.new_tokens for turn in turns)
        cpu_s = median(turn.cpu_s for turn in turns) / work.steps
        report.add_row(
            arm=arm,
            cpu_s_per_step=cpu_s,
            wall_s_per_step=median(turn.wall_s for turn in turns) / work.steps,
            sequences_per_cpu_s=work.num_sequences / cpu_s,
            new_tokens=tokens,
            peak_gib=turns[-1].peak_bytes / 2**30,
        )
    ours, small = measured["realloc"], measured[SMALL]
    ratios = {
        arm: paired_ratio([turn.cpu_s for turn in turns], [turn.cpu_s for turn in ours])
        for arm, turns in measured.items()
        if not arm.startswith("realloc")
    }
    default = next(iter(ratios))
    report.require_at_least(f"sequences per CPU-second over TRL's, {default}", ratios[default], 3.0)
    best = min(ratios, key=lambda arm: ratios[arm])
    report.require_at_least(f"the same over TRL's best, {best}", ratios[best], 2.5)
    peak = small[-1].peak_bytes / measured[default][-1].peak_bytes
    report.require_at_most(f"peak memory in small micro-batches next to TRL's, {default}", peak, 0.35)


def main(arguments: list[str] | None = None) -> int:
    """Measure all arms in turns and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=3, help="turns of each arm")
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[4], help="further micro-batches of TRL")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("trl") is None:
        sys.stderr.write("this benchmark compares with TRL, which is not installed: pip install -e '.[bench]'\n")
        return 2
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    from examples.smollm2 import model_folder

    work = Workload()
    others = {f"trl, {size} a micro-batch": partial(train_with_trl_in, size) for size in options.micro_batches}
    ours = {"realloc": train_with_realloc, SMALL: partial(train_with_realloc, micro_batch_tokens=FEW_TOKENS)}
    arms = {"trl": train_with_trl, **others, **ours}
    report = BenchmarkReport(
        "real_model", settings={"clock": "process CPU time", "turns": options.turns} | asdict(work)
    )
    fill(report, work, take_turns(arms, work, str(model_folder()), options.turns))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
