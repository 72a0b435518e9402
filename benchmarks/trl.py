"""Sequences per CPU-second of a GRPO step with this package and with TRL.

Both arms train the same random model from the same folder, on the same prompts and reward. A step has the same numbers
of sequences and tokens. Each arm has its own process with one thread; the two processes take turns. CPU time is that of
the whole process, from the start of the first measured step to the end of the last one.

Run ``python -m benchmarks.trl``; it needs TRL.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from benchmarks.harness import BenchmarkReport, be_quiet, make_parser, paired_ratio

TARGET_RATIO = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model, batch and number of steps."""

    architecture: str = "qwen2"
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_prompts: int = 4
    num_generations: int = 4
    prompt_tokens: int = 32
    new_tokens: int = 64
    kl_coef: float = 0.04
    learning_rate: float = 1e-3
    steps: int = 6
    warmup: int = 2

    @property
    def num_sequences(self) -> int:
        """Sequences per optimizer step."""
        return self.num_prompts * self.num_generations


@dataclass(frozen=True, slots=True)
class Turn:
    """Measurements of one turn of one arm."""

    cpu_s: float
    """CPU time of all measured steps."""
    wall_s: float
    """Wall time of the same steps."""
    rewards: tuple[float, ...]
    """Mean reward of each step, with the warm-up."""
    new_tokens: float
    """Mean response length, which must be the same in both arms."""
    peak_bytes: int
    """Largest resident set of the process so far."""


class GroupTimer:
    """CPU and wall time between two moments."""

    def __init__(self) -> None:
        self._begin = self._end = (0.0, 0.0)

    def start(self) -> None:
        """Start the clocks."""
        self._begin = time.process_time(), time.perf_counter()

    def stop(self) -> None:
        """Stop the clocks; a later call moves the end."""
        self._end = time.process_time(), time.perf_counter()

    def turn(self, rewards: list[float], new_tokens: list[float]) -> Turn:
        """Return the measured times, with rewards, lengths and peak memory."""
        cpu_s, wall_s = (end - begin for begin, end in zip(self._begin, self._end, strict=True))
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Turn(cpu_s, wall_s, tuple(rewards), sum(new_tokens) / len(new_tokens), peak_bytes)


# --- the arms ---------------------------------------------------------------------------------------------------------


def save_model(work: Workload, folder: str) -> int:
    """Write the random model and its tokenizer for both arms; return its number of weights."""
    from benchmarks.workload import random_model

    model, tokenizer = random_model(
        work.architecture, hidden_size=work.hidden_size, num_layers=work.num_layers, num_heads=work.num_heads, seed=0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def train_with_realloc(work: Workload, folder: str) -> Turn:
    """Train with ``Trainer(strategy="realloc")`` on one device."""
    from benchmarks.workload import random_prompts, share_of_vowels
    from lightning_realloc import GRPO, SamplingParams

    sampling = SamplingParams(n=work.num_generations, max_new_tokens=work.new_tokens, min_new_tokens=work.new_tokens)
    module = GRPO(
        folder, share_of_vowels, sampling=sampling, kl_coef=work.kl_coef, learning_rate=work.learning_rate, seed=0
    )
    data = random_prompts(256, length=work.prompt_tokens, batch_size=work.num_prompts)
    return fit_grpo(module, data, warmup=work.warmup, steps=work.steps)


def train_with_trl(work: Workload, folder: str) -> Turn:
    """Train with ``trl.GRPOTrainer``, with its defaults where the workload fixes nothing."""
    from benchmarks.workload import random_texts, share_of_vowels

    return fit_trl(
        folder,
        random_texts(256, length=work.prompt_tokens, seed=1),
        share_of_vowels,
        warmup=work.warmup,
        steps=work.steps,
        options={
            "gradient_checkpointing": False,
            "per_device_train_batch_size": work.num_sequences,
            "gradient_accumulation_steps": 1,
            "num_generations": work.num_generations,
            "max_completion_length": work.new_tokens,
            "generation_kwargs": {"min_new_tokens": work.new_tokens},
            "beta": work.kl_coef,
            "learning_rate": work.learning_rate,
        },
    )


def fit_grpo(module: Any, data: Any, *, warmup: int, steps: int) -> Turn:
    """Train this package's GRPO for ``warmup`` steps, and for ``steps`` that are measured."""
    import lightning as L

    from benchmarks.workload import make_trainer

    watch = GroupTimer()
    rewards: list[float] = []
    lengths: list[float] = []

    class Clock(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == warmup:
                watch.start()

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            watch.stop()
            rewards.append(float(trainer.callback_metrics["reward"]))
            lengths.append(float(trainer.callback_metrics["response_length"]))

    trainer = make_trainer(
        strategy="realloc", max_steps=warmup + steps, max_epochs=-1, callbacks=[Clock()], log_every_n_steps=1
    )
    trainer.fit(module, data)
    return watch.turn(rewards, lengths)


def fit_trl(
    folder: str,
    prompts: Any,
    reward: Callable[..., Any],
    *,
    warmup: int,
    steps: int,
    options: Mapping[str, Any],
    has_images: bool = False,
) -> Turn:
    """Train TRL's GRPO on the CPU in the same way.

    Args:
        prompts: Prompts, or with ``has_images`` a ``datasets.Dataset`` of them.
        options: Settings of ``GRPOConfig``.
        has_images: Whether the folder holds a vision-language model with its processor.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
    from transformers.trainer_callback import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    watch = GroupTimer()
    rewards: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == warmup:
                watch.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.stop()

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **_: Any) -> None:
            if "reward" in logs:
                rewards.append(float(logs["reward"]))
                lengths.append(float(logs["completions/mean_length"]))

    with tempfile.TemporaryDirectory(prefix="benchmark-trl-") as output:
        settings = GRPOConfig(
            output_dir=output, use_cpu=True, bf16=False, fp16=False, num_iterations=1,
            lr_scheduler_type="constant", max_steps=warmup + steps, logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True, dataloader_num_workers=0, seed=0, **options,
        )  # fmt: skip
        auto_class = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
        trainer = GRPOTrainer(
            model=auto_class.from_pretrained(folder, dtype=torch.float32),
            args=settings,
            train_dataset=prompts if has_images else Dataset.from_dict({"prompt": prompts}),
            processing_class=(AutoProcessor if has_images else AutoTokenizer).from_pretrained(folder),
            reward_funcs=reward,
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return watch.turn(rewards, lengths)


Arms = Mapping[str, Callable[[Any, str], Turn]]
"""Name -> function that trains on a workload with the model in a folder."""


# --- taking turns -----------------------------------------------------------------------------------------------------


def serve(train: Callable[[Any, str], Turn], work: Any, folder: str, connection: Connection) -> None:
    """Train for each message from ``connection`` until it is closed, and send the measurements."""
    be_quiet()
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        connection.send(train(work, folder))
        gc.collect()  # a Trainer and its strategy refer to each other


@contextmanager
def _workers(arms: Arms, work: Any, folder: str) -> Iterator[dict[str, Connection]]:
    context = multiprocessing.get_context("spawn")
    connections, processes = {}, []
    for arm, train in arms.items():
        connections[arm], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(train, work, folder, theirs)))
        processes[-1].start()
        theirs.close()
    try:
        yield connections
    finally:
        for connection in connections.values():
            connection.close()
        for process in processes:
            process.join()


def take_turns(arms: Arms, work: Any, folder: str, turns: int) -> dict[str, list[Turn]]:
    """Return the turns of each arm, which read the model in ``folder``."""
    measured: dict[str, list[Turn]] = {arm: [] for arm in arms}
    with _workers(arms, work, folder) as connections:
        for number in range(turns):
            for arm, connection in connections.items():
                connection.send(number)
                try:
                    measured[arm].append(connection.recv())
                except EOFError:
                    raise RuntimeError(f"the process of arm {arm!r} ended; its error is above") from None
    return measured


def fill(report: BenchmarkReport, work: Any, measured: Mapping[str, list[Turn]], *, label: str = "") -> None:
    """Add a row for each arm, and the target; ``label`` ends the names of both."""
    for arm, turns in measured.items():
        cpu_s = median(turn.cpu_s for turn in turns) / work.steps
        wall_s = median(turn.wall_s for turn in turns) / work.steps
        report.add_row(
            arm=arm + label,
            cpu_s_per_step=cpu_s,
            wall_s_per_step=wall_s,
            sequences_per_cpu_s=work.num_sequences / cpu_s,
            new_tokens_per_cpu_s=work.num_sequences * turns[0].new_tokens / cpu_s,
            new_tokens=turns[0].new_tokens,
            first_reward=turns[0].rewards[0],
            last_reward=turns[0].rewards[-1],
            peak_mib=round(turns[-1].peak_bytes / 2**20),
        )
    theirs, ours = ([turn.cpu_s for turn in measured[arm]] for arm in ("trl", "realloc"))
    report.require_at_least(f"sequences per CPU-second over TRL's{label}", paired_ratio(theirs, ours), TARGET_RATIO)


def read_options(
    arguments: list[str] | None, description: str | None, *, steps: int | None = None
) -> argparse.Namespace | None:
    """Return the options of a comparison with TRL, and set its environment; None, with a message, without TRL."""
    parser = make_parser(description or "")
    parser.add_argument("--turns", type=int, default=3, help="turns of each arm")
    parser.add_argument(
        "--steps", type=int, default=steps, help="measured steps in a turn; the default is the workload's"
    )
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("trl") is None:
        sys.stderr.write("this benchmark compares with TRL, which is not installed: pip install -e '.[bench]'\n")
        return None
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure both arms in turns and report."""
    options = read_options(arguments, __doc__, steps=Workload().steps)
    if options is None:
        return 2
    work = Workload(steps=options.steps)
    report = BenchmarkReport("trl", settings={"clock": "process CPU time", "turns": options.turns} | asdict(work))
    with tempfile.TemporaryDirectory(prefix="benchmark-trl-") as folder:
        save_model(work, folder)
        fill(
            report,
            work,
            take_turns({"trl": train_with_trl, "realloc": train_with_realloc}, work, folder, options.turns),
        )
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
