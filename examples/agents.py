"""Parts that examples of agents share: a chat of few tokens, a warm-up on demonstrations, and training from rewards.

Markers and words are one token each, so that turns are short enough for a CPU.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from rich.table import Table
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from examples.report import console
from examples.sorting import tiny_llama
from lightning_realloc import SFT, MultiModelModule, PromptDataModule, SaveHuggingFace, SFTDataModule

ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
MARKERS = ("<pad>", "<unk>", "<|end|>", "<|tools|>", *ROLES, "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for tool in tools or [] %}<|tools|>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Names of tools, turns that end with ``<|end|>``, and calls in the form of Hermes and Qwen."""

Row = dict[str, Any]
"""One row of the data."""
Scores = Mapping[str, float]
"""Metrics by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run. Batch sizes count all ranks together."""

    folder: Path
    """Where the model is written after the warm-up."""
    seed: int = 0
    num_ranks: int = 1
    num_demonstrations: int
    warm_up_epochs: int
    num_iterations: int


def read_arguments(description: str | None, settings: Settings) -> Settings:
    """Return settings with those of the command line."""
    parser = argparse.ArgumentParser(description=description, argument_default=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help="of data, weights and sampling")
    parser.add_argument("--num-ranks", type=int, help="processes that share each batch")
    parser.add_argument("--num-iterations", type=int, help="steps of GRPO")
    parser.add_argument("--folder", type=Path, help="where the model is written after the warm-up")
    return replace(settings, **vars(parser.parse_args()))


def chat_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of markers and words with a chat template; any other text is one ``<unk>``."""
    vocabulary = {token: index for index, token in enumerate((*MARKERS, *words))}
    made = Tokenizer(WordLevel(vocabulary, "<unk>"))
    longest_first = sorted(words, key=len, reverse=True)
    made.pre_tokenizer = Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    made.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|end|>",
        extra_special_tokens=list(MARKERS[3:]),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def warm_up(settings: Settings, words: Sequence[str], rows: Sequence[Row]) -> str:
    """Train a tiny Llama with random weights on conversations; return the folder with model and tokenizer."""
    tokenizer = chat_tokenizer(words)
    torch.manual_seed(settings.seed)
    config = tiny_llama(
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = SFT(LlamaForCausalLM(config), tokenizer=tokenizer, learning_rate=3e-3, seed=settings.seed)
    return imitate(settings, model, rows, batch_size=64)


def imitate(settings: Settings, model: SFT, rows: Sequence[Row], *, batch_size: int) -> str:
    """Train a model on conversations; return the folder with model and tokenizer."""
    folder = str(settings.folder / "warm")
    data = SFTDataModule(list(rows), batch_size=batch_size, seed=settings.seed)
    make_trainer(settings, SaveHuggingFace(folder), max_epochs=settings.warm_up_epochs).fit(model, data)
    return folder


def learn(
    settings: Settings, model: MultiModelModule, rows: Sequence[Row], held_out: Sequence[Row], *, batch_size: int
) -> tuple[Scores, Scores]:
    """Train on prompts; return the metrics of held-out ones before and after."""
    data = PromptDataModule(list(rows), batch_size=batch_size, seed=settings.seed)
    others = PromptDataModule(list(rows), val_data=list(held_out), batch_size=batch_size)
    trainer = make_trainer(settings, Diary(), max_steps=settings.num_iterations)
    (before,) = trainer.validate(model, others, verbose=False)
    trainer.fit(model, data)  # without held-out rows, which it would validate after each epoch
    (after,) = trainer.validate(model, others, verbose=False)
    return before, after


class Diary(Callback):
    """Prints a line every ``every_n_steps`` iterations."""

    def __init__(self, every_n_steps: int = 10) -> None:
        self.every_n_steps = every_n_steps

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        """Print the logged metrics."""
        if (trainer.global_step - 1) % self.every_n_steps == 0:
            seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
            turns = f"   turns {seen['turns']:.1f}" if "turns" in seen else ""
            console.print(f"iteration {trainer.global_step:3}   reward {seen['reward']:+.2f}{turns}")


def make_trainer(settings: Settings, *callbacks: Callback, logger: Logger | None = None, **limits: int) -> L.Trainer:
    """Return a trainer on CPU ranks that writes no checkpoints."""
    return L.Trainer(
        strategy="realloc",
        accelerator="cpu",
        devices=settings.num_ranks,
        callbacks=list(callbacks),
        logger=logger or False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **limits,
    )


def show(title: str, scores: tuple[Scores, Scores], labels: Mapping[str, str]) -> None:
    """Print a table of metrics before and after training; ``labels`` are by the metrics' names."""
    table = Table(title=f"{title}, {time.process_time():.0f} s of CPU time", title_justify="left", title_style="bold")
    for column in ("", "after the warm-up", "after GRPO"):
        table.add_column(column, justify="right" if column else "left")
    for name, label in labels.items():
        table.add_row(label, *(f"{values[name]:.2f}" for values in scores))
    console.print(table)
