from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from lightning_realloc.runtime.parallel.shards import bind_tensors, weightless_copy
from lightning_realloc.runtime.parallel.tensor_parallel import install_tensor_parallel
from lightning_realloc.runtime.transfer.collectives import SharedMemoryAllReduce
from tests.matrices import few_and_more
from tests.models import tiny_model
from tests.runtime.reference import local_part
from tests.workers import WorkerPool

PROMPTS = torch.tensor([[5, 9, 70, 100, 33, 7], [64, 32, 96, 11, 12, 13]])


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_a_weightless_copy_has_shapes_and_buffers_but_no_weights(family: str) -> None:
    model = tiny_model(family).train()

    weightless = weightless_copy(model)

    assert all(parameter.is_meta and not parameter.requires_grad for parameter in weightless.parameters())
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert describe_model(weightless) == describe_model(model)
    assert not weightless.training
    assert model.training
    for name, buffer in weightless.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name))
        assert buffer.data_ptr() != model.get_buffer(name).data_ptr()


def _greedy(model: Any, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(PROMPTS)
    return model.generate(
        PROMPTS, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, **options
    )


def _generate_in_another_layout(families: list[str]) -> dict[str, bool]:
    """Generate on a weightless copy under tp4 while the model itself is sharded, with and without the fast sum."""
    meshes, rank = MeshRegistry("cpu"), dist.get_rank()
    train, generate = Layout.parse("fsdp4@0-3"), Layout.parse("tp4@1,0,3,2")
    meshes.create([train, generate])
    group = meshes.group(generate, "tp")
    assert group is not None
    quick_sum = SharedMemoryAllReduce.create(group)
    facts: dict[str, bool] = {}
    for family in families:
        whole, model = tiny_model(family), tiny_model(family)
        weightless, spec = weightless_copy(model), describe_model(model)
        parallelize(model, ModelLayout(spec, train), meshes)
        tensor_parallel = install_tensor_parallel(weightless, generate, group, rank)
        target = ModelLayout(spec, generate)
        weights = {n: local_part(p.detach(), target, n, rank) for n, p in whole.named_parameters()}
        bind_tensors(weightless, weights)
        expected = _greedy(whole)
        with torch.no_grad():
            logits = whole(PROMPTS).logits
            facts[f"{family} logits"] = torch.allclose(weightless(PROMPTS).logits, logits, atol=2e-5)
            facts[f"{family} tokens"] = torch.equal(_greedy(weightless), expected)
            facts[f"{family} static cache"] = torch.equal(_greedy(weightless, cache_implementation="static"), expected)
            tensor_parallel.inference_sum = quick_sum
            facts[f"{family} quick sum"] = torch.equal(_greedy(weightless), expected)
    return facts


@few_and_more(["gemma", "gpt_neox"], ["qwen3", "phi3"])
def test_a_weightless_copy_generates_the_same_tokens_in_another_layout(workers: WorkerPool, cases: list[str]) -> None:
    for facts in workers.run(_generate_in_another_layout, cases):
        assert len(facts) == 4 * len(cases)
        assert all(facts.values()), facts


def _weightless_copy_of_a_laid_out_model(layout_text: str) -> str:
    meshes, layout, model = MeshRegistry("cpu"), Layout.parse(layout_text), tiny_model("llama")
    meshes.create([layout])
    parallelize(model, ModelLayout(describe_model(model), layout), meshes)
    with pytest.raises(LayoutError) as error:
        weightless_copy(model)
    return str(error.value)


@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_a_weightless_copy_is_taken_before_the_model_is_laid_out(workers: WorkerPool, layout: str) -> None:
    messages = workers.run(_weightless_copy_of_a_laid_out_model, layout, world_size=2)

    assert all("call weightless_copy before parallelize" in message for message in messages)
