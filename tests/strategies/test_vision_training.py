"""Trained parts, adapters and critics of models of images and text: every layout gives the results of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim import SGD
from transformers import AutoModelForImageTextToText

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.callbacks import SaveHuggingFace
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.token_group import TokenGroup, refuse_undivided
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from tests.algorithms.base.test_vision_roles import packed_prompts, part_of
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.peft.peft_runs import LORA
from tests.strategies.runs import Batches, Outcome, calls
from tests.strategies.test_images import BatchesWithImages
from tests.vision_models import VISION_FAMILIES, tiny_vision_model, vision_config
from tests.workers import WorkerPool

TWO_RANKS = {
    "fsdp2": calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="tp2"),
    "tp2": calls(actor_train="tp2", actor_generate="tp2", reference_infer="dp2"),
}
MIXED = calls(
    actor_train="dp2.tp2", actor_generate="dp4", reference_infer="tp2@2-3", critic_infer="tp2@0-1",
    critic_train="pp2.fsdp2", reward_infer="fsdp2@2-3",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "projector": {"train_vision": "projector"},
    "all": {"train_vision": "all"},
    "adapters": {"peft_config": LORA},
    "adapters of all": {"peft_config": LORA, "train_vision": "all"},
}
TRAINED = {
    "frozen": {"text"}, "projector": {"text", "projector"}, "all": {"text", "projector", "tower"},
    "adapters": {"text"}, "adapters of all": {"text", "projector", "tower"},
}  # fmt: skip
CASES = [(family, setting, plan) for family in VISION_FAMILIES for setting in SETTINGS for plan in TWO_RANKS]
FEW = [("qwen3_vl", "projector", "fsdp2"), ("internvl", "adapters of all", "fsdp2")]
CUT: list[tuple[str, str, dict[str, int]]] = [(family, "fsdp2.cp2", {}) for family in VISION_FAMILIES]
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
CUT += [(family, "cp4", FEW_HEADS) for family in ("qwen3_vl", "smolvlm", "llava", "llava_onevision", "internvl")]
"""With few heads, ranks divide the queries of a row, too."""


class States(Callback):
    """Counts the trained weights without optimizer state, and the others with one."""

    def __init__(self) -> None:
        self.wrong = -1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Compare the optimizer's states with the parameters of the actor's home."""
        (optimizer,) = trainer.optimizers
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        assert all(parameter.requires_grad for parameter in held) and held
        self.wrong = len(held ^ optimizer.state.keys())


def _train(folder: Path, family: str, settings: dict[str, Any], plans: Sequence[Any]) -> list[Outcome]:
    world_size, found = runs.world_size(), []
    for plan in plans:
        states, saved = States(), SaveHuggingFace(folder / "trained")
        module = runs.grpo(
            actor=str(folder), reference=str(folder), optimizer=partial(SGD, lr=0.5, momentum=0.9), **settings
        )
        found.append(runs.train(module, plan, world_size, BatchesWithImages(family), callbacks=[states, saved]))
        assert states.wrong == 0
    return found


@pytest.mark.parametrize(("family", "setting", "plan"), matrix(CASES, *FEW))
def test_chosen_parts_train_as_on_one_rank(
    workers: WorkerPool, family: str, setting: str, plan: str, tmp_path: Path
) -> None:
    model, settings = tiny_vision_model(family), SETTINGS[setting]
    model.save_pretrained(tmp_path)
    ((alone,),) = workers.run(_train, tmp_path, family, settings, ["heuristic"], world_size=1, init_process_group=False)
    together = workers.run(
        _train, tmp_path, family, settings, [TWO_RANKS[plan]], world_size=2, init_process_group=False, deadline_s=150.0
    )
    for outcomes in zip(*together, strict=True):
        runs.check_equal_to_one_rank(outcomes, alone)
    if "adapters" not in setting:
        written = AutoModelForImageTextToText.from_pretrained(tmp_path / "trained").state_dict()
        ((first, *_), *_) = together
        assert all(torch.equal(written[name], weight) for name, weight in first.weights.items())
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if "adapters" in setting:
        before |= Role(name="actor", source=tmp_path, trained=True, **_role(settings)).build(seed=0).state_dict()
    changed = {name for name, weight in alone.weights.items() if not torch.equal(weight, before.get(name, weight))}
    without = {"projector"} if family == "gemma3" and "adapters" in setting else set()  # it has no linear layer
    assert {part_of(family, name) for name in changed} == TRAINED[setting] - without


def _role(settings: dict[str, Any]) -> dict[str, Any]:
    return {"peft": settings["peft_config"], "train_vision": settings.get("train_vision", "none")}


@pytest.mark.parametrize("family", matrix(VISION_FAMILIES, "qwen2_5_vl", "llava"))
def test_a_frozen_tower_is_not_run_for_gradients(family: str) -> None:
    model: Any = Role(name="actor", source=vision_config(family), trained=True).build(seed=0)
    tracked: list[bool] = []
    tower = getattr(model.base_model, {"qwen": "visual"}.get(family[:4], "vision_tower"), None)
    for module in (tower or model.base_model.vision_model).modules():
        module.register_forward_hook(
            lambda _module, _inputs, output: tracked.append(isinstance(output, torch.Tensor) and output.requires_grad)
        )
    _, packed = packed_prompts(family)
    token_logprobs(model, packed, only_responses=True).logprobs.sum().backward()
    assert tracked and not any(tracked)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (part_of(family, name) == "text"), name


def _train_on_text(family: str, algorithm: str, plans: Sequence[Any]) -> list[Outcome]:
    world_size, found = runs.world_size(), []
    for plan in plans:
        optimizer = partial(SGD, lr=0.5)
        if algorithm == "sft":
            module: Any = runs.sft(actor=vision_config(family), optimizer=optimizer)
            batches = Batches(2, responses=True)
        else:
            module = runs.grpo(actor=vision_config(family), reference=vision_config(family), optimizer=optimizer)
            batches = Batches(2)
        found.append(runs.train(module, plan, world_size, batches))
    return found


@pytest.mark.parametrize(
    ("family", "algorithm"),
    matrix([(family, algorithm) for family in VISION_FAMILIES for algorithm in ("sft", "grpo")],
           ("qwen2_5_vl", "sft")),
)  # fmt: skip
def test_text_alone_trains_as_on_one_rank(workers: WorkerPool, family: str, algorithm: str) -> None:
    ((alone,),) = workers.run(_train_on_text, family, algorithm, ["heuristic"], world_size=1, init_process_group=False)
    plan = calls(actor_train="fsdp2") if algorithm == "sft" else TWO_RANKS["tp2"]
    together = workers.run(_train_on_text, family, algorithm, [plan], world_size=2, init_process_group=False)
    for outcomes in zip(*together, strict=True):
        runs.check_equal_to_one_rank(outcomes, alone)


def _train_ppo(family: str, plans: Sequence[Any]) -> list[Outcome]:
    world_size, found = runs.world_size(), []
    for plan in plans:
        scorer = Role(
            name="reward", source=tiny_vision_model(family, seed=2), trained=True, task="sequence_classification"
        ).build(seed=5)
        nn.init.normal_(scorer.get_parameter("score.weight"))
        module = runs.ppo(
            actor=tiny_vision_model(family), reference=tiny_vision_model(family, seed=1), reward=scorer,
            critic=tiny_vision_model(family, seed=3), optimizer=partial(SGD, lr=0.1),
        )  # fmt: skip
        found.append(runs.train(module, plan, world_size, BatchesWithImages(family)))
    return found


@pytest.mark.parametrize("family", matrix(list(VISION_FAMILIES), "gemma3"))
def test_a_critic_and_a_reward_model_read_images_as_on_one_rank(workers: WorkerPool, family: str) -> None:
    ((alone,),) = workers.run(_train_ppo, family, ["heuristic"], world_size=1, init_process_group=False)
    assert len({reward for rewards in alone.rewards for reward in rewards}) > 4
    everyone = workers.run(_train_ppo, family, [MIXED], init_process_group=False, deadline_s=150.0)
    for outcomes in zip(*everyone, strict=True):
        for outcome in outcomes:
            for ours, theirs in zip(outcome.rewards, alone.rewards, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)  # of a model, which rounds
            outcome.rewards = alone.rewards
        runs.check_equal_to_one_rank(outcomes, alone)


def _train_cut(family: str, of_text: dict[str, int], plans: Sequence[Any]) -> list[Outcome]:
    world_size, found = runs.world_size(), []
    for plan in plans:
        actor, reference = tiny_vision_model(family, **of_text), tiny_vision_model(family, seed=1, **of_text)
        module = runs.grpo(actor=actor, reference=reference, optimizer=partial(SGD, lr=0.5))
        found.append(runs.train(module, plan, world_size, BatchesWithImages(family)))
    return found


@pytest.mark.parametrize(
    ("family", "layout", "of_text"),
    matrix(CUT, ("qwen3_vl", "cp4", FEW_HEADS), ("gemma3", "fsdp2.cp2", {})),
)
def test_rows_with_images_are_divided_over_ranks(
    workers: WorkerPool, family: str, layout: str, of_text: dict[str, int]
) -> None:
    plan = calls(actor_train=layout, actor_generate="dp4", reference_infer="cp2@2-3")
    ((alone,),) = workers.run(_train_cut, family, of_text, ["heuristic"], world_size=1, init_process_group=False)
    everyone = workers.run(_train_cut, family, of_text, [plan], init_process_group=False, deadline_s=150.0)
    for outcomes in zip(*everyone, strict=True):
        runs.check_equal_to_one_rank(outcomes, alone)


def test_queries_of_tokens_that_see_later_ones_are_not_divided() -> None:
    model = tiny_vision_model("gemma3", **FEW_HEADS)
    tokens = cast(TokenGroup, SimpleNamespace(size=4, row_shares=2))
    _, packed = packed_prompts("gemma3")
    with pytest.raises(ConfigError, match="Gemma3ForConditionalGeneration lets the tokens of an image see later ones"):
        refuse_undivided(model, packed, tokens)
    tokens = cast(TokenGroup, SimpleNamespace(size=4, row_shares=1))
    refuse_undivided(model, packed, tokens)
