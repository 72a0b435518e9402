"""A number to guess from "higher" and "lower", in a chat of single words, for tests of episodes and of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lightning_realloc.environments import MessageEnvironment, StepResult, ToolEnvironment
from tests.models import tiny_model

NUMBERS = 6
WORDS = ("?", "<end>", *map(str, range(NUMBERS)), "user:", "assistant:", "Guess", "higher", "lower")
END = WORDS.index("<end>")
TEMPLATE = (
    "{% if tools %}user: {% for tool in tools %}{{ tool.function.name }} {% endfor %}<end> {% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }} "
    "{% for call in message.tool_calls %}{{ call.function.name }} {{ call.function.arguments }} {% endfor %}<end> "
    "{% endfor %}"
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


class Asking(ToolEnvironment):
    """The same game with a tool that knows the number; guesses are turns without calls.

    Args:
        settings: Bounds of the tool's calls.
    """

    metric_names = ("solved",)

    def __init__(self, **settings: Any) -> None:
        super().__init__([self.is_above], **settings)
        self.game = Guessing()

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin a game."""
        self.game.reset(row)

    def is_above(self, number: int) -> str:
        """Tell whether the secret number is above another one.

        Args:
            number: The other one.
        """
        return "higher" if self.game.secret > number else "lower"

    async def step(self, message: Mapping[str, Any]) -> StepResult:
        """Answer calls, or a guess."""
        return await super().step(message) if message.get("tool_calls") else self.game.step(message)


def is_even(number: int) -> str:
    """Tell whether a number is even.

    Args:
        number: The number.
    """
    return "higher" if number % 2 else "lower"


def words_as_calls(text: str) -> dict[str, Any]:
    """Return a turn as a message: its numbers are calls of `Asking.is_above`, unless it says "Guess"."""
    words = text.split()
    numbers = [] if "Guess" in words else [int(word) for word in words if word.isdigit()]
    return {"content": text, "tool_calls": [{"name": "is_above", "arguments": {"number": n}} for n in numbers]}


def words_as_calls_of_two(text: str) -> dict[str, Any]:
    """Return a turn as `words_as_calls` does, with calls of `is_even` for its odd numbers."""
    message = words_as_calls(text)
    for call in message["tool_calls"]:
        call["name"] = "is_even" if call["arguments"]["number"] % 2 else "is_above"
    return message
