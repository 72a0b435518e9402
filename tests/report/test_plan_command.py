"""``lightning-realloc plan``: results from configurations alone, and refused requests."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import traceback
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen3Config

from lightning_realloc import GRPO, PPO, OnPolicyDistillation, cli
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ReallocError
from lightning_realloc.report import plan_command
from lightning_realloc.report.known_models import parse_shape
from lightning_realloc.report.model_source import read_roles
from lightning_realloc.report.plan_report import timeline_table
from lightning_realloc.report.plan_request import parse_request
from lightning_realloc.strategies.pool.memory_check import describe_roles
from lightning_realloc.tuning.timeline.call_timeline import CallTimeline, TimelineEntry
from tests.workers import WorkerPool

TINY = "layers=4,hidden=512,intermediate=1024,heads=8,vocabulary=1000"
SMALLER = "layers=2,hidden=256,intermediate=512,heads=4,kv_heads=2,vocabulary=1000,tied"
SMALL = ("--cluster", "a100-80g:1x2", "--batch", "16", "--seconds", "0.3")


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the output of a command line."""
    cli.run(["plan", *arguments])
    return capsys.readouterr().out


def refused(*arguments: str) -> str:
    """Return the error of a command line, as main() prints it."""
    with pytest.raises(ReallocError) as caught:
        cli.run(["plan", *arguments])
    return " ".join(str(caught.value).split())


def test_the_best_plan_comes_with_its_timeline_memory_and_other_plans(capsys: pytest.CaptureFixture[str]) -> None:
    models = ("--algorithm", "ppo", "--actor", TINY, "--critic", SMALLER)
    text = ask(capsys, *models, *SMALL, "--price-per-gpu-hour", "3")

    assert f"actor, reference: {TINY}; reward, critic: {SMALLER}" in text
    assert "nothing was measured" in text
    seconds = float(re.search(r"^([0-9.]+) s an iteration; ", text, re.M)[1])
    least, most = (float(value) for value in re.search(r"; ([0-9.]+) to ([0-9.]+) s if it errs", text).groups())
    assert least == pytest.approx(0.86 * seconds, abs=0.06) and most == pytest.approx(1.31 * seconds, abs=0.06)
    hours, price = (
        float(x) for x in re.search(r"1000 iterations: ([0-9.]+) GPU-hours, ([0-9.]+) at 3 an", text).groups()
    )
    assert hours == pytest.approx(1000 * 2 * seconds / 3600, rel=0.05) and price == pytest.approx(3 * hours, rel=0.05)
    blocks = text.split("\n\n")
    calls = ["actor.generate", "reference.infer", "reward.infer", "critic.infer", "actor.train", "critic.train"]
    for title in ("Timeline of an iteration", "Memory of the fullest ranks"):
        block = next(block for block in blocks if block.startswith(title))
        assert all(re.search(rf"^  {call} ", block, re.M) for call in calls), block
    compared = next(block for block in blocks if block.startswith("Compared with other plans"))
    assert re.search(rf"this plan +{seconds} +1.00x", compared)
    ratios = [float(ratio) for ratio in re.findall(r"(?:heuristic|static, \S+) +[0-9.]+ +([0-9.]+)x", compared)]
    assert len(ratios) >= 3 and min(ratios) >= 1.0


QWEN = "layers=2,hidden=256,intermediate=512,heads=4,kv_heads=2,vocabulary=1000,tied,qk_norm"


def test_adapters_are_counted_as_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    lora = {"r": 4, "target_modules": "all-linear"}
    for kind, shape in ((Qwen3Config, QWEN), (LlamaConfig, TINY)):
        sizes = parse_shape(shape).to_dict()
        keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                "head_dim", "vocab_size", "tie_word_embeddings")  # fmt: skip
        config = kind(**{key: sizes[key] for key in keys})
        run = PPO(config, reward=len, critic=config, peft_config={"peft_type": "LORA", **lora})
        request = parse_request(["--algorithm", "ppo", "--actor", shape, "--reward", "none", "--peft", json.dumps(lora),
                                 "--cluster", "h100:1x2"])  # fmt: skip
        given = {"adapters": request.adapters, "shares": request.shares}
        assert read_roles(request.sources, request.dataflow, is_priced=True, **given) == describe_roles(run.roles(), {})
    common = ("--actor", QWEN, *SMALL, "--seconds", "0.2")
    whole, adapted = ask(capsys, *common), ask(capsys, *common, "--peft", "{r: 4, target_modules: all-linear}")
    assert "adapters in actor: {r: 4, target_modules: all-linear}" in adapted and "reward" not in whole

    def fullest(text: str) -> float:
        return float(re.search(r"this plan +[0-9.]+ +1.00x +([0-9.]+) [GM]iB", text)[1])

    assert fullest(adapted) < fullest(whole)


VLM = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"


def test_images_lengthen_prompts_and_take_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--actor", VLM, *SMALL, "--seconds", "0.2")
    text = ask(capsys, *common)
    images = ask(capsys, *common, "--images-per-prompt", "2", "--image-size", "640x480")
    assert "prompts without images, which actor could read: add --images-per-prompt 1" in text
    # 3 x 4 squares with 64 tokens and two around them, a break after each line, and the whole image.
    assert f"16 sequences of 512 + {2 * (3 * (4 * 66 + 1) + 67):,} + 1024 tokens" in images
    assert "2 images of 640x480 in each prompt: 1,724 of its tokens, and 26,624 patches for the tower" in images
    assert "which is frozen" in images and "the error is unknown: estimates for images" in images
    own, others = (float(re.search(r"^([0-9.]+) s an iteration", found, re.M)[1]) for found in (images, text))
    assert own > others


def test_images_without_a_size_or_a_tower_are_refused() -> None:
    common = (*SMALL, "--images-per-prompt", "1")
    assert f"actor={TINY} is not of a family that reads images" in refused("--actor", TINY, *common)
    for size in ("640", "640x", "0x10", "axb"):
        wrong = refused("--actor", VLM, *common, "--image-size", size)
        assert f"--image-size={size} must be a width and a height in pixels, as in 1024x768" in wrong
    assert "--images-per-prompt=-1 must be at least 0" in refused("--actor", VLM, *SMALL, "--images-per-prompt", "-1")


def test_a_reward_model_takes_part_if_it_is_named_or_a_critic_is_trained() -> None:
    common = ("--actor", TINY, *SMALL)
    for arguments, scores in (
        (("--algorithm", "grpo", "--reward", SMALLER), True),
        (("--algorithm", "grpo"), False),
        (("--algorithm", "ppo"), True),
        (("--algorithm", "ppo", "--reward", "none"), False),
    ):
        calls = [call.name for call in parse_request([*arguments, *common]).dataflow.calls]
        assert ("reward.infer" in calls) == scores
        assert "judge" in calls or arguments[1] == "ppo"


@pytest.mark.parametrize(("name", "kind"), [("ppo", PPO), ("grpo", GRPO)])
def test_several_reward_models_have_the_calls_of_a_run(
    capsys: pytest.CaptureFixture[str], name: str, kind: type[PPO] | type[GRPO]
) -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    models = ("--algorithm", name, "--actor", TINY, "--reward", SMALLER, "--model", f"reward_2={TINY}")
    request = parse_request([*models, *SMALL])

    ours, runs = request.dataflow, kind(config, [config, config]).dataflow
    assert {call.name for call in ours.calls} == {call.name for call in runs.calls}
    for call in ("reward.infer", "reward_2.infer", "judge"):
        assert ours.call(call) == runs.call(call)
    both = read_roles(request.sources, request.dataflow, is_priced=True)
    assert both["reward"].model != both["reward_2"].model and both["reward_2"].model != both["actor"].model
    assert re.search(r"^  reward_2.infer ", ask(capsys, *models, *SMALL, "--seconds", "0.2"), re.M)


def test_reward_models_are_numbered_without_gaps() -> None:
    common = ("--actor", TINY, *SMALL, "--model")
    text = refused(*common, f"reward_3={TINY}", "--reward", SMALLER)
    assert "these are reward, reward_3; name them in order: --model reward=..., --model reward_2=..." in text
    assert "sft has no role 'reward_2'" in refused("--algorithm", "sft", *common, f"reward_2={TINY}", "--reward", TINY)


def test_invalid_adapters_are_refused() -> None:
    common = ("--algorithm", "ppo", "--actor", TINY, *SMALL, "--peft")
    assert "--peft names judge, but the trained roles are actor, critic" in refused(*common, "{judge: {r: 4}}")
    assert "is neither a mapping nor a folder of saved adapters; as in --peft" in refused(*common, "r=4")
    assert "peft_config has no option rank; write those of peft.LoraConfig" in refused(*common, "{r: 4, rank: 4}")


def test_separate_inference_shows_in_the_timeline_and_gains_from_chunks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    apart = tmp_path / "apart.yaml"
    apart.write_text(
        "calls: {actor.generate: dp1@0, actor.train: dp1@0, critic.train: dp1@1, critic.infer: dp1@1,"
        " reference.infer: dp1@1, reward.infer: dp1@1}\n"
    )
    load = ("--cluster", "a100-80g:1x2", "--batch", "256", "--prompt-length", "4096")
    question = ("--algorithm", "ppo", "--actor", TINY, "--critic", TINY, *load, "--compare", str(apart), str(apart))
    seconds = {
        chunks: float(re.search(r"an iteration +([0-9.]+)", ask(capsys, *question, *chunks))[1])
        for chunks in ((), ("--generation-chunks", "1"), ("--generation-chunks", "4"))
    }
    assert seconds[()] == seconds["--generation-chunks", "1"] > seconds["--generation-chunks", "4"]
    assert "--generation-chunks=0 must be at least 1" in refused(*question, "--generation-chunks", "0")
    assert "--generation-parts 4; did you mean --generation-chunks?" in refused("--generation-parts", "4")


def test_a_small_space_is_searched_completely_and_its_plan_is_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.yaml"
    text = ask(capsys, "--actor", TINY, *SMALL, "--save", str(file))

    assert "no plan takes less, as estimated" in text
    assert text.endswith(f"The plan is in {file}\n")
    plan = ExecutionPlan.load(file)
    assert all(f"{name} " in text and str(call.layout) in text for name, call in plan.calls)
    checked = ask(capsys, "--check", str(file), "--actor", TINY, "--cluster", "a100-80g:1x2", "--batch", "16")
    assert "peak of rank 0-1: " in checked


def test_a_plan_with_one_layout_has_the_smaller_error(capsys: pytest.CaptureFixture[str]) -> None:
    text = ask(capsys, "--actor", TINY, "--cluster", "a100-80g:1x1", "--batch", "16")
    assert "(-10% to +14%: " in text
    assert "published speed-ups were up to 1.29 times smaller than estimated ones" in text
    assert "the error is unknown" in ask(capsys, "--actor", SMALLER, "--cluster", "cpu:1x1", "--batch", "4")


def test_two_plans_are_compared_call_by_call(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast.yaml", tmp_path / "slow.yaml"
    fast.write_text("calls: {actor.generate: dp2, actor.train: fsdp2}")
    slow.write_text("calls: {actor.generate: tp2, actor.train: fsdp2}")
    text = ask(
        capsys, "--actor", TINY, "--cluster", "a100-80g:1x2", "--batch", "16", "--compare", str(fast), str(slow),
        "--memory-per-device", "512MiB",
    )  # fmt: skip

    def row(name: str) -> list[float]:
        return [float(x) for x in re.search(rf"^  {name} +([0-9.]+) +([0-9.]+) +([-+0-9.]+)$", text, re.M).groups()]

    first, second, difference = row("actor.generate")
    assert difference == pytest.approx(second - first, abs=0.011) and difference > 0.1
    assert row("actor.train")[2] == 0.0
    total = row("an iteration")
    assert f"A is {total[1] / total[0]:.1f}" in text
    assert re.search(r"actor.generate +dp2@0-1 +tp2@0-1", text) and re.search(r"actor.train +fsdp2@0-1 +the same", text)
    assert "A does not fit: rank 0 lacks" in text


def test_a_sweep_shows_costs_and_cluster_sizes_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    large = "layers=32,hidden=4096,intermediate=11008,heads=32,vocabulary=32000"
    text = ask(
        capsys, "--actor", large, "--cluster", "a100-80g:1x2", "--sweep", "nodes=1,2,4", "--seconds", "1",
        "--memory-per-device", "48GiB", "--price-per-gpu-hour", "2",
    )  # fmt: skip
    rows = [line.split() for line in text.splitlines() if re.match(r" +[124] +[248] ", line)]

    assert rows[0][2:] == ["nothing", "fits"]
    assert re.search(r"1 nodes: no plan fits on 1 x 2 devices .* lacks [0-9,]+ bytes.*; use more such devices, ", text)
    for nodes, devices, seconds, speed_up, hours, price, *_ in rows[1:]:
        assert int(devices) == 2 * int(nodes)
        assert float(hours) == pytest.approx(1000 * int(devices) * float(seconds) / 3600, rel=0.01)
        assert float(price) == pytest.approx(2 * float(hours), rel=0.01)
        assert float(speed_up[:-1]) == pytest.approx(float(rows[1][2]) / float(seconds), abs=0.011)
    assert len(rows) == 3


def test_models_come_from_folders_files_and_built_in_shapes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    answers = []
    for model in (str(tmp_path), str(tmp_path / "config.json"), TINY):
        text = ask(capsys, "--model", f"actor={model}", "--reference", TINY, *SMALL)
        answers.append(re.search(r"^([0-9.]+) s an iteration", text, re.M)[1])
    assert len(set(answers)) == 1


def test_mixtures_of_experts_are_planned_if_their_config_describes_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {
        "model_type": "mixtral", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 1000, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    answers = []
    for change in (config, config | {"intermediate_size": 4096}, None):
        (tmp_path / "config.json").write_text(json.dumps(change or config))
        model = str(tmp_path) if change else f"{TINY},experts=8,experts_per_token=2"
        text = ask(capsys, "--actor", model, "--reference", TINY, *SMALL)
        answers.append(float(re.search(r"^([0-9.]+) s an iteration", text, re.M)[1]))
        assert "No tensor parallelism" not in text
        assert "if it errs as it did for published iteration times (-9% to +101%" in text
    assert answers[0] == answers[2] < answers[1]

    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 9}))
    assert "is a mixture of 8 experts and does not say how" in refused("--actor", str(tmp_path), *SMALL)
    del config["num_local_experts"], config["num_experts_per_tok"]
    own = {**config, "model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2}  # names that no other family has
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert "is a mixture of experts and does not say how it uses them" in refused("--actor", str(tmp_path), *SMALL)


def test_models_without_tensor_parallelism_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = ask(capsys, "--actor", str(tmp_path), "--reference", SMALLER, *SMALL)
    assert "  No tensor parallelism in actor: their model cannot run so.\n" in text
    assert not re.search(r"actor\..*\btp[0-9]", text)


def test_a_check_refuses_what_a_run_refuses_before_it_builds_models(tmp_path: Path) -> None:
    config = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "state_size": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = tmp_path / "plan.yaml"
    plan.write_text("calls: {actor.generate: dp2, actor.train: {layout: cp2, activation_offload: true}}")
    recurrent = refused("--check", str(plan), "--actor", str(tmp_path))
    assert "MambaForCausalLM cannot run packed sequences: its layers ['linear_attention'] may let" in recurrent
    assert "activation_offload" in refused("--check", str(plan), "--actor", TINY, "--cluster", "cpu:1x2")


def test_distillation_has_a_teacher_and_no_reference() -> None:
    common = ("--algorithm", "distillation", "--actor", SMALLER, "--cluster", "h100:1x2")
    request = parse_request([*common, "--teacher", TINY])
    run = OnPolicyDistillation(parse_shape(SMALLER), parse_shape(TINY))
    assert request.dataflow == run.dataflow
    assert request.sources == {"actor": SMALLER, "teacher": TINY}
    assert "distillation learns from a teacher, which has no model; add --teacher" in refused(*common)
    assert "distillation has no role 'reference'; it has actor, teacher" in refused(
        *common, "--teacher", TINY, "--reference", TINY
    )


def test_roles_have_the_defaults_of_the_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    ppo = ("--algorithm", "ppo", *SMALL)
    assert f"actor, reference, reward, critic: {TINY}" in ask(capsys, "--actor", TINY, *ppo)
    text = ask(capsys, "--actor", TINY, "--reward", SMALLER, *ppo)
    assert f"actor, reference: {TINY}; reward, critic: {SMALLER}" in text
    text = ask(capsys, "--actor", TINY, "--reward", "none", "--reference", "none", *ppo)
    assert f"actor, critic: {TINY}\n" in text and "reward.infer" not in text and "reference.infer" not in text
    assert "reference.infer" not in ask(capsys, "--model", f"actor={TINY}", *SMALL)
    text = ask(capsys, "--actor", TINY, "--algorithm", "dpo", *SMALL)
    # The actor scores before the step only if a loss compares ranks, and for held-out data.
    timeline = text.split("Timeline")[1].split("Memory")[0]
    assert f"reference, actor: {TINY}" in text and "reference.infer" in timeline and "actor.infer" not in timeline
    assert "reward.train" in ask(capsys, "--reward", TINY, "--algorithm", "reward", *SMALL)


WIDE = "layers=2,hidden=1024,intermediate=2048,heads=16,vocabulary=512000"
WHOLE = (
    "--actor",
    WIDE,
    "--reference",
    "none",
    "--batch",
    "16",
    "--memory-per-device",
    "2GiB",
    "--cluster",
    "cpu:2x8",
)
"""Embeddings of 2 GiB in float32, which every rank makes whole before it keeps its part of them."""


def code_and_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return a command line's exit code and output."""
    return cli.run(["plan", *arguments]), capsys.readouterr().out


def test_a_plan_that_cannot_start_is_reported_first_and_ends_with_code_3(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.yaml"
    code, text = code_and_text(capsys, *WHOLE, "--seconds", "0.5", "--save", str(file))
    first, second, *_ = text.splitlines()
    assert code == 3 and first == "The best plan found cannot start on such devices: grpo on cpu:2x8"
    need = re.search(r"before the first iteration a rank needs (2[0-9.]+ GiB) of 2.0 GiB", second)
    assert need is not None and "Best plan found" not in text
    assert re.search(r"ranks [0-9-]+: at most 1[0-9.]* GiB of 2.0 GiB \(10% head-room kept\)", text)
    assert "--check rejects it" in text.splitlines()[-1]
    comment, *_ = file.read_text().splitlines()
    assert comment.startswith("# This plan cannot start on cpu:2x8: ") and need[1] in comment
    assert "in set-up, and a device has 2.00 GiB" in refused("--check", str(file), *WHOLE)
    capsys.readouterr()

    code, text = code_and_text(capsys, *WHOLE, "--compare", str(file), str(file))
    assert code == 3 and text.splitlines()[0] == "grpo on cpu:2x8: A and B cannot start on such devices"
    assert f"  B cannot start: {need[0]}" in text

    sweep = ("--seconds", "0.2", "--sweep", "nodes=2")
    code, text = code_and_text(capsys, *WHOLE, *sweep)
    assert code == 3 and text.startswith("No plan that was found can start on such devices: grpo on cpu:2x8")
    assert f"  2 nodes: the plan cannot start: {need[0]}" in text


def test_plans_that_can_start_end_with_code_0(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, common = str(tmp_path / "plan.yaml"), ("--actor", TINY, "--cluster", "a100-80g:1x2", "--batch", "16")
    assert code_and_text(capsys, *common, "--seconds", "0.2", "--save", file)[0] == 0
    assert not Path(file).read_text().startswith("#")
    for question in (("--check", file), ("--compare", file, file), ("--seconds", "0.2", "--sweep", "nodes=1")):
        code, text = code_and_text(capsys, *common, *question)
        assert code == 0 and "cannot start" not in text


def test_headroom_is_kept_reported_and_configurable(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--actor", TINY, "--cluster", "a100-80g:1x1", "--memory-per-device", "700MiB", "--batch", "16",
             "--seconds", "0.3")  # fmt: skip

    def peak(*more: str) -> tuple[float, str]:
        text = ask(capsys, *asked, *more)
        return float(re.search(r"rank 0: at most ([0-9.]+) MiB of 700.0 MiB", text)[1]), text

    kept, text = peak()
    assert kept <= 0.9 * 700 and "700.0 MiB a device, 10% head-room kept" in text
    assert "MiB of 700.0 MiB (10% head-room kept), in " in text and "little is left" not in text
    filled, text = peak("--headroom", "0")
    assert 0.92 * 700 < filled <= 700 and "head-room kept" not in text
    assert "little is left for what is not forecast" in text and "--headroom 0.1 finds a plan that needs less" in text
    assert peak("--headroom", "0.2")[0] <= 0.8 * 700
    assert "; 10% of a device are kept free, --headroom 0 fills it" in refused(*asked, "--memory-per-device", "40MiB")


ACTOR = ("--actor", TINY)
MISTAKES = [
    ((*ACTOR,), "--cluster is missing"),
    ((*SMALL,), "grpo trains its actor, which has no model; add --actor"),
    ((*ACTOR, "--cluster", "a100:1x8"), "unknown cluster 'a100:1x8' (nearest: a100-80g)"),
    (("--actor", "Llama-2-8b-hf", *SMALL), "'Llama-2-8b-hf' is not built in (nearest: meta-llama/Llama-2-7b-hf"),
    (("--actor", "./nowhere", *SMALL), "there is no such folder or file"),
    (("--actor", "layers=4,hidden=8", *SMALL), "lacks intermediate, heads, vocabulary"),
    ((*ACTOR, "--algorithm", "other", *SMALL), "--algorithm=other is not one of grpo, ppo, sft"),
    ((*ACTOR, "--critic", TINY, *SMALL), "grpo has no role 'critic'; it has actor, reference"),
    ((*ACTOR, "--model", f"actor={SMALLER}", *SMALL), f"--actor {TINY} and --model actor={SMALLER} name two models"),
    (("--actor", "none", *SMALL), "grpo trains its actor, which has no model"),
    ((*ACTOR, *SMALL, "--check", "a", "--sweep", "nodes=1"), "--check and --sweep are two modes"),
    ((*ACTOR, *SMALL, "--sweep", "nodes=1", "--compare", "a", "b"), "--compare and --sweep are two modes"),
    ((*ACTOR, "--check", "a", "--save", "b"), "--save does not apply to --check"),
    ((*ACTOR, "--check", "a", "--price-per-gpu-hour", "2"), "--price-per-gpu-hour does not apply to --check"),
    ((*ACTOR, *SMALL, "--compare", "a", "b"), "--seconds does not apply to --compare"),
    ((*ACTOR, *SMALL, "--sweep", "nodes=1", "--save", "a"), "--save does not apply to --sweep"),
    ((*ACTOR, *SMALL, "--micro-batch-tokens", "9"), "--micro-batch-tokens does not apply to a search"),
    ((*ACTOR, *SMALL, "--sweep", "gpus=1,2"), "--sweep=gpus=1,2 must be numbers of nodes, as in --sweep nodes=1,2"),
    ((*ACTOR, *SMALL, "--sweep", "nodes=0"), "must be numbers of nodes"),
    ((*ACTOR, "--cluster", "h100", "--seconds", "0"), "--seconds=0 must be a positive number"),
    ((*ACTOR, *SMALL, "--price-per-gpu-hour", "-1"), "--price-per-gpu-hour=-1 must be a positive number"),
    ((*ACTOR, *SMALL, "--responses-per-prompt", "3"), "--batch=16 is a number of responses and must be a multiple of"),
    ((*ACTOR, *SMALL, "--save", "no/such/folder/plan.yaml"), "no file can be written there"),
    ((*ACTOR, *SMALL, "--memory-per-device", "much"), "'much' is no amount of memory"),
    ((*ACTOR, *SMALL, "--precision", "16-true"), "precision='16-true' cannot be used here"),
    ((*ACTOR, *SMALL, "--secnds", "3"), "--secnds"),
    ((*ACTOR, "--cluster", "h100", "--seconds", "soon"), "soon"),
    ((*ACTOR, *SMALL, "--memory-per-device", "40MiB"), "lacks"),
    ((*ACTOR, "--cluster", "h100:0x8"), "cluster 'h100:0x8' must have at least one node"),
    ((*ACTOR, "--cluster", "h100:8"), 'write "h100:1x8" for one node of 8 devices'),
    ((*ACTOR, "--check", "heuristic"), "plan file heuristic: there is no such file in "),
    ((*ACTOR, *SMALL, "--memory-per-device", "24"), "did you mean \"24GiB\"?"),
    ((*ACTOR, *SMALL, "--headroom", "1"), "--headroom=1 is a share of a device's memory; it must lie in [0, 1)"),
    ((*ACTOR, "--check", "a", "--headroom", "0"), "--headroom does not apply to --check"),
    ((*ACTOR, *SMALL, "--batch", "0"), "--batch=0 must be at least 1"),
    ((*ACTOR, *SMALL, "--num-minibatches", "1000"), "use at most 16"),
    ((*ACTOR, "--cluster", "h100:100000x8"), "800,000 devices are more than the maximum of 4,096"),
    ((*ACTOR, "--cluster", "h100:1x8", "--sweep", "nodes=1,9999"), "79,992 devices are more than the maximum of 4,096"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_reported_with_the_way_out(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)


def test_a_mistake_ends_with_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-realloc", "plan", *ACTOR, "--cluster", "h100", "--seconds", "soon"])
    assert cli.main() == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1


def run_into_a_closed_pipe(errors: Path, *arguments: str) -> int:
    """Run a command line in a fork whose output nobody reads; return its exit code."""
    reading, writing = os.pipe()
    os.close(reading)
    if child := os.fork():
        os.close(writing)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 70
    try:
        os.dup2(writing, 1)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), errors.open("w")
        sys.argv = ["lightning-realloc", *arguments]
        code = cli.main()
        sys.stdout.flush()  # as at the end of an interpreter
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        sys.stderr.flush()
        os._exit(code)


def test_a_reader_that_closes_the_pipe_ends_the_command_quietly(workers: WorkerPool, tmp_path: Path) -> None:
    plan = ("plan", *ACTOR, *SMALL, "--seconds", "0.1")
    errors = tmp_path / "errors"
    codes = workers.run(run_into_a_closed_pipe, errors, *plan, world_size=1, init_process_group=False)
    assert (codes, errors.read_text()) == ([1], "")


def test_a_budget_that_is_too_small_names_flags_that_would_do_without_other_devices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ("--actor", TINY, "--memory-per-device", "200MiB", "--headroom", "0", "--batch", "16", "--seconds", "1",
             "--cluster", "a100-80g:1x1")  # fmt: skip
    ways = re.findall(r"(--[^;]*?) fits with ([0-9.]+) (MiB|GiB) a device", refused(*asked))
    assert ways[0][0] == "--peft '{r: 16, target_modules: all-linear}'"
    found = ask(capsys, *asked, "--peft", "{r: 16, target_modules: all-linear}", "--save", str(tmp_path / "plan.yaml"))
    assert "Best plan found" in found
    check = ("--actor", TINY, "--memory-per-device", "200MiB", "--batch", "16", "--check", str(tmp_path / "plan.yaml"))
    text = refused(*check)
    assert re.search(
        r"one of these would fit: .*--peft '\{r: 16, target_modules: all-linear\}' \([0-9.]+ [MG]iB\)", text
    )


def test_a_budget_that_is_too_small_names_the_smallest_sufficient_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("--actor", TINY, "--memory-per-device", "200MiB", "--headroom", "0", "--batch", "16", "--seconds", "1")
    text = refused(*asked, "--cluster", "a100-80g:1x1")
    found = re.search(
        r"lacks [0-9,]+ bytes.*; or ([0-9]+) x 1 such devices have room for every call .*more memory", text
    )
    assert found is not None, text
    assert "Best plan found" in ask(capsys, *asked, "--cluster", f"a100-80g:{found[1]}x1")


def test_fewer_devices_are_searched_for_until_time_is_over() -> None:
    asked = ("--actor", TINY, "--memory-per-device", "200MiB", "--headroom", "0", "--batch", "16")
    request = parse_request([*asked, "--cluster", "a100-80g:1x1"])
    fewer, enough = (
        next(plan_command._more_devices(plan_command._task(request), request, 4, end)) for end in (math.inf, 0.0)
    )
    assert fewer.startswith("2 x 1 such devices are the fewest tested on which a short search finds a plan, or ")
    assert enough.startswith("4 x 1 such devices have room for every call on all of them, or ")


def test_the_timeline_says_why_devices_are_idle() -> None:
    def last_line(*entries: tuple[str, tuple[int, ...], float, float], num_devices: int = 4) -> str:
        made = tuple(TimelineEntry(phase, 0, ranks, start, end) for phase, ranks, start, end in entries)
        ranks = tuple(sorted({rank for entry in made for rank in entry.ranks}))
        return timeline_table(CallTimeline(made, 1, ranks), num_devices=num_devices).splitlines()[-1].strip()

    both = ("actor.generate", (0, 1, 2, 3), 0.0, 1.0)
    assert last_line(both) == "ranks are idle 0% of the time"
    assert last_line(both, ("actor.train", (0, 1), 1.0, 3.0)) == (
        "ranks are idle 33% of the time, 2-3 most: actor.train takes 2.00 s on ranks 0-1 alone, and the search found "
        "no faster layout for it"
    )
    assert last_line(both, num_devices=8).startswith(
        "ranks are idle 50% of the time; ranks 4-7 have no call: the search found no faster plan with them"
    )
