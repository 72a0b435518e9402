"""Sequences per CPU-second of a GRPO step on images with this package and with TRL.

Both arms train the same random LLaVA from the same folder, tower included, on the same table of drawings, which its
`datasets` file holds as PNG. A step has the same numbers of images, sequences and tokens. Each arm has its own process
with one thread; the two processes take turns. CPU time is that of the whole process, from the start of the first
measured step to the end of the last one. There are two models: that of `examples/demo_vision.py`, in which calls of
operations take most of a step, and a larger one, in which arithmetic does.

Run ``python -m benchmarks.vision``; it needs TRL.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.harness import BenchmarkReport
from benchmarks.trl import Turn, fill, fit_grpo, fit_trl, read_options, take_turns

MAX_MEMORY_RATIO = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model, batch and number of steps."""

    hidden_size: int = 64
    num_layers: int = 2
    side: int = 24
    """Width and height in pixels to which drawings are resized."""
    patch: int = 6
    """Width and height of a patch in pixels."""
    num_prompts: int = 8
    num_generations: int = 4
    new_tokens: int = 16
    num_images: int = 256
    learning_rate: float = 1e-3
    steps: int = 6
    warmup: int = 2

    @property
    def num_sequences(self) -> int:
        """Sequences per optimizer step."""
        return self.num_prompts * self.num_generations


WORKLOADS = {
    "demo": Workload(),
    "larger": Workload(hidden_size=256, num_layers=4, side=96, patch=8, new_tokens=32, steps=3),
}


def save_model(work: Workload, folder: str) -> int:
    """Write the random model and its processor for both arms; return its number of weights."""
    import torch
    from transformers import LlavaForConditionalGeneration

    from examples.demo_vision import make_model, make_processor

    processor = make_processor()
    processor.patch_size = work.patch
    processor.image_processor.size = {"shortest_edge": work.side}
    processor.image_processor.crop_size = {"height": work.side, "width": work.side}
    config = make_model(processor, seed=0).config
    config.text_config.max_position_embeddings = 1024
    config.vision_config.image_size, config.vision_config.patch_size = work.side, work.patch
    for part in (config.text_config, config.vision_config):
        part.hidden_size, part.intermediate_size = work.hidden_size, 2 * work.hidden_size
        part.num_hidden_layers = work.num_layers
    config.text_config.head_dim = work.hidden_size // config.text_config.num_attention_heads
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def questions(work: Workload) -> Any:
    """Return the table of prompts and drawings."""
    from datasets import Dataset, Features, Image, List, Value

    from examples.demo_vision import question

    rng = random.Random(0)
    rows = [question(rng) for _ in range(work.num_images)]
    content = List({"type": Value("string"), "text": Value("string")})
    features = Features(prompt=List({"role": Value("string"), "content": content}), images=List(Image()))
    part = [{"type": "image", "text": None}]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": [*part, {"type": "text", "text": row["prompt"]}]}],
             "images": [row["image"]]}
            for row in rows
        ],
        features=features,
    )  # fmt: skip


def share_of_colours(completions: Sequence[Any], **columns: object) -> list[float]:
    """Score the share of words that are colours."""
    from examples.demo_vision import COLOURS

    texts = [answer[-1]["content"].split() for answer in completions]
    return [sum(word in COLOURS for word in words) / max(1, len(words)) for words in texts]


def train_with_realloc(work: Workload, folder: str) -> Turn:
    """Train with ``Trainer(strategy="realloc")`` on one device."""
    from lightning_realloc import GRPO, PromptDataModule, SamplingParams

    sampling = SamplingParams(n=work.num_generations, max_new_tokens=work.new_tokens, min_new_tokens=work.new_tokens)
    module = GRPO(
        folder, share_of_colours, sampling=sampling, learning_rate=work.learning_rate, train_vision="all", seed=0
    )
    data = PromptDataModule(questions(work), batch_size=work.num_prompts)
    return fit_grpo(module, data, warmup=work.warmup, steps=work.steps)


def train_with_trl(work: Workload, folder: str) -> Turn:
    """Train with ``trl.GRPOTrainer``, with its defaults where the workload fixes nothing."""
    return fit_trl(
        folder,
        questions(work),
        share_of_colours,
        warmup=work.warmup,
        steps=work.steps,
        has_images=True,
        options={
            "gradient_checkpointing": False,
            "per_device_train_batch_size": work.num_sequences,
            "gradient_accumulation_steps": 1,
            "num_generations": work.num_generations,
            "max_completion_length": work.new_tokens,
            "generation_kwargs": {"min_new_tokens": work.new_tokens},
            "learning_rate": work.learning_rate,
        },
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure both arms in turns with each model and report."""
    options = read_options(arguments, __doc__)
    if options is None:
        return 2
    report = BenchmarkReport("vision", settings={"clock": "process CPU time", "turns": options.turns})
    arms = {"trl": train_with_trl, "realloc": train_with_realloc}
    for name, work in WORKLOADS.items():
        work = work if options.steps is None else replace(work, steps=options.steps)
        with tempfile.TemporaryDirectory(prefix="benchmark-vision-") as folder:
            num_weights = save_model(work, folder)
            measured = take_turns(arms, work, folder, options.turns)
        report.settings[name] = asdict(work) | {"num_weights": num_weights}
        fill(report, work, measured, label=f", {name}")
        peaks = {arm: max(turn.peak_bytes for turn in turns) for arm, turns in measured.items()}
        report.require_at_most(f"peak memory over TRL's, {name}", peaks["realloc"] / peaks["trl"], MAX_MEMORY_RATIO)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
