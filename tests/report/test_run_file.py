"""``lightning-realloc plan --config``: the run of a configuration of ``fit``, as the run itself plans it."""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback
from PIL import Image

from lightning_realloc import ExecutionPlan, cli
from lightning_realloc.errors import ConfigError, PlanError, ReallocError
from lightning_realloc.report.model_source import read_roles
from lightning_realloc.report.plan_request import parse_request
from lightning_realloc.report.run_file import RunFile, planned_run, read_content
from lightning_realloc.tuning.shapes.lengths import Lengths
from tests.examples.test_ppo import ROOT, write_demo_files
from tests.vision_models import tiny_vision_model
from tests.vision_processors import tiny_processor
from tests.workers import WorkerPool

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
TINY = "layers=4,hidden=512,intermediate=1024,heads=8,vocabulary=1000"
GRPO: dict[str, Any] = {
    "trainer": {"accelerator": "cuda", "devices": 4, "num_nodes": 2, "precision": "bf16"},
    "model": {
        "class_path": "GRPO",
        "init_args": {
            "actor": "Qwen/Qwen3-0.6B",
            "reward": "my.module.judge",
            "kl_coef": 0.1,
            "sampling": {"n": 4, "max_new_tokens": 64},
        },
    },
    "data": {"class_path": "PromptDataModule", "init_args": {"batch_size": 8, "max_prompt_tokens": 100}},
}


def _with(model: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """Return the configuration with other settings of its model, and other keys."""
    changed = copy.deepcopy(GRPO) | keys
    changed["model"]["init_args"] |= model or {}
    return changed


def _run(content: dict[str, Any], **models: str) -> RunFile:
    return planned_run(content, "run.yaml", models)


def _refused(content: dict[str, Any], **models: str) -> str:
    with pytest.raises(PlanError) as caught:
        _run(content, **models).plan()
    return str(caught.value)


def _refused_line(*arguments: str) -> str:
    with pytest.raises(ReallocError) as caught:
        cli.run(["plan", *arguments])
    return str(caught.value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_read_and_its_plan_fits_its_calls(path: Path) -> None:
    run = planned_run(read_content([str(path)]), path.name, {})
    assert set(run.sources) == set(run.dataflow.roles) and run.flags["batch"] > 0
    if isinstance(run.plan_source, dict):
        assert run.devices is not None
        run.plan().completed(run.dataflow).check(run.dataflow, math.prod(run.devices))
    else:
        assert run.plan_source == "heuristic"


def test_a_configuration_gives_models_workload_devices_and_precision() -> None:
    run = _run(GRPO)
    assert run.sources == {"actor": "Qwen/Qwen3-0.6B", "reference": "Qwen/Qwen3-0.6B"} and run.devices == (2, 4)
    # 8 prompts of 4 responses each.
    assert run.flags == {
        "algorithm": "grpo", "num_minibatches": 1, "precision": "bf16-mixed", "responses_per_prompt": 4,
        "response_length": 64, "batch": 32, "prompt_length": 100, "train_vision": "none",
    }  # fmt: skip
    assert set(_run(_with({"kl_coef": 0})).sources) == {"actor"}
    judged = _run(_with({"reward": ["my.module.judge", "org/one", "org/other"]}))
    assert {name: judged.sources[name] for name in ("reward", "reward_2")} == {
        "reward": "org/one",
        "reward_2": "org/other",
    }
    proximal = _run(_with({"ratio_to": "proximal", "train_options": {"num_minibatches": 2}}))
    assert "actor.infer" in [call.name for call in proximal.dataflow.calls]
    strategy = {"class_path": "ReallocStrategy", "init_args": {"generation_chunks": 2, "memory_per_device": "24GiB"}}
    flags = _run(_with(trainer={"accelerator": "cpu", "strategy": strategy})).flags
    assert (flags["generation_chunks"], flags["memory_per_device"], flags["cluster"]) == (2, "24GiB", "cpu:1x1")


def test_adapters_share_their_base_with_the_reference_that_is_named_or_not() -> None:
    lora = {"class_path": "peft.LoraConfig", "init_args": {"r": 8, "lora_dropout": None}}
    for reference in ({}, {"reference": "Qwen/Qwen3-0.6B"}):
        run = _run(_with({"peft_config": lora, **reference}))
        assert run.adapters == {"actor": {"peft_type": "LORA", "r": 8}} and run.shares == {"reference": "actor"}
    assert not _run(_with({"peft_config": lora, "reference": "Qwen/Qwen3-1.7B"})).shares


def test_flags_and_later_files_take_precedence(tmp_path: Path) -> None:
    first, second = tmp_path / "run.yaml", tmp_path / "more.yaml"
    first.write_text(yaml.safe_dump(GRPO))
    second.write_text("model: {init_args: {sampling: {n: 2}}}\ntrainer: {strategy: realloc_spawn}\n")
    files = ("--config", str(first), "--config", str(second))
    request = parse_request([*files, "--actor", TINY, "--response-length", "32", "--cluster", "h100"])
    assert request.sources == {"actor": TINY, "reference": TINY} and request.num_devices == 8
    load = request.workload
    assert (load.num_sequences, load.samples_per_prompt, load.response_tokens) == (16, 2, 32)
    assert request.notes == ()
    assert parse_request([*files, "--peft", "{r: 8}", "--check"]).shares == {"reference": "actor"}
    second.write_text("model: {class_path: PPO}\n")
    assert f"--config={second}: key model names the class PPO, and an earlier file GRPO" in _refused_line(*files)


def test_the_plan_of_a_configuration_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = {"actor.generate": "dp2", "reference.infer": "dp2", "actor.train": "fsdp2"}
    strategy = {"class_path": "ReallocStrategy", "init_args": {"plan": {"calls": calls}}}
    content = _with(trainer={"devices": "2", "strategy": strategy})
    del content["data"]["init_args"]["max_prompt_tokens"]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    cli.run(["plan", "--config", str(file), "--check", "--actor", TINY])
    text = capsys.readouterr().out
    assert text.startswith(f"grpo of {file}\n  actor, reference: {TINY}\n  32 sequences of 512 + 64 tokens, 32-true\n")
    assert "--prompt-length 512: assumed, since data.init_args has no max_prompt_tokens" in text
    assert "peak of rank 0-1: " in text
    calls["actor.train"] = "fsdp4"
    file.write_text(yaml.safe_dump(content))
    assert "rank" in _refused_line("--config", str(file), "--check", "--actor", TINY)


@pytest.mark.parametrize(
    ("settings", "layout", "message"),
    [
        ({"engine": "hf"}, "fsdp2", "cannot generate by engine='hf'; give it a layout with fsdp=1"),
        ({"generation": {"batch_invariant": True}}, "pp2", "batch_invariant=True needs all layers on a rank"),
        ({"speculation": {"drafter": "blocks", "draft_blocks": 1}}, "pp2", "drafting by the first blocks needs all la"),
        ({"engine": "vllm"}, "pp2", "engine='vllm' needs all layers on a rank"),
    ],
)
def test_generation_follows_the_options_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], layout: str, message: str
) -> None:
    calls = {"actor.generate": layout, "actor.train": "fsdp2"}
    strategy = {"class_path": "ReallocStrategy", "init_args": {"plan": {"calls": calls}}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(_with({**settings, "kl_coef": 0}, trainer={"devices": 2, "strategy": strategy})))
    common = ("--config", str(file), "--actor", TINY)
    assert f"actor.generate runs in the layout {layout}@0-1" in (refused := _refused_line(*common, "--check"))
    assert message in refused
    cli.run(["plan", *common, "--cluster", "h100", "--seconds", "0.1", "--save", str(tmp_path / "plan.yaml")])
    dims = ExecutionPlan.load(tmp_path / "plan.yaml").layout("actor.generate").dims
    assert dims.pp == dims.fsdp == 1 and "Best plan found" in capsys.readouterr().out


def test_the_memory_of_a_vllm_is_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = {"actor.generate": "dp2", "actor.train": "fsdp2"}
    strategy = {"class_path": "ReallocStrategy", "init_args": {"plan": {"calls": calls}}}
    file = tmp_path / "run.yaml"
    given = {"engine": "vllm", "generation": {"vllm": {"memory_share": 0.5}}, "kl_coef": 0}
    file.write_text(yaml.safe_dump(_with(given, trainer={"devices": 2, "strategy": strategy})))
    cli.run(["plan", "--config", str(file), "--actor", TINY, "--cluster", "h100", "--check"])
    lines = capsys.readouterr().out.splitlines()
    column = next(line.split("  ") for line in lines if line.startswith("phase"))
    assert "vllm" in [name.strip() for name in column]
    half = f"{40 * 1024:,.1f}"
    assert all(half in line for line in lines if line.startswith(("actor.generate", "actor.train", "-> actor")))


def test_router_replay_of_a_model_without_routers_is_refused() -> None:
    content = _with({"generation": {"router_replay": True}, "kl_coef": 0.0})
    run = _run(content)
    with pytest.raises(ConfigError, match="actor: router_replay=True records the experts of tokens, and Mistral"):
        read_roles({"actor": TINY}, run.dataflow, is_priced=False)
    mixture = f"{TINY},experts=4,experts_per_token=2"
    assert read_roles({"actor": mixture}, run.dataflow, is_priced=False)["actor"].shape is not None


def test_what_a_plan_cannot_read_is_refused_with_key_and_way_out() -> None:
    own = GRPO | {"model": {"class_path": "mine.GRPO"}}
    assert "run.yaml: model.class_path=mine.GRPO is none of the algorithms that plan reads" in _refused(own)
    assert "run.yaml: the key model must name a class" in _refused({"trainer": {}})
    assert "the strategy's plan is 'heuristic', which the run works out when it starts" in _refused(GRPO)
    assert "the strategy's plan is 'static'" in _refused(_with(trainer={"strategy": "realloc-static"}))
    assert "run.yaml: trainer.strategy=ddp runs no plans" in _refused(_with(trainer={"strategy": "ddp"}))
    assert "run.yaml: model: GRPO has no setting" in _refused(_with({"kl_coeff": 0.1}))
    assert "run.yaml: model: kl_coef=-1 " in _refused(_with({"kl_coef": -1}))
    assert "model.init_args.partners is not read by plan" in _refused(_with({"partners": {"other": "actor"}}))
    assert "peft_config names peft.IA3Config" in _refused(_with({"peft_config": {"class_path": "peft.IA3Config"}}))
    config = {"class_path": "transformers.LlamaConfig"}
    assert "the model of actor is {'class_path': 'transformers.LlamaConfig'}" in _refused(_with({"actor": config}))
    assert "the run of run.yaml has no role 'reference', it has actor" in _refused(
        _with({"kl_coef": 0}), reference="org/other"
    )
    assert "run.yaml: model: GenerationOptions has no setting router_reply; did you mean router_replay=?" in _refused(
        _with({"generation": {"router_reply": True}})
    )
    plan = {"class_path": "ReallocStrategy", "init_args": {"plan": {"calls": {"actor.train": "fsdp0"}}}}
    assert "run.yaml: trainer.strategy.init_args.plan: calls.actor.train" in _refused(_with(trainer={"strategy": plan}))


def _with_data(**settings: Any) -> dict[str, Any]:
    return _with(data={"class_path": "PromptDataModule", "init_args": settings})


def _with_strategy(**settings: Any) -> dict[str, Any]:
    return _with(trainer={"strategy": {"class_path": "ReallocStrategy", "init_args": settings}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_with_data(batch_size="many"), "the key data.init_args.batch_size is 'many'; write a whole number of at"),
        (_with_data(max_prompt_tokens=-5), "the key data.init_args.max_prompt_tokens is -5; write"),
        (_with_data(max_prompt_token=5), "data: PromptDataModule has no setting max_prompt_token; did you mean max_p"),
        (
            _with(data={"class_path": "PromptDataModule", "init_args": [1]}),
            "the key data.init_args is [1]; write a map",
        ),
        (_with_strategy(generation_chunks="x"), "the key trainer.strategy.init_args.generation_chunks is 'x'; write"),
        (_with_strategy(plann="static"), "trainer.strategy: ReallocStrategy has no setting plann; did you mean plan=?"),
        (_with(trainer={"devices": 2, "num_nodes": "two"}), "the key trainer.num_nodes is 'two'; write a whole"),
        (_with(trainer=[1]), "the key trainer is [1]; write a mapping"),
    ],
)
def test_keys_and_values_that_a_run_would_refuse_are_named(content: dict[str, Any], message: str) -> None:
    assert f"run.yaml: {message}" in _refused(content)


def test_flags_that_contradict_a_configuration_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    content = _with(data={"class_path": "mine.Rows", "init_args": {"batch_size": 8}})
    file.write_text(yaml.safe_dump(content))
    common = ("--config", str(file), "--cluster", "h100")
    assert "both name the algorithm" in _refused_line(*common, "--algorithm", "ppo")
    assert "flags replace the models of actor" in _refused_line(*common, "--reference", "none")
    assert "no data module of this package gives a batch_size under data; add --batch" in _refused_line(*common)
    assert parse_request([*common, "--batch", "8"]).workload.num_sequences == 8
    assert "--check without a file checks the plan of a configuration" in _refused_line("--actor", TINY, "--check")
    assert "has no role 'critic', it has actor, reference" in _refused_line(*common, "--batch", "8", "--critic", TINY)
    assert "other.yaml cannot be read (No such file or dir" in _refused_line("--config", str(tmp_path / "other.yaml"))
    assert f"{tmp_path} cannot be read (Is a directory)" in _refused_line("--config", str(tmp_path))
    file.write_text("trainer: [")
    assert "cannot be read as a configuration of `fit`" in _refused_line("--config", str(file))
    file.write_text(yaml.safe_dump(_with({"actor": "./nowhere"})))
    assert "actor='./nowhere': there is no such folder or file" in _refused_line(*common)


# ---- compared with a run
class _Facts(Callback):
    """Keeps what the run plans with."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Ask the strategy."""
        builder = trainer.strategy._placed.builder()
        roles = {name: (role.model, role.shares) for name, role in builder.describe_roles().items()}
        self.found = builder.largest_workload(), builder.dataflow, roles, trainer.strategy.plan
        evaluator = trainer.strategy.plan_evaluator([Lengths((9, 9), (3, 3))])
        assert evaluator.task.workload.images == self.found[0].images  # memory
        usual = evaluator.estimator.tokens.workload.images
        assert (usual is None) == (self.found[0].images is None)  # seconds


def _fit(folder: str) -> Any:
    os.chdir(folder)
    command = cli.ReallocCLI(["--config", "run.yaml"], run=False)
    facts, trainer = _Facts(), command.trainer
    trainer.callbacks = [*trainer.callbacks, facts]  # type: ignore[attr-defined]
    trainer.fit(command.model, command.datamodule)
    return facts.found


def test_a_run_plans_with_what_the_configuration_is_read_as(
    workers: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_demo_files(tmp_path)
    calls = {name: "dp1" for name in ("actor.generate", "reference.infer", "actor.train", "actor.infer")}
    settings = {
        "actor": "runs/demo/warm", "reward": "lightning_realloc.rewards:exact_match", "kl_coef": 0.1,
        "ratio_to": "proximal", "sampling": {"n": 2, "max_new_tokens": 5}, "peft_config": {"peft_type": "LORA", "r": 2},
        "train_options": {"num_minibatches": 2, "num_epochs": 2},
    }  # fmt: skip
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    content = {
        "trainer": {
            "accelerator": "cpu", "devices": 1, "max_steps": 1, "num_sanity_val_steps": 0, **dict.fromkeys(off, False),
            "strategy": {"class_path": "ReallocStrategy", "init_args": {"plan": {"calls": calls}}},
        },
        "model": {"class_path": "GRPO", "init_args": settings},
        "data": {"class_path": "PromptDataModule", "init_args": {"data": "runs/demo/train.jsonl", "batch_size": 2}},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    ((workload, dataflow, roles, plan),) = workers.run(_fit, str(tmp_path), world_size=1, init_process_group=False)
    monkeypatch.chdir(tmp_path)
    request = parse_request(["--config", "run.yaml", "--check", "--prompt-length", str(workload.prompt_tokens)])
    assert request.workload == workload and request.dataflow == dataflow
    assert request.run is not None and request.run.plan().completed(dataflow) == plan
    read = read_roles(
        request.sources, request.dataflow, is_priced=False, adapters=request.adapters, shares=request.shares
    )
    assert {name: (role.model, role.shares) for name, role in read.items()} == roles
    assert isinstance(plan, ExecutionPlan)


def test_a_run_with_images_plans_with_what_the_configuration_is_read_as(
    workers: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_vision_model("llava").save_pretrained(tmp_path / "model")
    tiny_processor("llava").save_pretrained(tmp_path / "model")
    for number, size in enumerate([(32, 32), (40, 24), (18, 60), (16, 16)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    rows = [{"prompt": "ab", "answer": "b", "images": [f"{number}.png", "0.png"]} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    calls = {name: "pp2" for name in ("actor.generate", "actor.train")}
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = {
        "actor": "model", "reward": "lightning_realloc.rewards:exact_match", "kl_coef": 0.0,
        "sampling": {"n": 2, "max_new_tokens": 5}, "train_vision": "projector",
    }  # fmt: skip
    content = {
        "trainer": {
            "accelerator": "cpu", "devices": 2, "max_steps": 1, "num_sanity_val_steps": 0, **dict.fromkeys(off, False),
            "strategy": {"class_path": "ReallocStrategy", "init_args": {"plan": {"calls": calls}}},
        },
        "model": {"class_path": "GRPO", "init_args": settings},
        "data": {"class_path": "PromptDataModule", "init_args": {"data": "rows.jsonl", "batch_size": 2}},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    (workload, _, roles, _), _ = workers.run(_fit, str(tmp_path), world_size=2, init_process_group=False)
    monkeypatch.chdir(tmp_path)
    assert workload.images is not None and workload.images.num_parts == 2
    text = workload.prompt_tokens - workload.images.tokens
    request = parse_request(["--config", "run.yaml", "--check", "--prompt-length", str(round(text))])
    read = read_roles(request.sources, request.dataflow, is_priced=False, train_vision=request.flags.train_vision)
    tower = read["actor"].tower
    assert tower is not None
    images, _, _ = request.images.read(tower)
    assert request.with_images(images) == workload
    balanced = read["actor"].with_images(images, workload.longest, is_trained=True)
    assert (balanced.model, balanced.shares) == roles["actor"] and balanced.trained_vision == "projector"
