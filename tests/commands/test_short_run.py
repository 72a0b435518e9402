"""Short flags of one-line training become a configuration of ``fit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from lightning_realloc.commands.short_run import (
    COMMANDS,
    configuration,
    data_setting,
    read_command_line,
    short_parser,
    split_arguments,
)
from lightning_realloc.errors import ConfigError


def _config(name: str, *arguments: str, precision: str | None = None) -> dict[str, Any]:
    reward = [] if COMMANDS[name].num_responses is None else ["--reward", "exact"]
    flags = short_parser(name).parse(["--model", "M", "--data", "D", *reward, *arguments])
    return configuration(name, flags, "rows.jsonl", precision)


def _refused(name: str, *arguments: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        read_command_line(name, arguments, precision=lambda: None)
    return str(refusal.value)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_classes_of_the_package_and_its_model(name: str) -> None:
    import lightning_realloc

    config = _config(name)
    for part in ("model", "data"):
        assert hasattr(lightning_realloc, config[part]["class_path"])
    assert config["model"]["init_args"][COMMANDS[name].role] == "M"
    assert config["trainer"]["max_epochs"] == 1 and "max_steps" not in config["trainer"]
    assert config["trainer"]["default_root_dir"] == f"runs/{name}"
    assert "precision" not in config["trainer"]


def test_flags_reach_the_settings_that_they_stand_for() -> None:
    config = _config(
        "grpo", "--n", "4", "--max-new-tokens", "9", "--steps", "7", "--learning-rate", "1e-4", "--lora", "8",
        "--prompt-column", "question", "--output", "out", "--engine", "hf", precision="bf16-mixed",
    )  # fmt: skip
    model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    assert model["sampling"] == {"n": 4, "max_new_tokens": 9}
    assert model["reward"] == "exact"
    assert model["learning_rate"] == 1e-4 and model["engine"] == "hf"
    assert "engine" not in _config("grpo")["model"]["init_args"]
    assert model["peft_config"] == {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    assert data["batch_size"] == 32  # 128 responses of an iteration, 4 for each prompt
    assert data["prompt_column"] == "question" and data["text_prompts"] == "auto"
    assert trainer["max_steps"] == 7 and "max_epochs" not in trainer
    assert trainer["precision"] == "bf16-mixed"
    callbacks = {callback["class_path"]: callback.get("init_args", {}) for callback in trainer["callbacks"]}
    checkpoints = callbacks["lightning.pytorch.callbacks.ModelCheckpoint"]
    assert checkpoints["dirpath"] == "out/checkpoints" and callbacks["SaveHuggingFace"]["dirpath"] == "out/model"
    assert checkpoints["save_on_exception"] is True  # Ctrl-C included
    assert checkpoints["every_n_train_steps"] == 7  # a run of fewer iterations than the default has one as well
    assert callbacks["RolloutTable"]["path"] == "out/rollouts.csv" and "Timeline" in callbacks
    assert not any(each["class_path"] == "RolloutTable" for each in _config("sft")["trainer"]["callbacks"])


@pytest.mark.parametrize("rate", ["nan", "inf", "0", "-1e-6"])
def test_a_learning_rate_that_is_no_positive_number_is_refused(rate: str) -> None:
    assert "must be a positive number" in _refused(
        "grpo", "--model", "M", "--data", "D", "--reward", "exact", f"--learning-rate={rate}"
    )


def test_a_rank_of_adapters_may_be_left_out() -> None:
    assert "peft_config" not in _config("sft")["model"]["init_args"]
    assert _config("sft", "--lora", "--steps", "3")["model"]["init_args"]["peft_config"]["r"] == 16


def test_settings_of_fit_follow_the_configuration_in_their_order() -> None:
    given = ["--model", "M", "--model.learning_rate", "1e-6", "--data=D", "--trainer.callbacks+", "{a: 1}", "--lora",
             "--model.sampling.temperature=0.5", "--ckpt_path", "last", "--config", "more.yaml"]  # fmt: skip
    short, settings = split_arguments(given)
    assert short == ["--model", "M", "--data=D", "--lora"]
    assert settings == [argument for argument in given if argument not in short]

    run = read_command_line("sft", [*given, "--data", __file__], precision=lambda: None)
    assert run.fit_arguments[:2] == ("fit", "--config")
    assert json.loads(run.fit_arguments[2])["model"]["init_args"]["actor"] == "M"
    assert list(run.fit_arguments[3:]) == settings


def test_a_negative_number_is_the_value_of_the_flag_before_it() -> None:
    assert split_arguments(["--data.seed", "-1", "--n", "-.5"]) == (["--n", "-.5"], ["--data.seed", "-1"])


def test_files_are_read_by_the_data_module_and_other_sources_by_datasets(tmp_path: Path) -> None:
    lines, table, saved, folder = (tmp_path / name for name in ("a.jsonl", "a.csv", "saved", "folder"))
    lines.write_text("{}")
    table.write_text("prompt\n")
    Dataset.from_list([{"prompt": "a"}]).save_to_disk(saved)
    folder.mkdir()
    assert data_setting(str(lines), None, None) == str(lines)
    assert data_setting(str(lines), "train[:3]", None) == {"path": str(lines), "split": "train[:3]"}
    assert data_setting(str(table), None, None) == {"path": str(table), "split": "train"}
    assert data_setting(str(saved), None, None) == str(saved)
    assert data_setting(str(saved), "test", None) == {"path": str(saved), "split": "test"}
    assert data_setting(str(folder), None, None) == {"path": str(folder), "split": "train"}
    every = str(tmp_path / "*.jsonl")
    assert data_setting(every, None, None) == every
    assert data_setting("openai/gsm8k", None, "main") == {"path": "openai/gsm8k", "split": "train", "name": "main"}


@pytest.mark.parametrize("missing", ["nowhere.jsonl", "./rows", "a/b/c", "/nowhere"])
def test_a_file_that_is_not_there_is_no_name_on_the_hub(missing: str) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        data_setting(missing, None, None)


WHOLE = ("--model", "M", "--data", "some/rows", "--reward", "exact")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "some/rows", "--reward", "exact"), "grpo needs --model: a Hugging Face name or folder"),
        (("--model", "M", "--reward", "exact"), "grpo needs --data: a file, a folder or the name of a data set"),
        (("--model", "M", "--environment", "a:B"), "name of a data set, or --steps for an environment that writes the"),
        (("--model", "M", "--data", "some/rows"), "grpo needs --reward: one of exact (the text equals"),
        ((*WHOLE, "--reward", "exakt"), "--reward=exakt is unknown; did you mean exact?"),
        ((*WHOLE, "--reward", "judge"), "the names are exact, math, number, code, format; or give a function"),
        ((*WHOLE, "--max-tokens", "3"), "there is no flag --max-tokens; did you mean --max-new-tokens"),
        ((*WHOLE, "--max_cache_bytes", "9"), "--max_cache_bytes; did you mean --model.generation.max_cache_bytes?"),
        ((*WHOLE, "--max-prompt-tokens=9"), "did you mean --data.max_prompt_tokens or --max-new-tokens?"),
        ((*WHOLE, "--batch_size", "9"), "there is no flag --batch_size; did you mean --batch-size?"),
        ((*WHOLE, "--engine", "sglang"), "argument --engine: invalid choice: 'sglang' (choose from "),
        ((*WHOLE, "--num_generations=4"), "num_generations is here sampling=SamplingParams(n=...)"),
        ((*WHOLE, "--algo.kl.init_coef=0.1"), "algo.kl.init_coef is here kl_coef="),
        ((*WHOLE, "--actor_rollout_ref.actor.clip_ratio_c=3"), "actor.clip_ratio_c is here policy_loss=Clip(most=...)"),
        ((*WHOLE, "--steps", "many"), "argument --steps: invalid int value: 'many'"),
        ((*WHOLE, "--steps", "0"), "--steps=0 must be at least 1"),
        ((*WHOLE, "--lora", "0"), "--lora=0 must be at least 1"),
        ((*WHOLE, "--steps", "3", "--epochs", "1"), "--steps=3 and --epochs=1 both end the run"),
        ((*WHOLE, "--model", "weights/model-q4.gguf"), "gguf_file='model-q4.gguf'"),
        ((*WHOLE, "--model", "org/Model-GGUF"), "holds weights in GGUF, which cannot be trained"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_the_way_out(arguments: tuple[str, ...], message: str) -> None:
    assert message in _refused("grpo", *arguments)


def test_flags_of_generation_belong_to_commands_that_generate() -> None:
    assert "there is no flag --n" in _refused("sft", "--model", "M", "--data", "some/rows", "--n", "4")


def test_several_rewards_are_a_list() -> None:
    rewards = _config("grpo", "--reward", "rewards:short")["model"]["init_args"]["reward"]
    assert rewards == ["exact", "rewards:short"]


def _evaluation(name: str, *arguments: str) -> dict[str, Any]:
    """Return the settings of the callback that evaluates the sets of a command line."""
    run = read_command_line(name, ["--model", "M", "--data", "some/rows", *arguments], precision=lambda: None)
    callbacks = json.loads(run.fit_arguments[2])["trainer"]["callbacks"]
    (found,) = (one["init_args"] for one in callbacks if one["class_path"] == "Evaluation")
    return dict(found)


def test_sets_are_evaluated_by_the_reward_of_training_or_by_their_own() -> None:
    grpo = _evaluation("grpo", "--reward", "math", "--prompt-column", "q", "--config-name", "main", "--eval-every", "9",
                       "--eval-set", "held=some/rows", "--eval-set", "reasoning-gym:chain_sum")  # fmt: skip
    assert grpo["every"] == 9
    assert grpo["sets"] == {
        "held": {
            "data": {"path": "some/rows", "name": "main", "split": "test"},
            "reward": "math",
            "prompt_column": "q",
        },
        "chain_sum": {"data": "reasoning-gym:chain_sum"},
    }
    dpo = _evaluation("dpo", "--eval-set", "some/rows", "--eval-reward", "rewards:short", "--config-name", "main")
    assert dpo["every"] == 50 and dpo["sets"]["rows"]["reward"] == "rewards:short"
    assert dpo["sets"]["rows"]["prompt_column"] == "prompt"


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("sft", ("--eval-set", "some/rows"), "needs one rule for right responses, and no reward is given"),
        ("grpo", ("--reward", "math", "--reward", "format", "--eval-set", "some/rows"), "and the run has 2 rewards; "),
        ("sft", ("--eval-reward", "math"), "--eval-reward=math is for sets, and there are none; add --eval-set"),
        ("sft", ("--eval-every", "3"), "--eval-every=3 is for sets, and there are none; add --eval-set"),
        ("sft", ("--eval-set", "a.jsonl", "--eval-reward", "math"), "--eval-set: there is no 'a.jsonl'"),
        ("sft", ("--eval-set", "some/rows", "--eval-reward", "maths"), "--eval-reward=maths is unknown; did you mean"),
        ("sft", ("--eval-set", "a/b", "--eval-set", "c/b", "--eval-reward", "math"), "two sets are named 'b'"),
        ("reward", ("--eval-set", "some/rows"), "there is no flag --eval-set"),
    ],
)
def test_sets_that_cannot_be_evaluated_are_refused(command: str, arguments: tuple[str, ...], message: str) -> None:
    assert message in _refused(command, "--model", "M", "--data", "some/rows", *arguments)
