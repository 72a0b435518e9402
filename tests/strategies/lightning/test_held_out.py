"""Evaluation metrics cover all held-out samples, on two ranks and for any batch sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from lightning_realloc.batch.samples import Samples
from lightning_realloc.strategies import ReallocStrategy
from tests.strategies import runs
from tests.strategies.algorithms import preferences
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

DATA = {"reward_model": "pairs", "dpo": "pairs", "kto": "judged", "process_reward": "steps", "sft": "judged"}


class Uneven:
    """Batches of six, six and two rows; a row of a pair has two samples."""

    def __init__(self, name: str) -> None:
        batches = list(getattr(preferences, DATA[name])(3))
        self.batches = [*batches[:2], batches[2].select(range(4 if DATA[name] == "pairs" else 2))]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Samples]:
        return iter(self.batches)


def measured(name: str) -> tuple[dict[str, float], list[dict[str, list[float]]]]:
    """Return the metrics of ``validate``, and the predictions of ``predict`` for each batch."""
    module = runs.sft() if name == "sft" else getattr(preferences, name)()
    trainer = runs.trainer(ReallocStrategy("heuristic"), runs.world_size())
    (validated,) = trainer.validate(module, Uneven(name), verbose=False)
    predicted: Any = trainer.predict(module, Uneven(name))
    rows = []
    for batch in predicted:
        batch = batch.sorted_by_id()
        found = {name: c.tolist() for name, c in batch.columns.items() if isinstance(c, Tensor) and c.dim() == 1}
        rows.append({**found, "tokens": batch.ragged("response_ids").lengths.tolist()})
    return validated, rows


def together(rows: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the columns of all batches."""
    return {name: [value for row in rows for value in row[name]] for name in rows[0]}


def mean(values: list[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def area(good: list[float], bad: list[float]) -> float:
    """Return the share of correctly ordered pairs of a good and a bad score; ties count half."""
    return mean([(one > other) + 0.5 * (one == other) for one in good for other in bad])


def calibration(margins: list[float]) -> float:
    """Return the calibration error: confidence minus share of correct pairs, in 15 bins of confidence."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for margin in margins:
        confidence = 1 / (1 + math.exp(-abs(margin)))
        bins.setdefault(min(14, int(confidence * 15)), []).append((confidence, margin > 0))
    return sum(abs(sum(c for c, _ in found) - sum(r for _, r in found)) for found in bins.values()) / len(margins)


def run(workers: WorkerPool, name: str) -> tuple[dict[str, float], list[dict[str, list[float]]]]:
    """Evaluate on two ranks, and require equal results."""
    first, second = workers.run(measured, name, world_size=2, init_process_group=False, deadline_s=60.0)
    assert first == second
    validated, rows = first
    assert [len(row["tokens"]) for row in rows] == ([12, 12, 4] if DATA[name] == "pairs" else rows_of(name))
    return validated, rows


def rows_of(name: str) -> list[int]:
    """Return the samples of each batch; KTO adds a mismatched sample after each."""
    return [12, 12, 4] if name == "kto" else [6, 6, 2]


def test_a_reward_model_is_measured_over_all_held_out_pairs(workers: WorkerPool) -> None:
    validated, rows = run(workers, "reward_model")
    everything = together(rows)
    scores, margins = everything["scores"], everything["margins"][0::2]
    expected = {
        "val/loss": mean(everything["losses"]), "val/margin": mean(margins), "val/score": mean(scores),
        "val/accuracy": mean([margin > 0 for margin in margins]), "val/auroc": area(scores[0::2], scores[1::2]),
        "val/calibration_error": calibration(margins),
    }  # fmt: skip
    assert validated == pytest.approx(expected, abs=1e-5)
    # The mean of the batches' values differs.
    apart = [area(row["scores"][0::2], row["scores"][1::2]) for row in rows]
    assert abs(mean(apart) - expected["val/auroc"]) > 1e-3


def test_implied_rewards_are_measured_over_all_held_out_responses(workers: WorkerPool) -> None:
    validated, rows = run(workers, "dpo")
    everything = together(rows)
    assert validated["val/calibration_error"] == pytest.approx(calibration(everything["margins"][0::2]), abs=1e-5)
    assert validated["val/loss"] == pytest.approx(mean(everything["losses"]), abs=1e-5)
    validated, rows = run(workers, "kto")
    judged = [
        (label, 0.1 * ratio)
        for row in rows for label, ratio, kept in zip(row["label"], row["ratios"], row["trained"], strict=True) if kept
    ]  # fmt: skip
    good, bad = ([reward for label, reward in judged if bool(label) is kind] for kind in (True, False))
    assert validated["val/auroc"] == pytest.approx(area(good, bad), abs=1e-5)
    # Batches have two, two and one good responses: the mean over all differs from the mean over batches.
    assert validated["val/desirable_reward"] == pytest.approx(mean(good), abs=1e-5)
    assert validated["val/undesirable_reward"] == pytest.approx(mean(bad), abs=1e-5)


def test_losses_are_means_over_tokens_or_steps(workers: WorkerPool) -> None:
    validated, rows = run(workers, "sft")
    everything = together(rows)
    per_token = -sum(everything["response_logprobs"]) / sum(everything["tokens"])
    assert validated["val/loss"] == pytest.approx(per_token, abs=1e-5)
    validated, rows = run(workers, "process_reward")
    everything = together(rows)
    assert validated == pytest.approx(
        {
            "val/loss": sum(everything["losses"]) / sum(everything["num_steps"]),
            "val/accuracy": sum(everything["num_right"]) / sum(everything["num_steps"]),
        },
        abs=1e-5,
    )


def apart_and_together() -> tuple[dict[str, float], dict[str, float], dict[str, float], list[int]]:
    """Return the metrics of two loaders one after the other and in one run, and how many batches each predicts."""
    module = runs.sft()
    trainer = runs.trainer(ReallocStrategy("heuristic"), runs.world_size())
    loaders = [Batches(2, responses=True, seed=seed) for seed in (1, 2)]
    first, second = (trainer.validate(module, loader, verbose=False)[0] for loader in loaders)
    both = trainer.validate(module, loaders, verbose=False)[0]
    predicted: Any = trainer.predict(module, loaders)
    return first, second, both, [len(batches) for batches in predicted]


def test_several_loaders_are_measured_each_by_itself(workers: WorkerPool) -> None:
    for first, second, both, counts in workers.run(apart_and_together, world_size=2, init_process_group=False):
        assert first["val/loss"] != second["val/loss"]
        assert both == {"val/loss/dataloader_idx_0": first["val/loss"], "val/loss/dataloader_idx_1": second["val/loss"]}
        assert counts == [2, 2]
