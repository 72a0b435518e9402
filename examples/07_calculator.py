"""GRPO with a tool: ``python -m examples.07_calculator``. No network, no GPU; about a minute.

The prompt is a number. The actor writes a product or a sum, a calculator returns its value, and it may try again.
The actor starts with random weights, so it first learns the calculator's syntax, then how to come close. Lightning
starts this script again for the second rank.
"""

import random
import re
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from examples.report import silence_hints
from examples.sorting import tiny_llama
from lightning_realloc import GRPO, Conversation, PromptDataModule, SamplingParams, Turn

SYMBOLS = "0123456789+*;=?:"
"""``;`` ends the actor's turn; ``=``, ``?`` and ``:`` are the calculator's."""


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per symbol."""
    tokenizer = Tokenizer(WordLevel({symbol: index for index, symbol in enumerate(SYMBOLS)}, "?"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="?")


def value_of(expression: str) -> int | None:
    """Return the value of a sum or product of two digits; None for anything else."""
    found = re.fullmatch(r"(\d)([+*])(\d)", expression)
    if found is None:
        return None
    first, sign, second = found.groups()
    return int(first) + int(second) if sign == "+" else int(first) * int(second)


class Calculator:
    """Answers every turn with the value of its expression, and ends the response at the right value."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def __call__(self, turn: Turn) -> list[int] | None:
        """Return the tokens that the actor reads next; None ends the response."""
        asked = "".join(self.tokenizer.convert_ids_to_tokens(list(turn.prompt)))
        said = "".join(self.tokenizer.convert_ids_to_tokens(list(turn.token_ids)))
        value = value_of(said.removesuffix(";").rpartition(":")[2])
        if value is not None and f"{value}:" == asked:
            return None
        return list(self.tokenizer(f"={'?' if value is None else value}:")["input_ids"])


def close(completions: list[str], target: list[int], **columns: object) -> list[float]:
    """Reward 0.2 for any valid expression, and up to 1 for the requested number."""
    rewards = []
    for text, wanted in zip(completions, target, strict=True):
        turns = re.findall(r"(?:^|:)([^;:=?]*);", text.replace(" ", ""))
        values = [value for value in map(value_of, turns) if value is not None]
        rewards.append(max((0.2 + 0.8 * max(0.0, 1 - abs(value - wanted) / 20) for value in values), default=0.0))
    return rewards


class Diary(Callback):
    """Prints a line every tenth iteration."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        """Print the logged metrics."""
        if trainer.is_global_zero and trainer.global_step % 10 == 1:
            seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
            print(
                f"iteration {trainer.global_step:3}   reward {seen['reward']:.2f}   turns {seen['turns']:.1f}   "
                f"done {seen['stopped/environment']:.0%}"
            )


def main(num_iterations: int = 100, **settings: Any) -> L.Trainer:
    """Train, and return the trainer with everything it logged; called in every process."""
    silence_hints()
    rng = random.Random(0)
    targets = [rng.randint(2, 40) for _ in range(16 * num_iterations)]
    tokenizer = letters()
    model = GRPO(
        tiny_llama(vocab_size=len(SYMBOLS), pad_token_id=None, bos_token_id=None, eos_token_id=None),
        close,
        tokenizer=tokenizer,
        environment=Calculator,                                 # made from the tokenizer; in YAML its import path
        conversation=Conversation(max_turns=3, deadline_s=5.0),
        sampling=SamplingParams(n=8, max_new_tokens=24, stop_token_ids=(SYMBOLS.index(";"),)),
        learning_rate=3e-3,
        **settings,
    )  # fmt: skip
    trainer = L.Trainer(
        strategy="realloc",
        accelerator="cpu",
        devices=2,
        max_steps=num_iterations,
        callbacks=[Diary()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = [{"prompt": f"{target}:", "target": target} for target in targets]
    trainer.fit(model, PromptDataModule(rows, batch_size=16))
    return trainer


if __name__ == "__main__":
    main()
