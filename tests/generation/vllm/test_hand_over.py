"""Weights on their way to vLLM: chunks, names, shared memory as the other process reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.vllm.child import weights_in
from lightning_realloc.generation.vllm.hand_over import SharedMemoryHandOver, plan_chunks, weights_of, write_weights
from tests.models import tiny_model
from tests.vision_models import VISION_FAMILIES, tiny_vision_model


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
        for description in channel.chunks(model):
            received |= dict(weights_in(Chunk(**description), torch.device("cpu")))
            num_chunks += 1
        assert num_chunks > 3
        expected = dict(model.named_parameters())
        assert received.keys() == expected.keys(), "a tied output layer travels once"
        assert all(torch.equal(received[name], weight) for name, weight in expected.items())


def test_memory_with_another_token_is_not_read() -> None:
    channel = SharedMemoryHandOver()
    description = next(channel.chunks(tiny_model("llama")))
    with pytest.raises(ValueError, match="is not the memory that was announced"):
        weights_in(Chunk(**description | {"token": "00" * 16}), torch.device("cpu"))


def test_a_folder_of_weights_holds_each_once_under_its_own_name(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    write_weights(model, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(written[name], weight) for name, weight in model.named_parameters())
    assert (tmp_path / "config.json").exists()


def test_adapters_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(GenerationError, match=r"q_proj has adapters; train whole weights, or use engine='native'"):
        weights_of(model)


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
