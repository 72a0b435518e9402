"""The demo with a real model runs on a tiny one, and its YAML and script name the same model and data on the hub."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import yaml

from examples import gsm8k
from lightning_realloc.rewards import NumericAnswer
from tests.generation.vllm.stand_in import notes, stand_in
from tests.models import byte_tokenizer, tiny_model
from tests.workers import WorkerPool

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/gsm8k.yaml"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write_model(folder: Path) -> str:
    """Write a tiny model whose tokenizer has a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_model("llama", vocab_size=320, max_position_embeddings=256).save_pretrained(folder)
    return str(folder)


def chain_sum(name: str, *, size: int, seed: int, **_: Any) -> list[dict[str, Any]]:
    """Return problems in the form of reasoning-gym's."""
    assert name == "chain_sum"
    return [{"question": f"{seed + index} + 1 =", "answer": str(seed + index + 1)} for index in range(size)]


def imported_demo() -> ModuleType:
    """Return the demo, with the problems above."""
    sys.modules["reasoning_gym"] = cast(ModuleType, SimpleNamespace(create_dataset=chain_sum))
    try:  # mock.patch.dict would also forget all modules that the demo imports
        from examples import demo_real
    finally:
        del sys.modules["reasoning_gym"]
    return demo_real


def run_demo(folder: str, vllm_python: str = "", *others: str) -> dict[str, list[str]]:
    """Run the demo for one iteration on one rank, with other arguments."""
    demo_real, model = imported_demo(), Path(write_model(Path(folder) / "model"))
    arguments = ["--num-ranks", "1", "--iterations", "1", "--prompts-per-iteration", "2", "--num-held-out", "2"]
    with (
        mock.patch.object(demo_real, "model_folder", lambda: model),
        mock.patch.dict(os.environ, {"VLLM_PYTHON": vllm_python}),
    ):
        outcomes = demo_real.main([*arguments, *others, "--folder", folder])
    return {name: sorted(outcome.seconds) for name, outcome in outcomes.items()}


def test_the_demo_trains_all_weights_and_adapters(workers: WorkerPool, tmp_path: Path) -> None:
    (calls,) = workers.run(run_demo, str(tmp_path), world_size=1, init_process_group=False, deadline_s=120.0)
    assert calls == {"all weights": ["actor.generate", "actor.train"], "LoRA": ["actor.generate", "actor.train"]}
    assert (tmp_path / "all_weights/model.safetensors").exists()
    assert (tmp_path / "LoRA/adapter_model.safetensors").exists()


@pytest.mark.exhaustive
def test_the_demo_generates_with_vllm(workers: WorkerPool, tmp_path: Path) -> None:
    given = (str(tmp_path), stand_in(tmp_path), "--engine", "vllm", "--only", "all weights")
    (calls,) = workers.run(run_demo, *given, world_size=1, init_process_group=False, deadline_s=120.0)
    assert calls == {"all weights": ["actor.generate", "actor.train"]}
    assert len(notes(tmp_path, "weights")) == 3, "in the evaluation before training, in its iteration, and after it"


def test_adapters_with_vllm_are_refused_by_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        imported_demo().main(["--engine", "vllm"])
    assert (
        "vLLM takes over whole weights, and LoRA trains adapters; add --only 'all weights'" in capsys.readouterr().err
    )


def test_script_and_file_name_the_same_model_data_and_settings() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    with mock.patch.object(gsm8k, "train") as train:
        gsm8k.main()
    (model, data, held_out, _), settings = train.call_args.args, train.call_args.kwargs
    assert model == config["model"]["init_args"]["actor"]
    assert settings["learning_rate"] == config["model"]["init_args"]["learning_rate"]
    for source, named in ((data, "data"), (held_out, "val_data")):
        assert {"path": source.path, "name": source.name, "split": source.split} == config["data"]["init_args"][named]
    assert config["model"]["init_args"]["reward"]["class_path"].endswith(NumericAnswer.__name__)
