"""The calculator example: answers, rewards, and a few iterations on two ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc import Turn
from tests.workers import WorkerPool

example: Any = importlib.import_module("examples.07_calculator")
SCRIPT = Path(__file__).parents[2] / "examples/07_calculator.py"


def answer(asked: str, said: str) -> str | None:
    """Return the calculator's answer to a text."""
    tokenizer = example.letters()
    prompt, response = (tuple(tokenizer(text)["input_ids"]) for text in (asked, said))
    told = example.Calculator(tokenizer)(Turn(0, 0, prompt, response, 1))
    return None if told is None else "".join(tokenizer.convert_ids_to_tokens(told))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("4*5;", "=20:"),
        ("4+5;", "=9:"),
        ("4*6;", None),
        ("45;", "=?:"),
        ("4*5;=20:4*6;", None),
        ("4*6;=24:3+3;", "=6:"),
    ],
)
def test_the_calculator_answers_the_last_turn(said: str, told: str | None) -> None:
    assert answer("24:", said) == told


def test_the_closest_turn_is_rewarded() -> None:
    # No product; 20 of 24: 0.2 + 0.8 * (1 - 4 / 20); the same, then right; not readable; far away.
    texts = ["4 *", "4 * 5 ;", "4 * 5 ; = 2 0 : 4 * 6 ;", "4 4 ;", "9 * 9 ;"]
    assert example.close(texts, [24] * 5, prompts=[]) == pytest.approx([0.0, 0.84, 1.0, 0.0, 0.2])


def run_script() -> tuple[int, dict[str, float]]:
    """Run three iterations; return the step count and the metrics logged last."""
    trainer = example.main(num_iterations=3)
    return trainer.global_step, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.exhaustive
def test_the_script_runs_on_two_ranks(workers: WorkerPool) -> None:
    everyone = workers.run(run_script, world_size=2, init_process_group=False, deadline_s=120.0)
    assert [steps for steps, _ in everyone] == [3, 3]
    logged = everyone[0][1]
    assert logged["turns"] >= 1.0 and logged["stopped/failure"] == 0.0
    assert logged["response_length"] <= 24


def test_the_script_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 140
