"""Roles of models of images and text: their classes, weights and heads, and the parts that are trained."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.model.model_classes import Task
from lightning_realloc.runtime.model.structure import TrainVision
from lightning_realloc.runtime.parallel.packed_forward import packed_logits, sequence_scores
from lightning_realloc.strategies.checkpoints.hf_folder import write_running_model
from tests.algorithms.test_weights_in_files import assert_same, both
from tests.matrices import crossed, matrix
from tests.models import byte_tokenizer, tiny_model
from tests.strategies.peft.peft_runs import LORA
from tests.vision_models import (
    VISION_FAMILIES,
    forward_arguments,
    prompt_with_images,
    tiny_vision_model,
    vision_config,
)

SEPARATE = ("model.vision_tower.", ("model.multi_modal_projector.",))
PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "qwen2_5_vl": ("model.visual.", ("model.visual.merger.",)),
    "qwen2_vl": ("model.visual.", ("model.visual.merger.",)),
    "qwen3_vl": ("model.visual.", ("model.visual.merger.", "model.visual.deepstack_merger_list.")),
    "llava": SEPARATE,
    "llava_onevision": (SEPARATE[0], (*SEPARATE[1], "model.image_newline")),
    "internvl": SEPARATE,
    "gemma3": SEPARATE,
    "mistral3": SEPARATE,
    "smolvlm": ("model.vision_model.", ("model.connector.",)),
    "idefics3": ("model.vision_model.", ("model.connector.",)),
}
"""Beginnings of the names of the tower's parameters, and of the projector's, which may be among them."""
FEW = ("qwen2_5_vl", "llava", "gemma3")
"""A tower with names of its own, a separate one, and one whose tokens see each other."""
EXCLUDED: tuple[dict[str, Any], ...] = (
    {}, {"exclude_modules": ["down_proj"]}, {"exclude_modules": r".*\.down_proj"}
)  # fmt: skip
TASKS: tuple[Task, ...] = ("token_classification", "sequence_classification")


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by all their names."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


def assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Assert that two models have the same parameters, bit for bit."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def part_of(family: str, name: str) -> str:
    """Return the part of the model that a parameter belongs to."""
    tower, projector = PARTS[family]
    return "projector" if name.startswith(projector) else "tower" if name.startswith(tower) else "text"


def packed_prompts(family: str) -> tuple[list[tuple[list[int], dict[str, Tensor]]], PackedBatch]:
    """Return prompts with 0, 1 and 3 images, and the pack of them with a response each."""
    prompts = [prompt_with_images(family, seeds) for seeds in ((), (1,), (2, 3, 4))]
    columns: dict[str, Any] = {
        "prompt_ids": Ragged.from_list([tokens for tokens, _ in prompts]),
        "response_ids": Ragged.from_list([[4, 3]] * len(prompts)),
    }
    for name, like in prompts[-1][1].items():
        columns[f"input/{name}"] = Ragged.from_list([extras.get(name, like[:0]) for _, extras in prompts])
    return prompts, pack(Samples(torch.arange(len(prompts)), columns))


@pytest.mark.parametrize("family", matrix(VISION_FAMILIES, *FEW))
def test_a_folder_loads_with_its_tower_and_is_written_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = tiny_vision_model(family)
    model.save_pretrained(tmp_path / "given")
    role = Role(name="actor", source=tmp_path / "given", trained=True, train_vision="all")
    whole, mapped = both(role)
    assert_same(whole, mapped)
    assert type(whole) is type(model)
    assert_equal(state(whole), state(model))
    write_running_model(whole, state(whole), None, tmp_path / "written", role="actor")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "written")
    assert type(again) is type(model)
    assert_equal(state(again), state(model))


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    model = tiny_vision_model("qwen2_vl", tie_word_embeddings=True)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "given")
    whole, mapped = both(Role(name="actor", source=tmp_path / "given", trained=True))
    assert_same(whole, mapped)
    assert whole.lm_head.weight is whole.base_model.language_model.embed_tokens.weight  # type: ignore[union-attr]
    write_running_model(whole, state(whole), None, tmp_path / "written", role="actor")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "written")
    assert again.config.tie_word_embeddings
    assert_equal(state(again), state(model))


def test_a_surplus_block_of_a_tower_is_refused(tmp_path: Path) -> None:
    tiny_vision_model("smolvlm").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"has no place for: \S*vision_model.encoder.layers.1.layer_norm1.bias,"):
        Role(name="actor", source=tmp_path, trained=True).build(seed=0)


@pytest.mark.parametrize("family", matrix(VISION_FAMILIES, *FEW))
def test_a_config_gives_the_model_with_its_tower(family: str) -> None:
    whole, deferred = both(Role(name="actor", source=vision_config(family), trained=True))
    assert_same(whole, deferred)
    assert type(whole) is type(tiny_vision_model(family))


@pytest.mark.parametrize(
    ("family", "task"),
    matrix(itertools.product(VISION_FAMILIES, TASKS), *((family, TASKS[0]) for family in FEW), ("gemma3", TASKS[1])),
)
@torch.no_grad()
def test_scores_equal_those_of_a_head_on_the_backbone_of_transformers(family: str, task: Task, tmp_path: Path) -> None:
    language_model: Any = tiny_vision_model(family)
    language_model.save_pretrained(tmp_path / "given")
    whole, mapped = both(Role(name="critic", source=tmp_path / "given", trained=True, task=task))
    assert_same(whole, mapped)
    scorer: Any = whole.eval()
    prompts, packed = packed_prompts(family)
    expected = []
    for tokens, extras in prompts:
        states = language_model.model(**forward_arguments(family, [*tokens, 4, 3], extras), use_cache=False)[0][0]
        scores = nn.functional.linear(states, scorer.score.weight, scorer.score.bias)[:, 0]
        expected.append(scores if task == "token_classification" else scores[-1:])
    found = packed_logits(scorer, packed)[:, 0] if task == "token_classification" else sequence_scores(scorer, packed)
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "task"), crossed(["qwen2_vl", "llava", "gemma3", "smolvlm"], TASKS))
def test_a_classifier_is_made_of_a_module_written_and_read_again(family: str, task: Task, tmp_path: Path) -> None:
    model = tiny_vision_model(family)
    scorer = Role(name="reward", source=model, trained=True, task=task).build(seed=1)
    backbone: Any = model.base_model
    assert_equal(state(scorer.base_model), state(backbone))  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(type(scorer))) is type(scorer)
    write_running_model(scorer, state(scorer), byte_tokenizer(), tmp_path, role="reward")
    again = Role(name="reward", source=tmp_path, trained=False, task=task).build(seed=2)
    assert type(again) is type(scorer)
    assert_equal(state(again), state(scorer))
    copied = Role(name="reward", source=scorer, trained=False, task=task).build(seed=3)
    assert_equal(state(copied), state(scorer))
    with pytest.raises(ConfigError, match="reward is not trained here and brings no weights for score"):
        model.save_pretrained(tmp_path / "headless")
        Role(name="reward", source=tmp_path / "headless", trained=False, task=task).build(seed=0)
    with pytest.raises(ConfigError, match="lm_head"):
        Role(name="actor", source=tmp_path, trained=True).build(seed=0)


@pytest.mark.parametrize("family", matrix(VISION_FAMILIES, *FEW))
def test_the_chosen_parts_are_trained_of_models_that_are_built_here(family: str) -> None:
    config = vision_config(family)
    choices: dict[TrainVision, set[str]] = {
        "none": {"text"}, "projector": {"text", "projector"}, "all": {"text", "projector", "tower"}
    }  # fmt: skip
    for choice, parts in choices.items():
        role = Role(name="actor", source=config, trained=True, train_vision=choice)
        model = role.build(seed=0)
        found = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        assert found == {name: part_of(family, name) in parts for name in found}
        assert {part_of(family, name) for name in found} == choices["all"]
        frozen = {name for name, is_trained in found.items() if not is_trained}
        assert role.frozen_parameters(role.describe()) == frozen
        assert role.trainable_vision() == {"projector", "tower"}
    critic = Role(name="critic", source=config, trained=True, task="token_classification").build(seed=0)
    trained = {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert {part_of(family, name) for name in trained} == {"text"} and "score.weight" in trained


def test_a_given_module_keeps_what_is_trained() -> None:
    model = tiny_vision_model("llava")
    model.base_model.multi_modal_projector.requires_grad_(False)  # type: ignore[union-attr]
    built = Role(name="actor", source=model, trained=True).build(seed=0)
    for name, parameter in built.named_parameters():
        assert parameter.requires_grad == (part_of("llava", name) != "projector"), name


@pytest.mark.parametrize(
    ("family", "given"), matrix(itertools.product(VISION_FAMILIES, EXCLUDED), *zip(FEW, EXCLUDED, strict=True))
)
def test_adapters_are_of_the_chosen_parts(family: str, given: dict[str, Any]) -> None:
    model = tiny_vision_model(family)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    choices: dict[TrainVision, set[str]] = {
        "none": {"text"}, "projector": {"text", "projector"}, "all": {"text", "projector", "tower"}
    }  # fmt: skip
    for choice, parts in choices.items():
        role = Role(name="actor", source=model, trained=True, peft={**LORA, **given}, train_vision=choice)
        built = role.build(seed=0)
        adapted = {name.partition(".lora_")[0] for name, p in built.named_parameters() if p.requires_grad}
        expected = {name for name in linear if part_of(family, f"{name}.") in parts}
        assert adapted == {name for name in expected if not given or not name.endswith("down_proj")}
        names = {name for name, parameter in role.describe().named_parameters() if parameter.requires_grad}
        assert names == {name for name, parameter in built.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def test_saved_adapters_of_a_tower_stay_and_are_trained_if_chosen(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_vision_model("llava").save_pretrained(base)
    tokens, extras = prompt_with_images("llava", (1, 2))
    for choice in ("none", "projector", "all"):
        made: Any = Role(name="actor", source=base, trained=True, peft=LORA, train_vision=choice).build(seed=0)
        write_running_model(made, state(made), None, tmp_path / "adapters", role="actor")
        theirs = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), tmp_path / "adapters")
        ours, expected = (model(torch.tensor([tokens]), **extras).logits for model in (made.eval(), theirs))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    for choice, parts in {"none": {"text"}, "all": {"text", "projector", "tower"}}.items():
        peft = tmp_path / "adapters"
        read = Role(name="actor", source=base, trained=True, peft=peft, train_vision=choice).build(seed=1)  # type: ignore[arg-type]
        assert_equal(state(read), state(made))
        trained = {name for name, parameter in read.named_parameters() if parameter.requires_grad}
        assert {part_of("llava", name) for name in trained} == parts


@pytest.mark.parametrize(("choice", "part"), [("projector", "projector"), ("all", "tower")])
def test_parts_that_no_trained_role_has_are_refused(choice: TrainVision, part: str) -> None:
    text = tiny_model("llama").config
    for source in (text, tiny_vision_model("llava")):
        module = SFT(source, tokenizer=byte_tokenizer(), train_vision=choice)
        with pytest.raises(ConfigError, match=rf"'{choice}' trains the {part} .* no trained role \(actor\)"):
            module.configure_model()
    SFT(vision_config("llava"), tokenizer=byte_tokenizer(), train_vision=choice).configure_model()
    with pytest.raises(ConfigError, match="train_vision"):
        SFT(text, train_vision="tower")  # type: ignore[arg-type]


@torch.no_grad()
def test_another_family_reads_text_and_is_refused_by_name_for_images() -> None:
    sizes = dict(VISION_FAMILIES["llava"])
    config = AutoConfig.for_model("llava_next", **sizes, image_grid_pinpoints=[[16, 16]])
    model = Role(name="actor", source=config, trained=True).build(seed=0).eval()
    assert isinstance(model, PreTrainedModel) and type(model).__name__ == "LlavaNextForConditionalGeneration"
    samples = Samples(
        torch.arange(2),
        {"prompt_ids": Ragged.from_list([[5, 6], [7, 8, 9]]), "response_ids": Ragged.from_list([[3], [4, 5]])},
    )
    logits = packed_logits(model, pack(samples))
    expected: Any = [model(torch.tensor([row]), use_cache=False).logits[0] for row in ([5, 6, 3], [7, 8, 9, 4, 5])]
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-5, rtol=1e-5)
    pixels = Ragged.from_list([torch.zeros(1, 3, 16, 16), torch.zeros(0, 3, 16, 16)])
    with pytest.raises(ConfigError, match="of the family 'llava_next'"):
        packed_logits(model, pack(samples.with_columns(**{"input/pixel_values": pixels})))
