"""``lightning-realloc eval``: the numbers of an evaluation during training, for folders, checkpoints and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc import Evaluation, EvaluationSet, SaveHuggingFace
from lightning_realloc.commands.eval_command import run_eval
from lightning_realloc.commands.report_command import run_report
from lightning_realloc.errors import ConfigError, ReallocError
from lightning_realloc.generation import SamplingParams
from lightning_realloc.report.runs.run_folder import read_run_folder
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs

ROWS = [{"prompt": f"{number} + {number + 1} =", "limit": 3 + number % 3} for number in range(5)]


def varied(completion_ids: list[list[int]], limit: list[int], **columns: object) -> list[float]:
    """Call a response right if it has enough different tokens."""
    return [float(len(set(ids)) >= least) for ids, least in zip(completion_ids, limit, strict=True)]


REWARD = ("--reward", f"{__name__}:varied")


def evaluate(*arguments: str) -> str:
    """Run the command, and return what it writes."""
    written: list[str] = []
    assert run_eval(arguments, written.append) == 0
    return "".join(written)


def test_a_model_and_its_checkpoint_have_the_scores_of_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    rows = tmp_path / "sums.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sampling = SamplingParams(n=4, max_new_tokens=6)
    evaluation = Evaluation({"sums": EvaluationSet(str(rows), reward=varied, sampling=sampling)}, at_start=False)
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="trained", enable_version_counter=False)
    module = runs.sft(actor=tiny_model("llama", vocab_size=320), tokenizer=byte_tokenizer())
    trainer = runs.trainer(
        "realloc", 1, enable_checkpointing=True, default_root_dir=tmp_path,
        callbacks=[evaluation, saved, SaveHuggingFace(tmp_path / "run" / "model")],
    )  # fmt: skip
    trainer.fit(module, runs.Batches(2, responses=True))
    expected = module.question_scores["eval/sums"]
    assert 0 < sum(expected.num_right) < 20
    flags = ("--set", str(rows), *REWARD, "--n", "4", "--max-new-tokens", "6")
    for model, output in ((tmp_path / "run", "a"), (tmp_path / "trained.ckpt", "b")):
        text = evaluate(str(model), *flags, "--output", str(tmp_path / output))
        assert read_run_folder(tmp_path / output).evaluations["eval/sums"].scores == expected
    share = f"{sum(expected.num_right) / 20:.3g}"
    line = next(line for line in text.splitlines() if "eval/sums/accuracy" in line)
    assert line.split()[:2] == ["eval/sums/accuracy", share] and line.split()[-1] == "5" and " to " in line
    written: list[str] = []
    run_report(
        [str(tmp_path / "a"), "--compare", str(tmp_path / "b"), "--output", "-", "--format", "md"], written.append
    )
    assert "eval/sums/accuracy" in written[0] and "cannot be distinguished" in written[0]


def test_wrong_command_lines_are_named(tmp_path: Path) -> None:
    rows = tmp_path / "sums.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def refused(match: str, *arguments: str, error: type[Exception] = ConfigError) -> None:
        with pytest.raises(error, match=match):
            evaluate("model", *arguments)

    refused("eval needs --set: a file", *REWARD)
    refused("eval needs --reward: one of exact", "--set", str(rows))
    refused("--reward=mth is unknown; did you mean math", "--set", str(rows), "--reward", "mth")
    refused("--set: there is no 'sumz.jsonl'", "--set", "sumz.jsonl", *REWARD)
    refused("two sets are named 'sums'; .* --set NAME=DATA", "--set", str(rows), "--set", f"sums={rows}", *REWARD)
    refused("n=0 responses per prompt must be at least 1", "--set", str(rows), *REWARD, "--n", "0", error=ReallocError)
    refused("--output: .* cannot be written", "--set", str(rows), *REWARD, "--output", str(rows))
    refused("there is no flag --metric", "--set", str(rows), "--metric", "x")
