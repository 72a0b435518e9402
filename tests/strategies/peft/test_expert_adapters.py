"""Adapters of experts train under every plan as on one device, and PEFT reads and writes the same files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.checkpoints.hf_folder import write_running_model
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.peft.peft_runs import train
from tests.strategies.runs import calls
from tests.workers import WorkerPool

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LORA = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": EXPERTS,
    "init_lora_weights": False,
}  # fmt: skip
PLANS = [
    calls(actor_train="fsdp2.tp2.ep2", actor_generate="dp4.ep4", reference_infer="tp2@1,3"),
    calls(actor_train="pp2.fsdp2.ep2", actor_generate="dp2.tp2@3,1,2,0", reference_infer="fsdp4.ep2"),
    calls(actor_train="dp2.fsdp2", actor_generate="fsdp4.ep2", reference_infer="dp2.tp2.ep2"),
    calls(actor_train="dp4.ep4", actor_generate="pp2.dp2.ep2", reference_infer="dp1@2"),
    calls(actor_train="tp2", actor_generate="dp2.ep2", reference_infer="fsdp2"),
]
"""The last one has two ranks, the others four."""


@pytest.mark.parametrize(
    ("family", "number"),
    matrix([(family, n) for family in ("mixtral", "gpt_oss") for n in range(len(PLANS))], ("gpt_oss", 4)),
)
def test_adapters_of_experts_train_the_same_under_every_plan(workers: WorkerPool, family: str, number: int) -> None:
    settings = {"family": family, "peft_config": LORA}
    ((expected, _),) = workers.run(train, ["heuristic"], settings, 2, world_size=1, init_process_group=False)[0]
    assert expected.logged[0]["actor/kl"] > 1e-3  # the adapters have an effect from the beginning
    plans = PLANS[number : number + 1]
    ranks = 2 if number == len(PLANS) - 1 else 4
    together: Any = workers.run(train, plans, settings, 2, world_size=ranks, init_process_group=False, deadline_s=150.0)
    runs.check_equal_to_one_rank([outcome for ((outcome, _),) in together], expected)


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    logits: Tensor = model.eval()(input_ids=torch.arange(3, 20)[None]).logits
    return logits


@pytest.mark.parametrize("family", matrix(["qwen3_moe", "gpt_oss"], "qwen3_moe"))
def test_adapters_of_experts_and_routers_are_read_from_peft_and_written_back(tmp_path: Path, family: str) -> None:
    base = tmp_path / "base"
    tiny_model(family).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    # PEFT takes all linear layers of a Qwen3-MoE of transformers 4: its experts, with twice the rank for gate and up.
    targets: Any = "all-linear" if family == "qwen3_moe" else ["k_proj"]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=targets,
        target_parameters=None if family == "qwen3_moe" else EXPERTS,
        init_lora_weights=False,
    )
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    theirs.save_pretrained(tmp_path / "theirs")

    with warnings.catch_warnings(action="error", category=RuntimeWarning):  # ranks of experts are applied
        ours = Role(name="actor", source=base, trained=True, peft=tmp_path / "theirs").build(seed=3)
        assert torch.equal(_logits(ours), _logits(theirs))
        weights = {name: parameter.detach() for name, parameter in ours.named_parameters()}
        write_running_model(ours, weights, None, tmp_path / "ours", role="actor")
        before = _logits(ours)
        write_running_model(ours, weights, None, tmp_path / "merged", role="actor", merge=True)
        assert torch.equal(_logits(ours), before)
    saved, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours"))
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    assert any(".experts.base_layer." in name for name in saved)
    assert any(".mlp.gate." in name for name in saved) == (family == "qwen3_moe")
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "ours")
    assert torch.equal(_logits(read), _logits(theirs))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(_logits(merged), _logits(theirs), rtol=0, atol=1e-5)
    frozen = Role(name="reward", source=base, trained=False, peft=tmp_path / "theirs").build(seed=3)
    torch.testing.assert_close(_logits(frozen), _logits(theirs), rtol=0, atol=1e-5)
    assert not any("lora_" in name for name, _ in frozen.named_parameters())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"target_parameters": ["q_proj.weight"]},
            r"names .*q_proj\.weight, of shape .* name linear layers in target_m",
        ),
        (
            {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "experts.up_proj"]},
            r"names 'experts\.up_proj', .* it has experts\.down_proj, experts\.gate_up_proj, router\.weight",
        ),
        ({"target_parameters": ["experts.down_proj_bias"]}, r"names .*\.down_proj_bias, of shape \(4, 64\)"),
        ({"lora_dropout": 0.1}, "does not work with lora_dropout != 0"),
        ({"use_dora": True}, "does not work with use_dora=True"),
    ],
)
def test_parameters_and_options_without_adapters_are_refused_by_name(change: dict[str, Any], reason: str) -> None:
    role = Role(name="actor", source=tiny_model("gpt_oss"), trained=True, peft=LORA | {"target_modules": []} | change)
    with pytest.raises(ConfigError, match=reason):
        role.build(seed=1)
