"""PredictionWriter writes every row once, in order, and the same rows for any number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_realloc.callbacks import PredictionWriter
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.errors import ConfigError, RewardError
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.workers import WorkerPool

ROWS = [{"prompt": f"prompt {number}", "tag": f"№ {number}"} for number in range(5)]


def predict(folder: str) -> None:
    """Write predictions for all rows."""
    world_size = runs.world_size()
    sampling = replace(runs.SAMPLING, n=2)
    models = {role: tiny_model("llama", vocab_size=259) for role in ("actor", "reference")}
    module = runs.grpo(evaluation_sampling=sampling, **models)
    writer = PredictionWriter(Path(folder) / "made" / "predictions.jsonl")
    trainer = runs.trainer("realloc", world_size, callbacks=[writer])
    data = PromptDataModule(ROWS, batch_size=2, tokenizer=byte_tokenizer())
    trainer.predict(module, data, return_predictions=False)


def test_rows_come_in_order_and_are_the_same_for_any_number_of_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    found: list[Any] = []
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        workers.run(predict, str(folder), world_size=world_size, init_process_group=False)
        (file,) = (folder / "made").iterdir()
        assert file.name == "predictions.jsonl"
        found.append([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()])
    # two responses to each of five prompts
    assert [row["tag"] for row in found[0]] == [f"№ {number // 2}" for number in range(10)]
    assert [row["prompt_id"] for row in found[0]] == [number // 2 for number in range(10)]
    assert len({row["response"] for row in found[0]}) > 5
    assert all(0.0 <= row["reward"] <= 1.0 for row in found[0])
    assert found[1] == found[0]


class Broken(PredictionWriter):
    """Fails in its second batch."""

    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any) -> None:
        """Write the first batch."""
        if args[1] == 1:
            raise OSError("the disk is full")
        super().on_predict_batch_end(trainer, pl_module, outputs, *args)


def break_off(folder: str) -> list[str]:
    """Return the files left after a failure."""
    path = Path(folder) / "predictions.jsonl"
    trainer = runs.trainer("realloc", 1, callbacks=[Broken(path)])
    with pytest.raises(OSError, match="the disk is full"):
        trainer.predict(runs.grpo(), runs.Batches(2, size=3))
    return [f"{file.name}: {len(file.read_text().splitlines())}" for file in Path(folder).iterdir()]


def test_an_incomplete_file_keeps_the_suffix_part(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(break_off, str(tmp_path), world_size=1, init_process_group=False) == [
        ["predictions.jsonl.part: 3"]
    ]


def needs_answer(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Reward from a column."""
    return [0.0] * len(completions)


def run_without_a_column(folder: str, algorithm: str) -> tuple[str, list[dict[str, Any]], str]:
    """Return the error for data without a required column, and the predictions made without rewards."""
    batches, path = runs.Batches(2, size=3), Path(folder) / f"{algorithm}.jsonl"
    module = getattr(runs, algorithm)(reward=needs_answer)
    trainer = runs.trainer("realloc", 1, callbacks=[PredictionWriter(path)])
    with pytest.warns(UserWarning, match="responses are predicted without rewards") as caught:
        trainer.predict(module, batches)
    with pytest.raises(RewardError) as refused:
        runs.trainer("realloc", 1).validate(module, batches)
    told = next(str(entry.message) for entry in caught if "without rewards" in str(entry.message))
    return told, [json.loads(line) for line in path.read_text().splitlines()], str(refused.value)


@pytest.mark.parametrize(("algorithm", "reward"), [("grpo", "reward"), ("ppo", "score")])
def test_rows_without_a_column_of_the_reward_are_predicted_without_rewards(
    workers: WorkerPool, tmp_path: Path, algorithm: str, reward: str
) -> None:
    ((told, rows, refused),) = workers.run(
        run_without_a_column, str(tmp_path), algorithm, world_size=1, init_process_group=False
    )
    assert "the data has the columns ['prompt'], and reward function 'needs_answer' asks for 'answer'" in told
    assert [row["prompt"] for row in rows] == [f"prompt {number}" for number in range(6)]
    assert all(row["num_response_tokens"] > 0 and reward not in row for row in rows)
    assert "'needs_answer' needs the columns ['answer']" in refused


class Plain(L.LightningModule):
    """Not an algorithm of this package."""


def test_predictions_that_cannot_be_written_are_refused_before_generation(tmp_path: Path) -> None:
    trainer: Any = None
    with pytest.raises(ConfigError, match=r"Plain has no sample_rows\(\)"):
        PredictionWriter(tmp_path / "predictions.jsonl").setup(trainer, Plain(), "predict")
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        PredictionWriter(tmp_path).setup(trainer, runs.grpo(), "predict")
    PredictionWriter(tmp_path).setup(trainer, Plain(), "fit")
