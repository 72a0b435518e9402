"""One-line training from the command line: a whole run, its configuration as a file, and mistakes."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from tests.command_lines import run_lines
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model
from tests.workers import WorkerPool

TEMPLATE = "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '\n' }}{% endfor %}"
SMALL = ("--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.enable_model_summary", "false")
GRPO = ("grpo", "--model", "model", "--data", "prompts.jsonl", "--reward", "exact", "--reward", "rewards:short",
        "--n", "2", "--max-new-tokens", "4", "--batch-size", "4", *SMALL)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a model, models with parts missing, data and rewards."""
    path = tmp_path_factory.mktemp("user")
    model, tokenizer = tiny_model("qwen2", vocab_size=320), byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for name in ("model", "no_tokenizer", "no_weights"):
        model.save_pretrained(path / name)
        if name != "no_tokenizer":
            tokenizer.save_pretrained(path / name)
    (path / "no_weights" / "model.safetensors").unlink()
    rows = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(8)]
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "no"} for row in rows]
    texts = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
    for name, table in (("prompts", rows), ("pairs", pairs), ("texts", texts)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    short = "def short(completion_ids, **columns):\n    return [-float(len(ids)) for ids in completion_ids]\n"
    (path / "rewards.py").write_text(short)
    return path


def test_grpo_trains_logs_saves_and_answers(workers: WorkerPool, folder: Path) -> None:
    fitted, answered = run_lines(
        workers,
        folder,
        [*GRPO, "--steps", "2", "--model.learning_rate", "1e-3", "--output", "out"],
        ["chat", "out", "--device", "cpu", "--max-new-tokens", "3", "--temperature", "0"],
        typed="1+1=",
    )
    assert fitted.code == 0, fitted.errors
    assert (folder / "out" / "checkpoints" / "last.ckpt").exists()
    with (folder / "out" / "log" / "version_0" / "metrics.csv").open() as file:
        logged = list(csv.DictReader(file))
    assert [row["step"] for row in logged if row.get("reward")] == ["0", "1"]
    config = yaml.safe_load((folder / "out" / "log" / "version_0" / "config.yaml").read_text())
    assert config["model"]["init_args"]["learning_rate"] == 1e-3  # the setting of fit, after the short flags
    assert config["data"]["init_args"]["text_prompts"] == "auto"
    AutoModelForCausalLM.from_pretrained(folder / "out" / "model")
    assert answered.code == 0, answered.errors
    assert answered.output.endswith("\n")


def test_a_saved_configuration_does_the_same_without_the_short_flags(workers: WorkerPool, folder: Path) -> None:
    saved, printed = run_lines(
        workers,
        folder,
        [*GRPO, "--steps", "1", "--model.kl.estimator", "k1", "--output", "other", "--save-config", "made/run.yaml"],
        ["fit", "--config", "made/run.yaml", "--print_config"],
    )
    assert saved.code == 0, saved.errors
    assert saved.output == "made/run.yaml written; lightning-realloc fit --config made/run.yaml does the same\n"
    assert not (folder / "other").exists()  # nothing was trained
    assert printed.code == 0, printed.errors
    whole = yaml.safe_load(printed.output)
    assert whole["trainer"]["max_steps"] == 1 and whole["trainer"]["devices"] == "1"
    assert whole["trainer"]["strategy"] == "realloc"
    assert whole["model"]["init_args"]["sampling"]["n"] == 2
    assert whole["model"]["init_args"]["kl"]["estimator"] == "k1"
    assert len((folder / "made" / "run.yaml").read_text().splitlines()) < 100  # without the defaults


@pytest.mark.parametrize(
    ("name", "data"),
    matrix([("sft", "texts"), ("dpo", "pairs"), ("reward", "pairs"), ("ppo", "prompts")], ("dpo", "pairs")),
)
def test_the_other_algorithms_train_in_one_line(workers: WorkerPool, folder: Path, name: str, data: str) -> None:
    reward = ["--reward", "rewards:short", "--max-new-tokens", "3"] if name == "ppo" else []
    line = [name, "--model", "model", "--data", f"{data}.jsonl", "--batch-size", "4", "--steps", "1", *reward, *SMALL]
    (fitted,) = run_lines(workers, folder, line)
    assert fitted.code == 0, fitted.errors
    assert (folder / "runs" / name / "model" / "config.json").is_file()


MISTAKES = [
    (("--reward", "rewards:nothing"), "error: reward function 'rewards:nothing' cannot be imported"),
    (("--reward", "exakt"), "error: --reward=exakt is unknown; did you mean exact?"),
    (("--reward", "code"), "needs the columns ['tests'], the data has ['answer', 'prompt']"),
    (("--data", "texts.jsonl"), "needs the columns ['answer'], the data has ['completion', 'prompt']"),
    (("--data", "pairs.jsonl", "--prompt-column", "question"), "only ['chosen', 'prompt', 'rejected']; "
     "PromptDataModule needs question, set prompt_column to one of them"),
    (("--data", "nobody/no-such-rows"), "error: nobody/no-such-rows [train] cannot be loaded"),
    (("--data", "nowhere.jsonl"), "error: --data: there is no 'nowhere.jsonl'"),
    (("--data", ""), "error: grpo needs --data"),
    (("--model", "no_tokenizer"), "error: 'no_tokenizer' has no files of a tokenizer"),
    (("--model", "no_weights"), "error: actor='no_weights' could not be loaded"),
    (("--model", "nobody/no-such-model"), "error: no tokenizer could be loaded from 'nobody/no-such-model'"),
    (("--model", "model.gguf"), "error: 'model.gguf' holds weights in GGUF"),
    (("--model.learning_rat", "1"), "learning_rat"),
    (("--trainer.max_stepz", "1"), "max_steps"),
]  # fmt: skip


def test_mistakes_end_with_one_line_and_exit_code_2(workers: WorkerPool, folder: Path) -> None:
    lines = [[*GRPO, "--output", "none", *mistake] for mistake, _ in MISTAKES]
    for (mistake, message), outcome in zip(MISTAKES, run_lines(workers, folder, *lines), strict=True):
        assert outcome.code == 2, (mistake, outcome)
        assert message in outcome.errors, (mistake, outcome.errors)
        assert "Traceback" not in outcome.errors and "usage:" not in outcome.errors


def test_outputs_are_checked_before_anything_is_written(workers: WorkerPool, folder: Path) -> None:
    (folder / "file").touch()
    last = folder / "used" / "checkpoints" / "last.ckpt"
    last.mkdir(parents=True)
    for name in ("epoch=0-step=2.ckpt", "epoch=0-step=1.ckpt"):  # of a run that was killed before its first last.ckpt
        (folder / "killed" / "checkpoints" / name).mkdir(parents=True)
    os.utime(folder / "killed" / "checkpoints" / "epoch=0-step=1.ckpt", (1, 1))
    saved = ("--output", "used", "--save-config", "again.yaml")
    lines = {
        (*GRPO, "--output", "file"): "error: file cannot be written: Not a directory at ",
        (*GRPO, "--output", "file/run"): "error: file/run cannot be written: Not a directory at ",
        (*GRPO, "--save-config", "file/run.yaml"): "error: --save-config=file/run.yaml cannot be written (File exists)",
        (*GRPO, "--output", "used"): "error: used/checkpoints/last.ckpt belongs to an earlier run, and would be over",
        (*GRPO, "--output", "used", "--ckpt_path", "model"): "add --ckpt_path used/checkpoints/last.ckpt to continue",
        (
            *GRPO,
            "--output",
            "used",
            "--ckpt_path",
            "used/checkpoints/last.ckpt",
        ): "last.ckpt cannot be read, it is a folder",
        (*GRPO, "--output", "killed"): "error: killed/checkpoints/epoch=0-step=2.ckpt belongs to an earlier run",
        (*GRPO, *saved): "",
        ("fit", "--config", "again.yaml"): "error: used/checkpoints/last.ckpt belongs to an earlier run",
    }
    for (line, message), outcome in zip(lines.items(), run_lines(workers, folder, *lines), strict=True):
        assert outcome.code == (2 if message else 0), (line, outcome)
        assert message in outcome.errors, (line, outcome.errors)
        assert not message or outcome.errors.splitlines()[-1].startswith("error: "), outcome.errors
        assert "Traceback" not in outcome.errors


def _full_device(folder: Path) -> str:
    import contextlib
    import io
    import sys

    import torch

    from lightning_realloc import cli

    def run_out(self: object, subcommand: str) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    errors, before = io.StringIO(), cli.LightningCLI._run_subcommand
    sys.argv = ["lightning-realloc", *GRPO]
    with contextlib.chdir(folder), contextlib.redirect_stderr(errors):
        cli.LightningCLI._run_subcommand = run_out
        try:
            assert cli.main() == 2
        finally:
            cli.LightningCLI._run_subcommand = before
    return errors.getvalue()


def test_a_full_device_is_answered_with_ways_out(workers: WorkerPool, folder: Path) -> None:
    (errors,) = workers.run(_full_device, folder, world_size=1, init_process_group=False)
    last = errors.splitlines()[-1]
    assert last.startswith("error: the device is full (CUDA out of memory. Tried to allocate 2.00 GiB.); lower ")


def test_help_lists_the_commands_and_the_flags(workers: WorkerPool, folder: Path) -> None:
    whole, grpo = run_lines(workers, folder, ["--help"], ["grpo", "--help"])
    assert all(name in whole.output for name in ("grpo", "ppo", "sft", "dpo", "reward", "doctor", "chat"))
    assert grpo.code == 0 and "--max-new-tokens" in grpo.output and "math (the final" in grpo.output
