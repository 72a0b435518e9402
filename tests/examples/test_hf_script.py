"""The Hugging Face script runs, and its comments hold the TRL script from which it differs by few lines."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from unittest import mock

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from examples import hf_script, sorting
from tests.workers import WorkerPool

SCRIPT = Path(hf_script.__file__)


def original() -> str:
    """Return the TRL script: without our lines, and with the commented lines."""
    lines = [line for line in SCRIPT.read_text().splitlines() if "  # ours" not in line]
    return "\n".join(line.replace("# TRL: ", "") for line in lines)


def test_the_script_differs_in_at_most_ten_lines() -> None:
    changed = [line for line in SCRIPT.read_text().splitlines() if "  # ours" in line]
    assert 5 <= len(changed) <= 10


def test_the_original_is_a_trl_script() -> None:
    names = {node.id for node in ast.walk(ast.parse(original())) if isinstance(node, ast.Name)}
    assert {"GRPOConfig", "GRPOTrainer"} <= names
    assert not names & {"GRPO", "PromptDataModule", "SamplingParams", "SaveHuggingFace", "L"}


def test_trl_has_every_setting_of_the_original(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="pip install 'lightning-realloc[parity]'")
    calls = {ast.unparse(call.func): call for call in ast.walk(ast.parse(original())) if isinstance(call, ast.Call)}
    known = set(trl.GRPOConfig.__dataclass_fields__)
    assert {str(keyword.arg) for keyword in calls["GRPOConfig"].keywords} <= known


def vowels(completions: list[str], **columns: object) -> list[float]:
    """Reward vowels, which random weights sometimes generate; their answers are never right."""
    return [float(sum(text.count(vowel) for vowel in "aeiou")) for text in completions]


def run_script(folder: str) -> None:
    """Run two iterations in a folder with the files that the script reads."""
    os.chdir(folder)
    with mock.patch.object(hf_script, "right_letters", vowels):
        hf_script.main(max_steps=2)


def test_the_script_trains_and_its_folder_is_readable(
    workers: WorkerPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    demo = tmp_path / "runs/demo"
    demo.mkdir(parents=True)
    words = ["acdb", "hgfe", "dcba", "qwer"] * 4
    sorting.write_jsonl(demo / "train.jsonl", [sorting.problem(word) for word in words])
    LlamaForCausalLM(sorting.tiny_llama()).save_pretrained(demo / "warm")
    sorting.byte_tokenizer().save_pretrained(demo / "warm")
    workers.run(run_script, str(tmp_path), world_size=1, init_process_group=False, deadline_s=120.0)
    trained = tmp_path / "runs/hf_script"
    card = (trained / "README.md").read_text()
    assert "GRPO, after 2 iterations. It began as `warm`." in card
    assert "| sampling | `SamplingParams(max_new_tokens=10, n=8)` |" in card
    assert AutoTokenizer.from_pretrained(trained).eos_token == "<eos>"
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (demo / "warm", trained))
    assert not before.lm_head.weight.equal(after.lm_head.weight)
