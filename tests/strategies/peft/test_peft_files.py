"""Adapters are read and written in PEFT's format, alone or merged; checkpoints hold them without their base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForTokenClassification, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.callbacks import SaveHuggingFace
from lightning_realloc.errors import CheckpointError
from lightning_realloc.runtime.model.model_classes import Task
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints.adapter_files import merged_weights
from lightning_realloc.strategies.checkpoints.export import export_checkpoint
from lightning_realloc.strategies.checkpoints.hf_folder import write_running_model
from tests.algorithms.test_loaded_weights import rewrite
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.peft.peft_runs import LORA, adapted_grpo
from tests.strategies.runs import calls
from tests.workers import WorkerPool

TOKENS = torch.arange(3, 20)[None]
PLAN = calls(actor_train="pp2", actor_generate="dp2", reference_infer="dp2")


def _fit(folder: Path, base: Path, plan: Any, ckpt: Path | None, peft: Any, count: int) -> dict[str, Tensor]:
    """Train adapters of a saved base; return all weights. The first run writes all kinds of files."""
    world_size, strategy = runs.world_size(), ReallocStrategy(plan)
    module = adapted_grpo(actor=str(base), peft_config=peft)
    writers = [SaveHuggingFace(folder / "adapters"), SaveHuggingFace(folder / "merged", merge=True)]
    trainer = runs.trainer(strategy, world_size, callbacks=[] if ckpt else writers, max_epochs=count)
    trainer.fit(module, runs.Batches(2), ckpt_path=ckpt)
    if ckpt is None:
        trainer.save_checkpoint(folder / "run.ckpt")
    return strategy.full_weights("actor")


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    logits: Tensor = model.eval()(input_ids=TOKENS).logits
    return logits


def _base(folder: Path) -> Path:
    tiny_model("qwen3").save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    return folder / "base"


@pytest.mark.parametrize("kind", matrix(["lora", "dora"], "dora"))
def test_adapters_are_written_resumed_and_exported(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    base, peft = _base(tmp_path), LORA | ({"use_dora": True, "use_rslora": True} if kind == "dora" else {})
    weights, _ = workers.run(
        _fit, tmp_path, base, PLAN, None, peft, 1, world_size=2, init_process_group=False, deadline_s=120.0
    )
    exported = export_checkpoint(tmp_path / "run.ckpt", tmp_path / "exported")
    merged = export_checkpoint(tmp_path / "run.ckpt", tmp_path / "whole", merge=True)
    for ours, saved in ((exported, "adapters"), (merged, "merged")):
        card = (tmp_path / saved / "README.md").read_text()
        assert (ours / "README.md").read_text() == card.replace(f"# {saved}", f"# {ours.name}")
    # The base is neither in the folder of adapters nor in the checkpoint.
    assert sorted(file.name for file in exported.glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert not (exported / "config.json").exists()
    size = sum(file.stat().st_size for file in (tmp_path / "run.ckpt").glob("*.distcp"))
    trained = sum(4 * weight.numel() for name, weight in weights.items() if "lora_" in name)
    assert trained < size < 1.5 * trained + 50_000  # SGD keeps nothing per weight
    reads = [PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder) for folder in
             (exported, tmp_path / "adapters")]  # fmt: skip
    plain = [AutoModelForCausalLM.from_pretrained(folder) for folder in (merged, tmp_path / "merged")]
    for name, weight in weights.items():
        if "lora_" in name:
            assert torch.equal(reads[0].get_parameter(f"base_model.model.{name}"), weight)
    assert torch.equal(_logits(reads[0]), _logits(reads[1]))
    assert (_logits(reads[0]) - _logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.1
    for model in plain:
        torch.testing.assert_close(_logits(model), _logits(reads[0]), rtol=0, atol=1e-5)

    # A run resumed on one rank continues as before, and so does one from the folder of adapters.
    two = workers.run(
        _fit,
        tmp_path / "two",
        base,
        "heuristic",
        None,
        peft,
        2,
        world_size=1,
        init_process_group=False,
        deadline_s=90.0,
    )[0]
    resumed = workers.run(
        _fit, tmp_path, base, "heuristic", tmp_path / "run.ckpt", peft, 2, world_size=1, init_process_group=False,
        deadline_s=90.0,
    )[0]  # fmt: skip
    # Pipelines round otherwise than one rank, and large steps of plain SGD amplify that in a few weights of LoRA.
    assert runs.mean_difference(resumed, two) <= 1e-6
    assert runs.largest_difference(resumed, two) <= 3e-4
    assert runs.largest_difference(resumed, weights) > 1e-2


KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
AUTO: dict[Task, tuple[Any, str]] = {
    "causal_lm": (AutoModelForCausalLM, "CAUSAL_LM"),
    "token_classification": (AutoModelForTokenClassification, "TOKEN_CLS"),
    "sequence_classification": (AutoModelForSequenceClassification, "SEQ_CLS"),
}


@pytest.mark.parametrize(
    ("task", "kind"),
    matrix(
        [(task, kind) for task in AUTO for kind in KINDS],
        ("causal_lm", "lora"), ("sequence_classification", "dora"),
    ),
)  # fmt: skip
def test_adapters_of_peft_are_read_into_a_role_and_written_back(tmp_path: Path, task: Task, kind: str) -> None:
    (auto, task_type), base = AUTO[task], _base(tmp_path)
    labels = {} if task == "causal_lm" else {"num_labels": 1}
    config = LoraConfig(task_type=task_type, r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "up_proj"],
                        init_lora_weights=False, **KINDS[kind])  # fmt: skip
    theirs = get_peft_model(auto.from_pretrained(base, **labels), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # as training would: DoRA's initial magnitudes are computed from the weights
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(tmp_path / "theirs")

    ours = Role(name="actor", source=base, trained=True, task=task, peft=tmp_path / "theirs").build(seed=3)
    torch.testing.assert_close(_logits(ours), _logits(theirs), rtol=0, atol=1e-5)
    weights = {name: parameter.detach() for name, parameter in ours.named_parameters(remove_duplicate=False)}
    write_running_model(ours, weights, None, tmp_path / "ours", role="actor")
    given = Role(name="actor", source=theirs, trained=True, task=task).build(seed=3)  # a PeftModel with a separate head
    theirs_too = {name: parameter.detach() for name, parameter in given.named_parameters(remove_duplicate=False)}
    write_running_model(given, theirs_too, None, tmp_path / "given", role="actor")
    saved, *written = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("theirs", "ours", "given"))
    for again in written:
        assert saved.keys() == again.keys()
        assert all(torch.equal(saved[name], again[name]) for name in saved)
    read = PeftModel.from_pretrained(auto.from_pretrained(base, **labels), tmp_path / "ours")
    assert torch.equal(_logits(read), _logits(theirs))
    before = {name: weight.clone() for name, weight in weights.items()}
    write_running_model(ours, weights, None, tmp_path / "merged", role="actor", merge=True)
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    torch.testing.assert_close(_logits(auto.from_pretrained(tmp_path / "merged")), _logits(theirs), rtol=0, atol=1e-5)


def _fit_ppo(folder: Path, base: Path) -> dict[str, Tensor]:
    strategy = ReallocStrategy("heuristic")
    module = runs.ppo(actor=str(base), peft_config={"critic": {**LORA, "init_lora_weights": True}})
    trainer = runs.trainer(strategy, 1, callbacks=[SaveHuggingFace(folder, role="critic")])
    trainer.fit(module, runs.Batches(2))
    return strategy.full_weights("critic")


@pytest.mark.exhaustive  # a task with a head: below
def test_a_critic_is_written_with_its_head(workers: WorkerPool, tmp_path: Path) -> None:
    base, folder = _base(tmp_path), tmp_path / "critic"
    (weights,) = workers.run(_fit_ppo, folder, base, world_size=1, init_process_group=False, deadline_s=90.0)
    assert "base_model.model.score.weight" in load_file(folder / "adapter_model.safetensors")
    critic = AutoPeftModelForTokenClassification.from_pretrained(folder, num_labels=1)
    head = critic.base_model.model.score.modules_to_save["default"]
    assert torch.equal(head.weight, weights["score.weight"])
    assert torch.equal(head.bias, weights["score.bias"])


def _save(folder: Path) -> None:
    trainer = runs.trainer(ReallocStrategy("heuristic"), 1, max_steps=1)
    trainer.fit(adapted_grpo(), runs.Batches(1))
    trainer.save_checkpoint(folder)


def test_adapters_cannot_be_merged_without_a_matching_base(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(_save, tmp_path / "run.ckpt", world_size=1, init_process_group=False, deadline_s=90.0)
    with pytest.raises(CheckpointError, match="do not name their base as a folder or model name, and it is not in the"):
        export_checkpoint(tmp_path / "run.ckpt", tmp_path / "merged", merge=True)
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    export_checkpoint(tmp_path / "run.ckpt", tmp_path / "merged", merge=True, base=tmp_path / "base")
    rewrite(tmp_path / "partial", lambda weights: weights.pop("model.norm.weight"), model=tiny_model("qwen3"))
    with pytest.raises(CheckpointError, match=r"partial has no weights for model.norm.weight; give the one"):
        export_checkpoint(tmp_path / "run.ckpt", tmp_path / "merged", merge=True, base=tmp_path / "partial")
    tiny_model("qwen3", hidden_size=32).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="shape"):
        export_checkpoint(tmp_path / "run.ckpt", tmp_path / "merged", merge=True, base=tmp_path / "other")


class OwnConfig(Qwen3Config):
    """Config of a type that is not registered with transformers."""

    model_type = "own"


class OwnModel(Qwen3ForCausalLM):
    """Model of such a type."""

    config_class = OwnConfig


def test_a_base_of_a_type_that_is_not_registered_is_merged(tmp_path: Path) -> None:
    model = OwnModel(OwnConfig.from_dict(tiny_model("qwen3").config.to_dict()))
    expected = {name: tensor.detach().clone() for name, tensor in model.named_parameters(remove_duplicate=False)}
    for folder in ("base", "description"):
        model.save_pretrained(tmp_path / folder)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))  # which changes nothing yet
    adapted.peft_config["default"].save_pretrained(str(tmp_path / "description"))
    adapters = {name: tensor for name, tensor in model.named_parameters() if "lora_" in name}
    merged = merged_weights(OwnModel, tmp_path / "description", adapters, tmp_path / "base")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
