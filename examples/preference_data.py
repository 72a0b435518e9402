"""Write the data of the preference examples: the demo's words, sorted right and wrong.

python -m examples.demo --prepare-only     # the model they start from, in a few minutes
python -m examples.preference_data
lightning-realloc fit --config examples/dpo.yaml     # or kto, orpo, reward_model, process_reward
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.sorting import problem, random_words, write_jsonl

FOLDER = Path("runs/preferences")


def wrong(word: str, rng: random.Random) -> str:
    """Return the sorted letters with two of them swapped."""
    letters = sorted(word)
    first, second = rng.sample(range(len(letters)), 2)
    letters[first], letters[second] = letters[second], letters[first]
    return "".join(letters)


def pair(word: str, rng: random.Random) -> dict[str, Any]:
    """Return a right answer and a wrong one."""
    row = problem(word)
    return {"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong(word, rng)}


def judged(word: str, rng: random.Random) -> dict[str, Any]:
    """Return an answer and whether it is right."""
    row, label = problem(word), rng.random() < 0.5
    return {"prompt": row["prompt"], "completion": row["answer"] if label else wrong(word, rng), "label": label}


def steps(word: str, rng: random.Random) -> dict[str, Any]:
    """Return an answer letter by letter; a letter is right in its sorted place."""
    row = problem(word)
    letters = wrong(word, rng)
    labels = [given == expected for given, expected in zip(letters, row["answer"], strict=True)]
    return {"prompt": row["prompt"], "completions": list(letters), "labels": labels}


def write(folder: Path, words: Sequence[str], rng: random.Random) -> None:
    """Write all kinds of data, of the same words."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, row_of in (("pairs", pair), ("judged", judged), ("steps", steps)):
        write_jsonl(folder / f"{name}.jsonl", [row_of(word, rng) for word in words])


if __name__ == "__main__":
    rng = random.Random(0)
    write(FOLDER, random_words(2048, rng), rng)
