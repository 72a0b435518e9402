"""Weights on their way to vLLM: chunks, names, shared memory as the other process reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import VLLMEngine, VLLMOptions
from lightning_realloc.generation.vllm.child import weights_in
from lightning_realloc.generation.vllm.hand_over import SharedMemoryHandOver, plan_chunks, weights_of, write_weights
from lightning_realloc.generation.vllm.lone_adapters import adapter_settings, adapters_of, max_rank
from lightning_realloc.generation.vllm.tensor_ranks import TensorRanks
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.model.adapter_layers import adapters_merged, inject_adapters
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from tests.models import tiny_model
from tests.vision_models import VISION_FAMILIES, tiny_vision_model
from tests.workers import WorkerPool


@dataclass
class Chunk:
    """The fields that vLLM makes of a description."""

    path: str
    token: str
    begin: int
    tensors: list[Any]


@given(sizes=st.lists(st.integers(1, 5000), max_size=40), most=st.integers(64, 8000))
def test_chunks_hold_every_weight_once_in_order_without_overlap(sizes: list[int], most: int) -> None:
    num_bytes = {f"w{index}": size for index, size in enumerate(sizes)}
    chunks = plan_chunks(num_bytes, most=most)
    assert [slot.name for chunk in chunks for slot in chunk] == list(num_bytes)
    for chunk in chunks:
        ends = [slot.begin + num_bytes[slot.name] for slot in chunk]
        assert all(end <= later.begin for end, later in zip(ends, chunk[1:], strict=False))
        assert all(slot.begin % 64 == 0 for slot in chunk)
        assert ends[-1] <= most or len(chunk) == 1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_other_process_reads_the_same_bits_chunk_by_chunk(family: str) -> None:
    model, channel = tiny_model(family), SharedMemoryHandOver(chunk_bytes=20_000)
    for _ in range(2):
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        received: dict[str, Tensor] = {}
        num_chunks = 0
        for description in channel.chunks(weights_of(model)):
            received |= dict(weights_in(Chunk(**description), torch.device("cpu")))
            num_chunks += 1
        assert num_chunks > 3
        expected = dict(model.named_parameters())
        assert received.keys() == expected.keys(), "a tied output layer travels once"
        assert all(torch.equal(received[name], weight) for name, weight in expected.items())


def test_memory_with_another_token_is_not_read() -> None:
    channel = SharedMemoryHandOver()
    description = next(channel.chunks(weights_of(tiny_model("llama"))))
    with pytest.raises(ValueError, match="is not the memory that was announced"):
        weights_in(Chunk(**description | {"token": "00" * 16}), torch.device("cpu"))


def test_a_folder_of_weights_holds_each_once_under_its_own_name(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    write_weights(model, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(written[name], weight) for name, weight in model.named_parameters())
    assert (tmp_path / "config.json").exists()


def received_from_ranks(
    family: str, settings: Mapping[str, Any], kind: str, lora: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]] | None:
    """Return whole weights, those that the first tensor-parallel rank described for vLLM, and largest local chunks."""
    layout = Layout.parse(f"tp{dist.get_world_size()}", world_size=dist.get_world_size())
    meshes, rank = MeshRegistry("cpu"), dist.get_rank()
    meshes.create([layout])
    model, find = tiny_model(family, **settings), adapters_of if kind == "adapters" else weights_of
    if lora is not None:
        inject_adapters(lora, model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    expected = {name: weight.clone() for name, weight in find(model).items()}
    model_layout = ModelLayout(describe_model(model), layout)
    model = parallelize(model, model_layout, meshes)
    group = meshes.tensor_group(layout)
    assert group is not None
    ranks = TensorRanks(model_layout, rank, partial(gather_objects, group=group), torch.device("cpu"))
    channel, local = SharedMemoryHandOver(ranks=ranks, chunk_bytes=20_000), find(model)
    if not ranks.is_first:
        assert ranks.follow(lambda said: channel.give(find(model), said["handle"])) == "end"
        return None
    received: dict[str, Tensor] = {}
    for description in channel.chunks(local, kind):
        received |= dict(weights_in(Chunk(**description), torch.device("cpu")))
    ranks.finish("end")
    assert channel.num_bytes(local) == sum(weight.nbytes for weight in expected.values()), "each byte is copied once"
    return expected, received, [sum(weight.nbytes for weight in local.values())]


@pytest.mark.parametrize(
    ("family", "settings", "kind", "lora"),
    [
        ("llama", {"num_key_value_heads": 2}, "weights", None),
        ("qwen2", {"tie_word_embeddings": True}, "weights", None),  # with biases
        ("llama", {"num_key_value_heads": 2}, "adapters", {"r": 4, "target_modules": "all-linear"}),
        ("llama", {"num_key_value_heads": 2}, "weights", {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    ],
)
def test_tensor_parallel_ranks_hand_over_their_shards_as_whole_weights(
    family: str, settings: dict[str, Any], kind: str, lora: dict[str, Any] | None, workers: WorkerPool
) -> None:
    config = None if lora is None else pytest.importorskip("peft").LoraConfig(**lora)
    made, follower = workers.run(received_from_ranks, family, settings, kind, config, world_size=2)
    expected, received, (local_bytes,) = made
    assert follower is None and received.keys() == expected.keys() and len(received) > 10
    assert not any("base_layer" in name or "default" in name for name in received)
    assert all(torch.equal(received[name], weight) for name, weight in expected.items())
    assert local_bytes < 0.9 * sum(weight.nbytes for weight in expected.values()), "a rank holds shards alone"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"use_dora": True},
            r"cannot add DoRA \(use_dora=True\) to its base weights; hand merged weights over by VLLM",
        ),
        ({"rank_pattern": {"q_proj": 600}}, "cannot add adapters of rank 600, which is above 512, to its base"),
        ({"target_modules": ["embed_tokens"]}, "cannot add adapters of the embeddings model.embed_tokens to"),
        ({"modules_to_save": ["lm_head"]}, r"cannot add trained copies \(modules_to_save\) to its base"),
        ({"lora_bias": True}, "cannot add adapters with biases to its base"),
    ],
)
def test_adapters_that_vllm_does_not_have_are_refused_by_name_unless_they_are_merged(
    settings: dict[str, Any], message: str
) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    inject_adapters(peft.LoraConfig(**{"target_modules": ["q_proj"]} | settings), model)
    with pytest.raises(GenerationError, match=message):
        VLLMEngine(model)
    VLLMEngine(model, options=VLLMOptions(merge_adapters=True))


def test_merged_adapters_are_whole_weights_under_the_names_of_the_base() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    names = dict(model.named_parameters()).keys()
    inject_adapters(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False), model)
    base, layer = weights_of(model), model.get_submodule("model.layers.1.self_attn.q_proj")
    before = base["model.layers.1.self_attn.q_proj.weight"].clone()
    assert base.keys() == names
    with adapters_merged(model):
        merged = weights_of(model)["model.layers.1.self_attn.q_proj.weight"]
        assert not torch.equal(merged, before)
        torch.testing.assert_close(merged, before + layer.get_delta_weight("default"))


def test_settings_of_adapters_are_those_of_which_vllm_computes_scales() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    config = peft.LoraConfig(r=6, lora_alpha=3, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 20})
    inject_adapters(config, model)
    settings = adapter_settings(model)
    assert (settings["r"], settings["lora_alpha"], settings["rank_pattern"]) == (6, 3, {"v_proj": 20})
    assert max_rank(settings) == 32 and json.dumps(settings)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_weights_of_models_of_images_have_the_names_of_their_checkpoints(family: str, tmp_path: Path) -> None:
    model = tiny_vision_model(family)
    model.save_pretrained(tmp_path)
    saved, named = load_file(tmp_path / "model.safetensors"), weights_of(model)
    if family in ("llava", "llava_onevision", "gemma3"):  # vLLM has their towers in one more module
        assert not any("vision_tower." in name and "vision_tower.vision_model." not in name for name in named)
        named = {name.replace("vision_tower.vision_model.", "vision_tower."): weight for name, weight in named.items()}
        saved = {name.replace("vision_tower.vision_model.", "vision_tower."): weight for name, weight in saved.items()}
    assert saved.keys() <= named.keys()
    for name, weight in saved.items():
        assert torch.equal(named[name], weight), name
