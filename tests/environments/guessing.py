"""A number to guess from "higher" and "lower", in a chat of single words, for tests of episodes and of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lightning_realloc.environments import MessageEnvironment, StepResult
from tests.models import tiny_model

NUMBERS = 6
WORDS = ("?", "<end>", *map(str, range(NUMBERS)), "user:", "assistant:", "Guess", "higher", "lower")
END = WORDS.index("<end>")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words with a chat template."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, "?"))
    words.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?", unk_token="?", eos_token="<end>")
    made.chat_template = TEMPLATE
    return made


def chat_model(seed: int = 0) -> PreTrainedModel:
    """Return a tiny model of these words."""
    return tiny_model("llama", seed=seed, vocab_size=len(WORDS), pad_token_id=0, bos_token_id=None, eos_token_id=END)


class Guessing(MessageEnvironment):
    """Answers the last number that the model says; the right one ends the game and earns what is left of 1."""

    metric_names = ("solved",)

    def reset(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        """Begin a game."""
        self.secret = int(row["secret"])
        self.num_guesses = 0
        return None

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """Answer a guess."""
        self.num_guesses += 1
        numbers = [int(word) for word in message["content"].split() if word.isdigit()]
        guess = numbers[-1] if numbers else -1
        if guess == self.secret:
            return StepResult(reward=1 - self.num_guesses / 10, done=True, metrics={"solved": 1.0})
        said = "higher" if guess < self.secret else "lower"
        return StepResult([{"role": "user", "content": said}], reward=-0.1, metrics={"solved": 0.0})
