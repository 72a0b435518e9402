"""The configuration for adapters trains, and writes adapters and a merged model with equal logits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.examples.test_ppo import ROOT, write_demo_files
from tests.workers import WorkerPool


def fit_from_yaml(folder: str) -> None:
    """Run the command from the file's first lines, for two iterations of two prompts."""
    from lightning_realloc import cli

    os.chdir(folder)
    few = ["--data.batch_size", "2", "--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
    # The model earns no rewards, so that fresh adapters would stay zero.
    few += ["--model.init_args.peft_config", "{peft_type: LORA, target_modules: all-linear, init_lora_weights: false}"]
    sys.argv = ["lightning-realloc", "fit", "--config", str(ROOT / "examples/lora.yaml"), *few]
    cli.run(sys.argv[1:])


def export_from_the_command_line(folder: Path, *options: str) -> Path:
    """Run ``lightning-realloc export`` on the only checkpoint, and return the exported folder."""
    from lightning_realloc import cli

    (checkpoint,) = (folder / "runs/lora/checkpoints").glob("*.ckpt")
    cli.run(["export", str(checkpoint), "--output", str(folder / "exported"), *options])
    return folder / "exported"


@pytest.mark.exhaustive
@torch.no_grad()
def test_the_configuration_trains_and_writes_adapters(workers: WorkerPool, tmp_path: Path) -> None:
    write_demo_files(tmp_path)
    workers.run(fit_from_yaml, str(tmp_path), init_process_group=False, deadline_s=120.0)
    runs = tmp_path / "runs/lora"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/demo/warm")
    ids = torch.arange(3, 20)[None]
    plain, adapted = (
        base(input_ids=ids).logits,
        PeftModel.from_pretrained(base, runs / "adapters")(input_ids=ids).logits,
    )
    merged = AutoModelForCausalLM.from_pretrained(runs / "merged")(input_ids=ids).logits
    assert (adapted - plain).abs().max() > 1e-4
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-5)
    whole = export_from_the_command_line(tmp_path, "--merge", "--base", str(tmp_path / "runs/demo/warm"))
    again = AutoModelForCausalLM.from_pretrained(whole)(input_ids=ids).logits
    torch.testing.assert_close(again, merged, rtol=0, atol=1e-5)
