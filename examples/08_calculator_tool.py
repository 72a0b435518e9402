"""GRPO that learns to call a tool: ``python -m examples.08_calculator_tool``. No network, no GPU; a minute.

A tiny model is asked for sums of two numbers of three digits, which it cannot add. It first imitates conversations in
which the calculator is often left out, called for a product, or contradicted. From rewards for right answers it then
learns to call ``add`` and to copy the result. Calls are written as Hermes and Qwen write them.

Right answers to held-out questions with seeds 0, 1, 2: from 20%, 9%, 12% to 92%, 68%, 88%; every run calls ``add`` once
for each question in the end, and errors are wrong copies. A run takes 40 s of one CPU core.
"""

import random
from pathlib import Path
from typing import Any

from examples.agents import Row, Scores, Settings, learn, read_arguments, show, warm_up
from examples.report import silence_hints
from lightning_realloc import GRPO, Conversation, SamplingParams, ToolEnvironment

SETTINGS = Settings(folder=Path("runs/calculator_tool"), num_demonstrations=2048, warm_up_epochs=8, num_iterations=40)
WORDS = (*"0123456789+=", "add", "multiply", '{"name": "', '", "arguments": ', '{"a": ', ', "b": ', "}}")
KINDS = {"right": 0.3, "guess": 0.4, "product": 0.2, "contradiction": 0.1}
"""Kinds of demonstrations, and their shares."""
LABELS = {"val/reward": "right answers", "val/tool_calls/add": "calls of add", "val/tool_calls/multiply": "of multiply"}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a * b


TOOLS = {"add": add, "multiply": multiply}
SCHEMAS = [tool.schema for tool in ToolEnvironment(list(TOOLS.values())).tools]


def two_numbers(rng: random.Random) -> tuple[int, int]:
    """Return random numbers of three digits."""
    return rng.randint(100, 999), rng.randint(100, 999)


def question(a: int, b: int) -> Row:
    """Return a prompt with its right answer."""
    return {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)}


def demonstration(a: int, b: int, kind: str, guess: int) -> Row:
    """Return a conversation to imitate, of one of the kinds."""
    name = "multiply" if kind == "product" else "add"
    result = str(TOOLS[name](a, b))
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {"a": a, "b": b}}}
    asked = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": name, "content": result},
    ]
    said = {"role": "assistant", "content": result if kind in ("right", "product") else str(guess)}
    return {"messages": [*question(a, b)["prompt"], *([] if kind == "guess" else asked), said], "tools": SCHEMAS}


def is_right(completions: list[Any], answer: list[str], **columns: object) -> list[float]:
    """Reward conversations whose last turn is the right answer."""
    turns = [[message for message in messages if message["role"] == "assistant"] for messages in completions]
    return [float(own[-1:] != [] and own[-1]["content"] == right) for own, right in zip(turns, answer, strict=True)]


def main(settings: Settings = SETTINGS) -> tuple[Scores, Scores]:
    """Train, and return the metrics of held-out questions before and after; called in every process."""
    silence_hints()
    rng = random.Random(settings.seed)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=settings.num_demonstrations)
    talks = [demonstration(*two_numbers(rng), kind, rng.randint(200, 1998)) for kind in kinds]
    folder = warm_up(settings, WORDS, talks)
    model = GRPO(
        folder,
        is_right,
        tools=[add, multiply],
        conversation=Conversation(max_turns=3),
        sampling=SamplingParams(n=8, max_new_tokens=48),
        evaluation_sampling=SamplingParams(n=1, max_new_tokens=48),
        learning_rate=1e-3,
        seed=settings.seed,
    )
    held_out = [question(*two_numbers(rng)) for _ in range(128)]
    questions = [question(*two_numbers(rng)) for _ in range(16 * settings.num_iterations)]
    scores = learn(settings, model, questions, held_out, batch_size=16)
    show(f"{len(held_out)} sums that it has not seen", scores, LABELS)
    return scores


if __name__ == "__main__":
    main(read_arguments(__doc__, SETTINGS))
