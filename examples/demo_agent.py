"""GRPO that teaches SmolLM2-135M-Instruct to use a calculator: ``python -m examples.demo_agent``. No network, no GPU.

The model is asked for products of a number of two digits and one of three, which it cannot multiply. Its own chat
template shows no tools, so it gets one that does. It first imitates a few conversations about sums of small numbers, in
which the calculator is called or not, and so sees how calls are written. From rewards for right answers to products it
then learns to call the calculator for them.
``make demo-agent`` installs what is needed. Lightning starts this script again for rank 1; only the first process
writes output.
"""

from __future__ import annotations

import operator
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples import report
from examples.agents import Diary, Row, Scores, Settings, imitate, make_trainer, read_arguments
from examples.smollm2 import model_folder
from lightning_realloc import (
    GRPO,
    SFT,
    Accuracy,
    Conversation,
    PromptDataModule,
    RolloutTable,
    SamplingParams,
    SaveHuggingFace,
    Timeline,
    ToolEnvironment,
)
from lightning_realloc.rewards import NumericAnswer

SETTINGS = Settings(folder=Path("runs/agent"), num_ranks=2, num_demonstrations=48, warm_up_epochs=1, num_iterations=8)
NUM_HELD_OUT, PROMPTS_PER_ITERATION = 64, 4
SHARE_OF_CALLS = 0.25
"""Share of demonstrations in which the model calls the calculator."""
LABELS = {"val/accuracy": "right answers", "val/tool_calls": "calls of the calculator", "val/response_length": "tokens"}
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nYou may call functions:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool.function | tojson }}{% endfor %}
{{- '\\n</tools>\\nCall one as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""SmolLM2's turns, with tools in a first one of the system, and calls in the form of Hermes and Qwen."""
REWARD = NumericAnswer(reader="plain")
"""Whether the last number in the model's last message is right; answers of tools do not count."""
OPERATORS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculator(expression: str) -> int:
    """Calculate with two whole numbers.

    Args:
        expression: Such as "12+7", "12-7" or "12*7".
    """
    found = re.fullmatch(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*", expression)
    if found is None:
        raise ValueError(f"{expression!r} is not two whole numbers with +, - or * between them")
    first, sign, second = found.groups()
    return OPERATORS[sign](int(first), int(second))


SCHEMAS = [tool.schema for tool in ToolEnvironment([calculator]).tools]


@dataclass(frozen=True, slots=True)
class Examined:
    """What a model answers to held-out questions, greedily."""

    scores: Scores
    conversation: str
    """Its conversation about the first question."""


def main(settings: Settings = SETTINGS) -> dict[str, Examined]:
    """Train; return the answers to held-out questions at the start and after each stage; called in every process."""
    report.silence_hints()
    began = time.perf_counter()
    tokenizer = chat_tokenizer()
    rng = random.Random(settings.seed)
    num_questions = PROMPTS_PER_ITERATION * settings.num_iterations
    talks = demonstrations(rng, settings.num_demonstrations)
    rows = [question(*numbers, "*") for numbers in pairs(rng, NUM_HELD_OUT + num_questions)]
    held_out, questions = rows[:NUM_HELD_OUT], rows[NUM_HELD_OUT:]
    found: dict[str, Examined] = {}

    report.heading(f"1/3  SmolLM2-135M-Instruct answers {len(held_out)} held-out questions")
    found["at the start"] = examine(make_trainer(settings), policy(str(model_folder()), settings, tokenizer), held_out)
    report.heading(f"2/3  Warm-up: SFT on {len(talks)} conversations about sums of small numbers")
    sft = SFT(str(model_folder()), tokenizer=tokenizer, learning_rate=5e-5, seed=settings.seed)
    model = policy(imitate(settings, sft, talks, batch_size=8), settings, tokenizer)
    report.heading(f"3/3  GRPO: {settings.num_iterations} iterations on {settings.num_ranks} ranks")
    trainer = make_trainer(
        settings,
        Diary(every_n_steps=1), Timeline(), RolloutTable(every_n_steps=5), SaveHuggingFace(settings.folder / "trained"),
        logger=CSVLogger(settings.folder, name="logs"),
        max_steps=settings.num_iterations,
        log_every_n_steps=1,
    )  # fmt: skip
    found["after the warm-up"] = examine(trainer, model, held_out)
    trainer.fit(model, PromptDataModule(questions, batch_size=PROMPTS_PER_ITERATION, seed=settings.seed))
    found["after GRPO"] = examine(trainer, model, held_out)
    conclude(settings, found, wall_s=time.perf_counter() - began)
    return found


def chat_tokenizer() -> PreTrainedTokenizerBase:
    """Return the model's tokenizer with a chat template that shows tools."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_folder())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def pairs(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Return different pairs of a number of two digits and one of three."""
    return rng.sample(list(product(range(12, 100), range(101, 1000))), count)


def question(first: int, second: int, sign: str) -> Row:
    """Return a prompt with its right answer."""
    asked = {"role": "user", "content": f"What is {first} {sign} {second}?"}
    return {"prompt": [asked], "answer": str(OPERATORS[sign](first, second))}


def demonstration(first: int, second: int, sign: str, *, calls: bool) -> Row:
    """Return a conversation to imitate, in which the model calls the calculator, or answers at once."""
    row, name = question(first, second, sign), "calculator"
    function = {"name": name, "arguments": {"expression": f"{first}{sign}{second}"}}
    call = {"id": "call00000", "type": "function", "function": function}
    asked = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": row["answer"]},
    ]
    said = {"role": "assistant", "content": f"The answer is {row['answer']}."}
    return {"messages": [*row["prompt"], *(asked if calls else []), said], "tools": SCHEMAS}


def demonstrations(rng: random.Random, count: int) -> list[Row]:
    """Return conversations about sums and differences of small numbers; all answers are right."""
    small = range(2, 50)
    return [
        demonstration(rng.choice(small), rng.choice(small), rng.choice("+-"), calls=rng.random() < SHARE_OF_CALLS)
        for _ in range(count)
    ]


def policy(model: str, settings: Settings, tokenizer: PreTrainedTokenizerBase) -> GRPO:
    """Return GRPO for a model that may call the calculator, with a reward for the right number in its last message."""
    return GRPO(
        model,
        REWARD,
        tokenizer=tokenizer,
        tools=[calculator],
        conversation=Conversation(max_turns=3),
        sampling=SamplingParams(n=8, max_new_tokens=96),
        evaluation_sampling=SamplingParams(n=1, max_new_tokens=96, temperature=0.0),
        accuracy=Accuracy(),
        learning_rate=2e-5,
        seed=settings.seed,
    )


def examine(trainer: L.Trainer, model: GRPO, held_out: Sequence[Row]) -> Examined:
    """Let a model answer held-out questions."""
    rows = PromptDataModule(list(held_out), val_data=list(held_out), batch_size=len(held_out))
    (scores,) = trainer.validate(model, rows, verbose=False)
    shown = PromptDataModule(list(held_out[: trainer.world_size]), batch_size=trainer.world_size)
    (samples,) = trainer.predict(model, shown)
    return Examined(scores, str(model.sample_rows(samples)[0]["conversation"]))


def conclude(settings: Settings, found: Mapping[str, Examined], *, wall_s: float) -> None:
    """Show the scores, one conversation of each stage, and where the files are."""
    table = Table(title=f"{NUM_HELD_OUT} held-out products, {wall_s:.0f} s", title_justify="left", title_style="bold")
    for column in ("", *found):
        table.add_column(column, justify="right" if column else "left")
    for name, label in LABELS.items():
        table.add_row(label, *(f"{examined.scores[name]:.2f}" for examined in found.values()))
    report.console.print(table)
    for stage, examined in found.items():
        report.heading(f"The first of them, {stage}")
        report.say(examined.conversation)
    folder = str(settings.folder)
    trained = ("chat", f"{folder}/trained", "--tools", "examples/demo_agent.py:calculator")
    report.show_lines(
        "Next",
        {
            "See how it learned, in a browser": report.command_line("report", folder),
            "Ask the model, such as: What is 34 * 567?": report.command_line(*trained),
        },
    )


if __name__ == "__main__":
    main(read_arguments(__doc__, SETTINGS))
