"""Command line: configuration files, subcommands, exit codes and error messages."""

from __future__ import annotations

import copy
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from transformers import AutoModelForCausalLM

from lightning_realloc import ReallocStrategy, cli
from lightning_realloc.commands.file_forms import file_form
from lightning_realloc.commands.parsing import load_yaml
from tests.command_lines import run_lines as _run
from tests.matrices import few_and_more
from tests.models import byte_tokenizer, tiny_model, tiny_scorer
from tests.scripts import Script
from tests.workers import WorkerPool

CONFIG: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "strategy": {"class_path": "ReallocStrategy", "init_args": {"plan": "static"}},
        "callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": "runs", "save_last": True}}],
    },
    "model": {
        "class_path": "GRPO",
        "init_args": {
            "actor": "model",
            "reward": ["rewards.digits", "rewards:short"],
            "reward_weights": [1.0, 0.5],
            "sampling": {"n": 2, "max_new_tokens": 4},
            "learning_rate": 1e-3,
            "kl_coef": 0.04,
            "train_options": {"num_minibatches": 2, "max_grad_norm": None},
        },
    },
    "data": {"class_path": "PromptDataModule", "init_args": {"data": "prompts.jsonl", "batch_size": 4}},
}
REWARDS = """
def digits(completions, **columns):
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]

def short(completion_ids, **columns):
    return [-float(len(ids)) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a model, prompts, rewards and a configuration."""
    path = tmp_path_factory.mktemp("user")
    tiny_model("qwen2", vocab_size=320).save_pretrained(path / "model")
    byte_tokenizer().save_pretrained(path / "model")
    rows = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(8)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "rewards.py").write_text(REWARDS)
    (path / "grpo.yaml").write_text(yaml.safe_dump(CONFIG))
    (path / "wrong_steps.yaml").write_text("trainer: {max_stepz: 1}")
    (path / "wrong_plan.yaml").write_text("plan: static")
    (path / "wrong_environment.yaml").write_text("model: {class_path: GRPO, init_args: {environment: 3}}")
    (path / "wrong_reward.yaml").write_text("model: {class_path: GRPO, init_args: {reward: {a: 3}}}")
    (path / "earlier.yaml").write_text("model: {class_path: GRPO, init_args: {sample_reallocation: true}}")
    return path


FIT = ("fit", "--config", "grpo.yaml")


def test_a_printed_configuration_is_complete_and_can_be_read_again(workers: WorkerPool, folder: Path) -> None:
    first = _run(workers, folder, [*FIT, "--print_config"])[0]
    earlier = yaml.safe_load(first.output)
    earlier["model"]["init_args"] |= {"max_cache_bytes": None, "sample_reallocation": False, "rollout_budget": None}
    (folder / "printed.yaml").write_text(yaml.safe_dump(earlier))  # settings that moved, at their defaults
    again, changed = _run(
        workers,
        folder,
        ["fit", "--config", "printed.yaml", "--print_config"],
        [*FIT, "--model.sampling.n", "6", "--model.learning_rate", "0.5", "--model.optimizer", "SGD",
         "--trainer.strategy.plan", '{"calls": {"actor.train": "fsdp2"}}', "--print_config"],
    )  # fmt: skip

    printed = yaml.safe_load(first.output)
    assert printed["seed_everything"] == 0
    assert printed["model"]["class_path"] == "lightning_realloc.GRPO"
    arguments = printed["model"]["init_args"]
    assert arguments["reward"] == ["rewards.digits", "rewards:short"]
    assert arguments["learning_rate"] == 1e-3  # a setting of the base class
    assert arguments["train_options"]["num_minibatches"] == 2
    assert arguments["train_options"]["num_epochs"] == 1  # a default
    assert arguments["sampling"]["n"] == 2 and arguments["sampling"]["temperature"] == 1.0
    assert arguments["advantages"] is None  # that of the algorithm
    assert yaml.safe_load(again.output) == printed
    altered = yaml.safe_load(changed.output)
    assert altered["model"]["init_args"]["sampling"]["n"] == 6
    assert altered["model"]["init_args"]["optimizer"]["class_path"] == "torch.optim.SGD"
    assert altered["trainer"]["strategy"]["init_args"]["plan"] == {"calls": {"actor.train": "fsdp2"}}


def test_former_settings_of_generation_are_left_out_at_their_defaults_alone() -> None:
    text = "model: {{init_args: {{generation: {{engine: {}, speculation: null, free_cache: true}}}}}}"
    read = [load_yaml(text.format(engine))["model"]["init_args"]["generation"] for engine in ("native", "hf")]
    assert read == [{"free_cache": True}, {"engine": "hf", "free_cache": True}]


TOOLS = """
class Digits:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, turn):
        return self.tokenizer("3", add_special_tokens=False)["input_ids"]

class Game:
    def __init__(self, level):
        self.level = level

    def reset(self, **columns):
        pass
"""


def test_a_file_sets_conversations_and_rollout_budgets(workers: WorkerPool, folder: Path) -> None:
    (folder / "tools.py").write_text(TOOLS)
    model = json.loads(json.dumps(CONFIG["model"]))
    model["init_args"] |= {
        "sampling": {"n": 2, "max_new_tokens": 8, "stop_token_ids": list(range(160, 320))},
        "environment": "tools:Digits", "conversation": {"max_turns": 3},
        "generation": {"rollout_budget": {"tokens": 10}},
    }  # fmt: skip
    (folder / "talking.yaml").write_text(yaml.safe_dump(CONFIG | {"model": model}))
    line = ["fit", "--config", "talking.yaml"]
    game = {"class_path": "tools.Game", "init_args": {"level": 2}}
    fitted, printed, refused, playing = _run(
        workers, folder, line, [*line, "--print_config"], [*line, "--model.generation.rollout_budget.tokens", "0"],
        [*line, "--model.environment", json.dumps(game), "--print_config"],
    )  # fmt: skip
    assert fitted.code == 0, fitted.errors
    settings = yaml.safe_load(printed.output)["model"]["init_args"]
    assert settings["environment"] == "tools:Digits" and settings["conversation"]["deadline_s"] == 60.0
    budget = settings["generation"]["rollout_budget"]
    assert budget == {"tokens": 10, "seconds": None, "max_staleness": 4, "late": "finish"}
    shown = yaml.safe_load(playing.output)["model"]["init_args"]["environment"]
    assert shown == game and "Unable to serialize" not in playing.errors
    assert refused.code == 2 and "RolloutBudget(tokens=0) must be at least 1" in refused.errors


def test_groups_of_settings_are_mappings_in_a_file(workers: WorkerPool, folder: Path) -> None:
    model = json.loads(json.dumps(CONFIG["model"]))
    del model["init_args"]["kl_coef"]
    model["init_args"] |= {
        "kl": {"coef": 0.1, "estimator": "k1"},
        "policy_loss": {"class_path": "Clip", "init_args": {"high": 0.28}},
        "advantages": {"class_path": "rules.Above", "init_args": {"baseline": 0.5}},
        "generation": {"rollout_budget": {"tokens": 100}},
    }  # fmt: skip
    (folder / "rules.py").write_text(ADVANTAGES)
    sets = {"sums": "prompts.jsonl", "words": "prompts.jsonl"}
    data = CONFIG["data"] | {"init_args": CONFIG["data"]["init_args"] | {"data": sets, "val_data": sets}}
    held_out = {"class_path": "PromptDataModule", "init_args": {"data": "prompts.jsonl", "batch_size": 4}}
    evaluation = {
        "class_path": "Evaluation",
        "init_args": {"sets": {"own": {"data": held_out}}},
    }
    trainer = CONFIG["trainer"] | {"callbacks": [evaluation]}
    (folder / "groups.yaml").write_text(yaml.safe_dump({"trainer": trainer, "model": model, "data": data}))
    line = ["fit", "--config", "groups.yaml"]
    fitted, printed, refused, misspelt = _run(
        workers,
        folder,
        [*line, "--model.kl.place", "reward"],
        [*line, "--print_config"],
        [*line, "--model.kl_coef", "0.2"],
        [*line, "--model.generation.gpu_memory_utilization", "1"],
    )
    assert fitted.code == 0, fitted.errors
    assert yaml.safe_load(printed.output)["data"]["init_args"]["val_data"] == sets
    (printed_evaluation,) = yaml.safe_load(printed.output)["trainer"]["callbacks"]
    assert printed_evaluation["init_args"]["sets"]["own"]["data"]["init_args"]["data"] == "prompts.jsonl"
    settings = yaml.safe_load(printed.output)["model"]["init_args"]
    assert settings["advantages"] == {"class_path": "rules.Above", "init_args": {"baseline": 0.5}}
    assert settings["kl"] == {"coef": 0.1, "estimator": "k1", "place": None, "target": None, "gain": None}
    assert settings["generation"]["free_cache"] == "auto" and settings["generation"]["rollout_budget"]["tokens"] == 100
    assert refused.code == 2
    assert "kl_coef=0.2 and kl=KL(0.1) contradict each other; leave one of them out" in refused.errors
    assert misspelt.code == 2
    assert "GenerationOptions has no setting gpu_memory_utilization; here it is max_cache_bytes=" in misspelt.errors


ADVANTAGES = """
class Above:
    def __init__(self, baseline=0.0):
        self.baseline = baseline

    def __call__(self, samples):
        return samples.tensor("rewards") - self.baseline
"""
DESCENT = """
import torch

class Descent(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            print(f"{group.get('name')} lr={group['lr']} weight_decay={group['weight_decay']}")
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(parameter.grad, alpha=group["lr"])
"""


ADVICE = (
    "policy_loss=Clip(low=0.1, high=0.28), generation=GenerationOptions(vllm=VLLMOptions(sleep=True)), "
    "sampling=SamplingParams(n=4, top_p=0.5), kl=KL(0.05, place='loss'), Speculation(num_draft_tokens=4), "
    "optimizer=partial(torch.optim.SGD, lr=1e-3), Trainer(max_steps=3, val_check_interval=7)"
)


def test_a_file_and_flags_take_the_forms_that_errors_show(workers: WorkerPool, folder: Path) -> None:
    flags = file_form(f"x; {ADVICE}", ["--x"]).removeprefix("; as a flag: ").split("; ")
    lines = file_form(f"x; {ADVICE}", []).removeprefix("; in YAML: ").split("; ")
    content = copy.deepcopy(CONFIG)
    for line in lines:
        ((name, value),) = yaml.safe_load(line).items()
        if name == "trainer":
            content["trainer"] |= value
        elif isinstance(content["model"]["init_args"].get(name), dict):
            content["model"]["init_args"][name] |= value
        else:
            content["model"]["init_args"][name] = value
    (folder / "advised.yaml").write_text(yaml.safe_dump(content))
    by_file, by_flags = _run(
        workers,
        folder,
        ["fit", "--config", "advised.yaml", "--print_config"],
        [*FIT, *(word for each in flags for word in shlex.split(each)), "--print_config"],
    )
    assert by_file.code == by_flags.code == 0, (by_file.errors, by_flags.errors)
    printed = yaml.safe_load(by_file.output)
    assert printed == yaml.safe_load(by_flags.output)
    model = printed["model"]["init_args"]
    assert model["policy_loss"]["init_args"] == {"low": 0.1, "high": 0.28, "most": None}
    assert model["generation"]["vllm"]["sleep"] and model["speculation"]["num_draft_tokens"] == 4
    assert printed["trainer"]["val_check_interval"] == 7


def test_a_file_gives_a_role_its_optimizer_by_class_path(workers: WorkerPool, folder: Path) -> None:
    (folder / "descent.py").write_text(DESCENT)
    model = json.loads(json.dumps(CONFIG["model"]))
    del model["init_args"]["learning_rate"]
    model["init_args"] |= {
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"fused": True}},
        "weight_decay": 0.1, "no_decay": ["norms"],
        "optimizers": {
            "actor": {
                "optimizer": {"class_path": "descent.Descent", "init_args": {"lr": 0.25}}, "weight_decay": 0.5,
                "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}},
            }
        },
    }  # fmt: skip
    (folder / "roles.yaml").write_text(yaml.safe_dump(CONFIG | {"model": model}))
    line = ["fit", "--config", "roles.yaml"]
    fitted, printed, refused = _run(
        workers, folder, line, [*line, "--print_config"], [*line, "--model.no_decay", "[gains]"]
    )
    assert fitted.code == 0, fitted.errors
    steps = [text for text in fitted.output.splitlines() if text.startswith("actor")]
    both = ["actor lr={0} weight_decay=0.5", "actor/1 lr={0} weight_decay=0.0"]
    # Two iterations of two mini-batches; between the iterations the schedule divides the rate by ten.
    assert steps == [text.format(rate) for rate in (0.25, 0.25, 0.025, 0.025) for text in both]
    settings = yaml.safe_load(printed.output)["model"]["init_args"]
    assert settings["optimizers"]["actor"]["optimizer"]["class_path"] == "descent.Descent"
    assert settings["optimizers"]["actor"]["learning_rate"] is None
    assert refused.code == 2


def test_realloc_is_the_default_strategy(workers: WorkerPool, folder: Path) -> None:
    printed = _run(workers, folder, ["fit", "--print_config"])[0]

    assert yaml.safe_load(printed.output)["trainer"]["strategy"] == "realloc"


def test_train_evaluate_predict_and_export(workers: WorkerPool, folder: Path) -> None:
    (folder / "plan.yaml").write_text("calls: {actor.generate: dp1, actor.train: fsdp1, reference.infer: dp1}")
    saved, exported = "runs/last.ckpt", folder / "exported"
    outcomes = _run(
        workers,
        folder,
        [*FIT, "--trainer.strategy.plan", "plan.yaml"],
        ["validate", "--config", "grpo.yaml", "--data.val_fraction", "0.5", "--ckpt_path", saved],
        ["test", "--config", "grpo.yaml", "--ckpt_path", saved],
        ["predict", "--config", "grpo.yaml", "--ckpt_path", saved],
        ["export", saved, "--output", str(exported), "--dtype", "bfloat16"],
        ["export", saved, "--output", str(exported), "--role", "critic"],
    )

    assert [outcome.code for outcome in outcomes] == [0, 0, 0, 0, 0, 2], outcomes
    assert "val/reward" in outcomes[1].output
    assert "test/reward" in outcomes[2].output
    assert outcomes[4].output == f"actor of {saved} written to {exported}\n"
    assert outcomes[5].errors == (
        f"error: {saved} holds no weights of 'critic': it has no such role; it holds those of actor\n"
    )
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.dtype == torch.bfloat16
    assert (folder / "config.yaml").is_file()  # the configuration of the run


@pytest.mark.exhaustive
def test_a_run_lives_in_an_object_store(workers: WorkerPool, folder: Path) -> None:
    config = copy.deepcopy(CONFIG)
    config["trainer"]["callbacks"][0]["init_args"]["dirpath"] = "memory://cli/x"
    config["trainer"]["default_root_dir"] = "memory://cli"
    (folder / "store.yaml").write_text(yaml.safe_dump(config))
    fit, saved = ["fit", "--config", "store.yaml"], "memory://cli/x/last.ckpt"
    outcomes = _run(
        workers,
        folder,
        fit,
        [*fit, "--trainer.max_steps", "3", "--ckpt_path", "last"],
        ["test", "--config", "store.yaml", "--ckpt_path", saved],
        ["export", saved, "--output", str(folder / "from_store")],
        ["verify", "memory://cli/x"],
        ["export", "memory://cli/x", "--output", str(folder / "none")],
    )

    assert [outcome.code for outcome in outcomes] == [0, 0, 0, 0, 0, 2], outcomes
    assert "training starts from step 0" not in outcomes[1].errors
    assert "test/reward" in outcomes[2].output
    assert AutoModelForCausalLM.from_pretrained(folder / "from_store").config.vocab_size == 320
    assert f"{saved}: intact, GRPO, " in outcomes[4].output
    assert "step=3.ckpt" in outcomes[4].output and "last-v1.ckpt" not in outcomes[4].output
    assert outcomes[5].errors.startswith("error: memory://cli/x is no checkpoint: it lacks realloc.json")
    assert not [path.name for path in folder.iterdir() if path.name.startswith("memory")]


ROWS: dict[str, tuple[str, list[dict[str, str]]]] = {
    "DPO": ("PreferenceDataModule", [{"prompt": f"{n}=", "chosen": f"{n}", "rejected": "no"} for n in range(8)]),
    "SFT": ("SFTDataModule", [{"prompt": f"{n}=", "completion": f"{n}"} for n in range(8)]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", ROWS)
def test_dpo_and_sft_fit_validate_test_and_predict(workers: WorkerPool, folder: Path, algorithm: str) -> None:
    module, rows = ROWS[algorithm]
    (folder / f"{algorithm}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"class_path": module, "init_args": {"data": f"{algorithm}.jsonl", "batch_size": 2, "val_fraction": 0.5}}
    checkpoints = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": algorithm, "save_last": True}}
    writer = {"class_path": "PredictionWriter", "init_args": {"path": f"{algorithm}/predicted.jsonl"}}
    trainer = CONFIG["trainer"] | {"callbacks": [checkpoints, writer, {"class_path": "EMA"}], "max_steps": 1}
    model = {"class_path": algorithm, "init_args": {"actor": "model"}}
    (folder / f"{algorithm}.yaml").write_text(yaml.safe_dump({"trainer": trainer, "model": model, "data": data}))
    saved = ["--ckpt_path", f"{algorithm}/last.ckpt"]
    outcomes = _run(
        workers, folder, *([command, "--config", f"{algorithm}.yaml", *(saved if command != "fit" else [])]
                           for command in ("fit", "validate", "test", "predict")),
    )  # fmt: skip

    assert [outcome.code for outcome in outcomes] == [0, 0, 0, 0], outcomes
    assert "val/loss" in outcomes[1].output and "test/loss" in outcomes[2].output
    predicted = [json.loads(line) for line in (folder / algorithm / "predicted.jsonl").read_text().splitlines()]
    assert predicted and all(row["prompt"].endswith("=") for row in predicted)


RULES = [
    "rewards.digits",
    "format",
    "./scorer",  # a model
    {"class_path": "lightning_realloc.rewards.Regex", "init_args": {"pattern": "[a-z]"}},
    {"class_path": "lightning_realloc.rewards.NumericAnswer", "init_args": {"reader": "plain"}},
    {"class_path": "lightning_realloc.rewards.Format", "init_args": {"tags": ["think"]}},
    {"class_path": "lightning_realloc.rewards.Length", "init_args": {"maximum": 3}},
    {"class_path": "lightning_realloc.rewards.OverlongPenalty", "init_args": {"max_length": 4, "buffer": 2}},
    {
        "class_path": "lightning_realloc.rewards.Shaped",
        "init_args": {
            "function": {"class_path": "lightning_realloc.rewards.Length", "init_args": {"minimum": 2}},
            "scale": 0.5,
        },
    },
    {
        "class_path": "lightning_realloc.rewards.PooledReward",
        "init_args": {"function": "rewards:short", "workers": 1, "chunk_size": 8, "on_failure": "mask"},
    },
    {
        "class_path": "lightning_realloc.rewards.CodeTests",
        "init_args": {"column": "answer", "wall_s": 20.0, "interpreter": sys.executable},
    },
]


def test_every_reward_can_be_given_with_its_settings(workers: WorkerPool, folder: Path) -> None:
    tiny_scorer("llama", vocab_size=320).save_pretrained(folder / "scorer")
    model = CONFIG["model"]["init_args"] | {"reward": RULES, "reward_weights": [1.0] * len(RULES)}
    config = CONFIG | {"model": {"class_path": "GRPO", "init_args": model}}
    (folder / "rules.yaml").write_text(yaml.safe_dump(config))
    lines = ["fit", "--config", "rules.yaml", "--data.batch_size", "2", "--trainer.max_steps", "1"]
    printed, fitted = _run(workers, folder, [*lines, "--print_config"], lines)

    shown = yaml.safe_load(printed.output)["model"]["init_args"]["reward"]
    assert [rule if isinstance(rule, str) else rule["class_path"].rpartition(".")[2] for rule in shown] == [
        rule if isinstance(rule, str) else rule["class_path"].rpartition(".")[2] for rule in RULES
    ]
    assert shown[9]["init_args"]["workers"] == 1 and shown[9]["init_args"]["deadline_s"] == 30.0
    assert fitted.code == 0, fitted


def test_a_class_path_of_a_reward_never_calls_a_function(workers: WorkerPool, folder: Path) -> None:
    call = {"class_path": "os.mkdir", "init_args": {"path": "called"}}
    nested = {"class_path": "lightning_realloc.rewards.PooledReward", "init_args": {"function": call}}
    lines = []
    for name, reward in (("alone", call), ("listed", [call]), ("nested", [nested])):
        model = CONFIG["model"]["init_args"] | {"reward": reward}
        (folder / f"{name}.yaml").write_text(
            yaml.safe_dump(CONFIG | {"model": {"class_path": "GRPO", "init_args": model}})
        )
        lines.append(["fit", "--config", f"{name}.yaml"])
    for ended in _run(workers, folder, *lines):
        assert ended.code == 2
        assert "error: reward: class_path='os.mkdir' names a function" in ended.errors
    assert not (folder / "called").exists()


def test_errors_of_rewards_are_reported_without_a_traceback(workers: WorkerPool, folder: Path) -> None:
    server = {"class_path": "lightning_realloc.rewards.RemoteReward", "init_args": {"url": "http://127.0.0.1:9/judge"}}
    wrong = {"class_path": "lightning_realloc.rewards.Length", "init_args": {"unit": "bytes"}}
    late = {"class_path": "lightning_realloc.rewards.RemoteReward", "init_args": {"url": "localhost"}}
    lines = []
    for name, reward in (("down", server), ("wrong", wrong), ("late", late)):
        model = CONFIG["model"]["init_args"] | {"reward": [reward], "reward_weights": [1.0]}
        text = yaml.safe_dump(CONFIG | {"model": {"class_path": "GRPO", "init_args": model}})
        (folder / f"{name}.yaml").write_text(text)
        lines.append(["fit", "--config", f"{name}.yaml"])
    down, wrongly, malformed = _run(workers, folder, *lines)

    assert (down.code, wrongly.code, malformed.code) == (2, 2, 2)
    assert "error: the reward server at http://127.0.0.1:9/judge cannot be used: " in down.errors
    assert "start it before the run, or correct the address of 'remote'" in down.errors
    assert "unit" in wrongly.errors
    assert "error: url='localhost' must be an address like http://localhost:8000/judge" in malformed.errors
    assert all("Traceback" not in outcome.errors for outcome in (down, wrongly, malformed))


def test_only_the_subcommand_that_is_named_first_gets_its_options() -> None:
    """Options of all four take most of the start of a command line."""
    found: dict[str, int] = {}

    class Prepared(cli.ReallocCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            found.update({name: len(each._actions) for name, each in self._subcommand_parsers.items()})
            sys.exit()

    for arguments, complete in (
        (["test", "--ckpt_path", "x"], {"test"}),
        (["--help"], {"fit", "validate", "test", "predict"}),
    ):
        with pytest.raises(SystemExit):
            Prepared(arguments)
        assert {name for name, count in found.items() if count > 20} == complete
        assert found.keys() == {"fit", "validate", "test", "predict"}


def test_help_names_every_command_and_stays_short(workers: WorkerPool, folder: Path) -> None:
    commands, model, fit = _run(workers, folder, ["--help"], ["fit", "--model.help", "GRPO"], ["fit", "--help"])

    assert all(name in commands.output for name in ("fit", "validate", "test", "predict", "export"))
    assert "--model.train_options" in model.output and "--model.learning_rate" in model.output
    assert "The policy: a Hugging Face name or folder" in model.output
    # Options, not lines: the lines below an option list every subclass that something has imported.
    options = re.findall(r"(?m)^  --\S+", model.output)
    assert len(options) < 80, (
        f"GRPO's help has {len(options)} options; make a new setting the field of a group such as GenerationOptions, "
        f"or raise this limit"
    )
    names = "".join(fit.output.split())  # help breaks lines inside names
    assert "lightning_realloc.ReallocStrategy" in names
    assert "DataParallelStrategy" not in names  # a base class only


def make_callback(every: int = 1) -> Callback:
    """Return an instance: a configuration can name a function instead of a class."""
    return Callback()


OLD_PENALTY = "{class_path: lightning_realloc.rewards.OverlongPenalty, init_args: {max_tokens: 3, buffer: 2}}"
MISTAKES = [
    (
        "--trainer.strategy.plan",
        '{"calls": {"actor.train": "tpp2"}}',
        "error: calls.actor.train: unknown layout 'tpp2'",
    ),
    ("--trainer.strategy.plan", '{"calls": {"actor.train": {"layout": "tp2", "mode": 1}}}', "has no option 'mode'"),
    ("--trainer.strategy.plan", "nowhere.yaml", "error: plan file nowhere.yaml"),
    ("--trainer.strategy.plann", "static", "ReallocStrategy has no setting plann; did you mean plan=?"),
    ("--trainer.callbacks+", '{"class_path": "tests.test_cli.make_callback", "init_args": {"evry": 1}}', "'evry'"),
    ("--model.learning_rate", "fast", 'Parser key "learning_rate"'),
    ("--model.partners", "x", "partners='x' must map names to models; write {other: actor} for self-play, or "),
    ("--model.tools", "my:add", "tools='my:add' must be a list of functions; write ['my_tools:add'], or my_tools:add"),
    ("--config", "wrong_environment.yaml", "environment='3' must name an environment; write my_game.Game, {class_path"),
    ("--model.learned_parts", "answer", "learned_parts='answer' must be a list of thinking, calls and answer; write ["),
    ("--model.on_failure", "drop", "GRPO has no setting on_failure; here it is conversation=Conversation(on_failure"),
    (
        "--model.policy_loss",
        "{clip_low: 0.1}",
        "; clip_low is here policy_loss=Clip(low=...); "
        "as a flag: --model.policy_loss '{class_path: Clip, init_args: {low: ...}}'\n",
    ),
    ("--model.policy_loss", "{low: 0.2}", "; name the class by class_path (Clip, Cispo, Sapo, Vespo), as in {class_"),
    (
        "--model.policy_loss",
        "dapo",
        "; dapo is here policy_loss=Clip(high=0.28) with loss_average='token'; as a flag: ",
    ),
    ("--trainer.callbacks+", "{dirpath: x}", "as in {class_path: ModelCheckpoint, init_args: {dirpath: ...}}\n"),
    ("--config", "earlier.yaml", "; in YAML: generation: {sample_reallocation: ...}\n"),
    (
        "--model.policy_loss",
        "{loss_average: token}",
        "loss_average is a setting of GRPO or PPO or RLOO; write it under the init",
    ),
    ("--model.correction", "geometry", "; did you mean geometric?"),
    ("--model.sampling.max_tokens", "7", "SamplingParams has no setting max_tokens; here it is max_new_tokens="),
    ("--model.sampling.top_p", "7", "error: top_p=7.0 must lie in (0, 1]"),
    ("--data.data", "nowhere.jsonl", "error: no file at 'nowhere.jsonl'"),
    ("--trainer.precision", "16-true", "error: precision='16-true' cannot be used with strategy='realloc'"),
    ("--trainer.devices", "-1", "error: trainer: `devices` selected with `CPUAccelerator` should be an int > 0"),
    ("--trainer.strategy.plan", "heuristics", "error: plan='heuristics' is neither 'heuristic' nor 'static'"),
    ("--model", "GRPOO", "there is no class GRPOO: did you mean GRPO"),
    ("--data", "no_such_package.Rows", "write package.module.Class of one that can be imported"),
    ("--ckpt_path", "model", "it is a Hugging Face model: give it as a model's path"),
    ("--config", "nowhere.yaml", 'Parser key "config"'),
    ("--config", "wrong_steps.yaml", "option 'trainer.max_stepz'; did you mean trainer.max_steps"),
]
MORE_MISTAKES = [
    ("--model.speculation", '{"draftr": "ngram"}', "; Speculation has no setting draftr; did you mean drafter=?\n"),
    ("--model.optimizer", "{lr: 0.1}", "; name the class by class_path (AdamW, "),
    ("--model.generation.engine", "hf", "GenerationOptions has no setting engine; here it is a setting of the algor"),
    ("--data.batch_size", "two", "Expected a <class 'int'>. Got value: two\n"),
    ("--model.reward", "rewards.nothing", "error: reward function 'rewards.nothing' cannot be imported"),
    ("--model.actor", "nowhere", "error: no tokenizer could be loaded from 'nowhere' (there is no folder 'nowhere'"),
    ("--model", "lightning_realloc.rewards.pooled.PooledReward", "did you mean lightning_realloc.rewards.PooledReward"),
    ("--model.reward", OLD_PENALTY, "OverlongPenalty has no setting max_tokens; did you mean max_length=?"),
    ("--config", "wrong_plan.yaml", "plan is a setting of ReallocStrategy; write it under"),
    ("--trainer.strategy.plan", '{"calls": {"actor.train": "fsdp1"}}', "error: the plan gives no layout for"),
    ("--model.speculation", '{"method": "ngram"}', "Speculation has no setting method; here it is drafter="),
    ("--model.partners", "{a: 3}", "partners=\"{'a': 3}\" must map names to models; write {other: actor}"),
    ("--config", "wrong_reward.yaml", "reward=\"{'a': 3}\" must name a reward; write my_rewards.right_answer, a list"),
    ("--model.policy_loss.low", "0.2", "as in {class_path: Clip, init_args: {low: 0.2}}\n"),
    ("--model.policy_loss", "Dr-GRPO", "; Dr-GRPO is here policy_loss='clip' with loss_average='constant'\n"),
    ("--model.policy_loss.clip_high", "0.3", "clip_high is here policy_loss=Clip(high=...) or Cispo(high=...)"),
    ("--model.rollout_budget.tokens", "9", "here it is generation=GenerationOptions(rollout_budget=...)"),
    ("--trainer.rollout_budget", "9", "rollout_budget is here generation=GenerationOptions(rollout_budget=...)"),
    ("--config", "earlier.yaml", "here it is generation=GenerationOptions(sample_reallocation=...)"),
    ("--model.actor", "x" * 300, "error: no tokenizer could be loaded from 'xxx"),
    ("--data.batch_size", "99", "error: batch_size=99"),
    ("--trainer.strategy.plan", '{"layouts": {}}', "an execution plan has the key 'calls'"),
    ("--trainer.strategy.plann", "static", "Option 'plann' is not accepted"),
    ("--trainer.strategy.devices", "2", "here it is Lightning's Trainer(devices=...)"),
    (
        "--model.policy_loss",
        '{"class_path": "Clip", "init_args": {"clip_low": 0.1}}',
        "Clip has no setting clip_low; ",
    ),
    ("--model.clip_high", "0.28", "GRPO has no setting clip_high; here it is policy_loss=Clip(high=...) or Cispo("),
    (
        "--model.max_cache_bytes",
        "9",
        "GRPO has no setting max_cache_bytes; here it is generation=GenerationOptions(max_",
    ),
    ("--max_cache_bytes", "9", "max_cache_bytes is here generation=GenerationOptions(max_cache_bytes=...)"),
    ("--model.sampling.max_tokens", "7", "Option 'max_tokens' is not accepted"),
    ("--model.num_generations", "7", "GRPO has no setting num_generations; here it is sampling=SamplingParams(n=...)"),
    (
        "--data.max_prompt_length",
        "7",
        "has no setting max_prompt_length; here it is max_prompt_tokens=",
    ),
    ("--model.sampling.n", "1", "error: sampling.n=1: a group needs 2 or more"),
    ("--model.train_options.num_epochs", "0", "error: num_epochs=0 must be a whole number, at least 1"),
    ("--trainer.precision", "64-true", "error: precision='64-true' cannot be used with strategy='realloc'"),
    ("--trainer.strategy", "null", "error: trainer: You selected an invalid strategy name: `strategy='null'`"),
    ("--trainer.accelerator", "no", "error: trainer: You selected an invalid accelerator name"),
    ("--trainer.strategy.overlap", "always", "overlap"),
    ("--model", "lightning_realloc.SFTT", "there is no class lightning_realloc.SFTT: did you mean SFT"),
    ("--trainer.callbacks", "lightning_realloc.SampleTable", "did you mean RolloutTable"),
    ("--trainer.strategy.start_method", "spawn", "here it is launcher="),
]
"""Mistakes that are found where those above are, or where those of `tests/commands/test_one_line_runs.py` are."""


@few_and_more(MISTAKES, MORE_MISTAKES)
def test_a_mistake_is_reported_with_its_key_and_without_a_traceback(
    workers: WorkerPool, folder: Path, cases: list[tuple[str, str, str]]
) -> None:
    outcomes = _run(workers, folder, *([*FIT, key, value] for key, value, _ in cases))

    for (key, value, message), outcome in zip(cases, outcomes, strict=True):
        assert outcome.code == 2, (key, value, outcome)
        assert message in outcome.errors, (key, value, outcome.errors)
        hints = ("has no setting", "there is no class")
        assert sum(map(outcome.errors.count, hints)) <= 1, outcome.errors
        assert "Traceback" not in outcome.errors
        assert "usage:" not in outcome.errors
        assert not re.search(r"^ *(Subtypes|Given value)", outcome.errors, re.MULTILINE), outcome.errors


# ---- in processes of their own
def _process(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_devices_train_through_the_script_launcher(folder: Path) -> None:
    plan = '{"calls": {"actor.generate": "tp2", "reference.infer": "dp2", "actor.train": "fsdp2"}}'
    options = ["--trainer.devices", "2", "--trainer.strategy.plan", plan, "--trainer.callbacks.dirpath", "two"]

    finished = _process([sys.executable, "-m", "lightning_realloc", *FIT, *options], folder)

    assert finished.returncode == 0, finished.stderr
    description = json.loads((folder / "two" / "last.ckpt" / "realloc.json").read_text())
    assert description["world_size"] == 2
    assert description["plan"]["calls"]["actor.train"] == "fsdp2@0-1"


def test_the_console_script_prints_an_error_of_two_devices_last(folder: Path, tmp_path: Path) -> None:
    script, log = Path(sys.executable).parent / "lightning-realloc", tmp_path / "log"
    options = ["--trainer.devices", "2", "--data.batch_size", "99", "--trainer.callbacks.dirpath", "no"]

    code = Script([str(script), *FIT, *options], folder, os.environ, log, forks_ranks=True).wait(timeout=170)

    printed = log.read_text()
    assert code == 2
    assert "Traceback" not in printed
    message = "batch_size=99 needs as many rows, but there are 8"
    told = [line for line in printed.splitlines() if message in line]
    assert [line.partition(":")[0] for line in told] == ["error on rank 1", "error"]
    assert printed.splitlines()[-1] == told[-1]


def _run_as_module(folder: Path) -> object:
    """Return the exit code of ``python -m`` for a mistake, without the imports of a fresh process."""
    os.chdir(folder)
    sys.argv = ["cli.py", *FIT, "--data.batch_size", "99"]
    with pytest.raises(SystemExit) as end:
        runpy.run_module("lightning_realloc.cli", run_name="__main__")
    return end.value.code


def test_a_mistake_gives_python_m_the_same_exit_code(workers: WorkerPool, folder: Path) -> None:
    assert workers.run(_run_as_module, folder, world_size=1, init_process_group=False) == [2]


def test_a_plan_is_checked_without_weights(workers: WorkerPool, folder: Path) -> None:
    (folder / "eight.yaml").write_text("calls: {actor.generate: dp8, actor.train: fsdp8, reference.infer: dp8}")
    (folder / "shape").mkdir(exist_ok=True)
    (folder / "shape" / "config.json").write_text((folder / "model" / "config.json").read_text())
    lines = ["plan", "--check", "eight.yaml", "--model", "actor=shape"]
    both = [*lines, "--model", "reference=shape"]
    fits, exceeds, lacks, unknown, unnamed = _run(
        workers,
        folder,
        [*both, "--cluster", "h100:1x8", "--prompt-length", "100", "--response-length", "100"],
        [*both, "--memory-per-device", "2MiB", "--batch", "8"],
        lines,
        [*both, "--algorithm", "other"],
        ["plan", "--check", "eight.yaml", "--model", "shape"],
    )

    assert fits.code == 0, fits
    assert [line.split()[0] for line in fits.output.splitlines()[1:4]] == ["set-up", "->", "actor.generate"]
    assert "peak of rank 0-7: " in fits.output
    assert exceeds.code == 2
    assert "peak of rank 0-7: " in exceeds.output  # the table comes first
    assert "on rank 0 in actor.train, and a device has 2.00 MiB" in exceeds.errors
    assert lacks.code == unknown.code == unnamed.code == 2
    assert "the plan names reference.infer, which this algorithm does not have" in lacks.errors
    assert "--algorithm=other is not one of grpo, ppo, sft" in unknown.errors
    assert "--model=shape must name a role and its model" in unnamed.errors


@pytest.mark.parametrize("written", ["off", '"off"', "sampled", "all"])
def test_yaml_takes_every_documented_check_of_weights_with_and_without_quotes(written: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ReallocStrategy, "strategy")
    made = parser.instantiate_classes(parser.parse_string(f"strategy:\n  verify_weights: {written}")).strategy
    assert made._placed._options.verify_weights == written.strip('"')
