"""Loading a folder whose weights differ from those of its config."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_realloc.algorithms.base.loaded_weights import is_model_source
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.data.tokenizers import load_tokenizer
from lightning_realloc.errors import ConfigError, GenerationError
from lightning_realloc.generation.speculative.draft_model import describe_draft_model, load_draft_model
from tests.models import byte_tokenizer, tiny_model

Weights = dict[str, Tensor]


def rewrite(folder: Path, change: Callable[[Weights], object], *, model: PreTrainedModel | None = None) -> Path:
    """Save a model, llama by default, with other weights in its file."""
    (tiny_model("llama") if model is None else model).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_a_head_of_its_own(folder: Path) -> Path:
    """Save a model whose config ties the head to the embeddings, with another head in its file."""
    head = 0.05 * torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    return rewrite(folder, lambda weights: weights.update({"lm_head.weight": head}), model=tiny_model("qwen2"))


def _lose_a_weight(weights: Weights) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def _lose_a_block(weights: Weights) -> None:
    for name in [name for name in weights if ".layers.1." in name]:
        del weights[name]


def _gain_a_block(weights: Weights) -> None:
    for name in [name for name in weights if ".layers.1." in name]:
        weights[name.replace(".1.", ".2.")] = weights[name].clone()


def _gain_a_bias(weights: Weights) -> None:
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)


def _gain_what_is_no_part_of_it(weights: Weights) -> None:
    weights["v_head.summary.weight"] = torch.ones(1, 64)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    weights["model.layers.0.self_attn.masked_bias"] = torch.ones(1)
    weights["model.vision_tower.layers.0.weight"] = torch.ones(1)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("task", ["causal_lm", "token_classification"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_lose_a_weight, r"m' has no weights for model.layers.1.mlp.up_proj.weight, which would be random; give the c"),
        (_lose_a_block, r"has no weights for model.layers.1.\S+, model.layers.1.\S+, \S+, \S+ and 5 more, which would"),
        (_gain_a_block, r"m' has weights that its config.json has no place for: model.layers.2.\S+, \S+ \S+ \S+ and 5"),
        (_gain_a_bias, r"no place for: model.layers.0.self_attn.q_proj.bias; .* or set allow_missing=True to leave"),
    ],
)
def test_a_folder_with_other_weights_is_refused_unless_allowed(
    tmp_path: Path, task: str, change: Callable[[Weights], None], message: str, deferred: bool
) -> None:
    role = Role(name="actor", source=rewrite(tmp_path / "m", change), trained=True, task=task)
    with pytest.raises(ConfigError, match=f"^actor='.*{message}"):
        role.build(seed=0, deferred=deferred)
    assert role.build(seed=0, allow_missing=True, deferred=deferred).config.num_hidden_layers == 2


def test_a_weight_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = rewrite(tmp_path / "m", lambda weights: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    message = r"m' holds model.layers.0.mlp.down_proj.weight with the shape \[\d+, \d+\], and its config.json"
    role = Role(name="actor", source=folder, trained=True)
    for allow_missing, deferred in itertools.product((False, True), repeat=2):
        with pytest.raises(ConfigError, match=message):
            role.build(seed=0, allow_missing=allow_missing, deferred=deferred)


def test_weights_of_other_modules_and_old_buffers_are_left_out(tmp_path: Path) -> None:
    folder = rewrite(tmp_path / "m", _gain_what_is_no_part_of_it)
    for task, trained in (("causal_lm", False), ("token_classification", True), ("sequence_classification", True)):
        Role(name="any", source=folder, trained=trained, task=task).build(seed=0)
    tied = rewrite(tmp_path / "tied", lambda weights: None, model=tiny_model("qwen2"))
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert Role(name="actor", source=tied, trained=True).build(seed=0).config.tie_word_embeddings


def test_a_surplus_block_of_a_bare_backbone_is_refused(tmp_path: Path) -> None:
    tiny_model("qwen2", num_hidden_layers=3).model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 2, "layer_types": config["layer_types"][:2]})
    )
    with pytest.raises(ConfigError, match=r"has no place for: \S*layers.2.input_layernorm.weight,"):
        Role(name="actor", source=tmp_path, trained=True).build(seed=0)


def test_two_different_weights_that_the_config_ties_stay_two(tmp_path: Path) -> None:
    folder = with_a_head_of_its_own(tmp_path / "m")
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.arange(3, 20)[None]
    for source in (folder, theirs):
        ours = Role(name="actor", source=source, trained=True).build(seed=0).eval()
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
        assert not ours.config.tie_word_embeddings
    assert theirs.config.tie_word_embeddings  # the caller's config is left unchanged


@pytest.mark.parametrize("content", [b"", b"<html></html>", bytes(4096)])
def test_a_damaged_file_of_weights_is_refused_by_its_role(tmp_path: Path, content: bytes) -> None:
    folder = rewrite(tmp_path, lambda weights: None)
    (folder / "model.safetensors").write_bytes(content)
    for deferred in (False, True):
        with pytest.raises(ConfigError, match=r"actor='.*' could not be loaded \("):
            Role(name="actor", source=folder, trained=True).build(seed=0, deferred=deferred)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "<html></html>"])
def test_a_damaged_file_of_a_tokenizer_or_config_is_refused(tmp_path: Path, file: str, content: str) -> None:
    folder = rewrite(tmp_path, lambda weights: None)
    byte_tokenizer().save_pretrained(folder)
    (folder / file).write_text(content)
    of_role = Role(name="actor", source=folder, trained=True).config
    read = of_role if file == "config.json" else partial(load_tokenizer, folder)
    if (file, content) == ("tokenizer_config.json", '{"a": 1}'):
        read()  # its settings have defaults
        return
    with pytest.raises(ConfigError, match=r"could (not )?be loaded"):
        read()


def test_a_name_that_is_too_long_for_a_file_is_no_model() -> None:
    name = "x" * 5000
    assert not is_model_source(f"rewards.{name}")
    for read in (partial(load_tokenizer, name), Role(name="actor", source=name, trained=True).config):
        with pytest.raises(ConfigError, match="there is no folder 'xxx"):
            read()


def test_kernels_of_the_hub_that_a_config_names_are_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("attn_implementation", "experts_implementation"):
        (tmp_path / "config.json").write_text(json.dumps({**config, name: "org/kernel"}))
        message = f"{name}='org/kernel' in its config, a kernel whose code would be downloaded and run; remove the"
        for source in (tmp_path, AutoConfig.from_pretrained(tmp_path)):
            role = Role(name="actor", source=source, trained=True)
            for build in (role.describe, partial(role.build, seed=0)):
                with pytest.raises(ConfigError, match=message):
                    build()
        for load in (load_draft_model, describe_draft_model):
            with pytest.raises(GenerationError, match=message):
                load(tmp_path)
