"""Ranks that share a model generate the same tokens as one rank alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams, Speculation
from lightning_realloc.generation.forward.packed_linear import packed_linears
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from tests.generation.forward.test_packed_linear import require_packing
from tests.generation.test_engine import reference_greedy
from tests.matrices import matrix
from tests.models import UNEVEN_HEADS, tiny_model
from tests.workers import WorkerPool

PROMPTS = [[5, 9, 17, 3], [8] * 11, [40], [7, 7, 90, 4, 4, 4], [101, 33]]
PARAMS = SamplingParams(max_new_tokens=12, n=2, seed=11)
FEW_GREEDY = SamplingParams(max_new_tokens=10, temperature=0)


def _generate(family: str, text: str) -> list[Completion]:
    """Return this rank's completions; data-parallel ranks get prompts in turn, and the last of four gets none."""
    layout = Layout.parse(text, world_size=dist.get_world_size())
    meshes = MeshRegistry("cpu")
    meshes.create([layout])
    model = tiny_model(family)
    model = parallelize(model, ModelLayout(describe_model(model), layout), meshes)
    group = meshes.group(layout, "dp", "fsdp")

    def anybody_has_work(has_work: bool) -> bool:
        flag = torch.tensor([float(has_work)])
        dist.all_reduce(flag, group=group)
        return bool(flag.item() > 0)

    engine = GenerationEngine(model, max_slots=3, lockstep=None if group is None else anybody_has_work)
    index, size = layout.data_parallel_index(dist.get_rank()), min(layout.data_parallel_size, 3)
    mine = [i for i in range(len(PROMPTS)) if i % size == index]
    ids = [2 * i + k for i in mine for k in range(2)]
    return engine.generate([PROMPTS[i] for i in mine], PARAMS, sample_ids=ids)


@cache
def _alone(family: str) -> dict[int, tuple[int, ...]]:
    completions = GenerationEngine(tiny_model(family)).generate(PROMPTS, PARAMS)
    return {completion.sample_id: completion.token_ids for completion in completions}


@pytest.mark.parametrize(
    ("family", "layout"),
    matrix(
        [("llama", "tp2"), ("qwen2", "tp4"), ("gpt_neox", "tp2"), ("deepseek_v3", "tp2")],
        ("qwen2", "tp4"),
        ("gpt_neox", "tp2"),
        ("deepseek_v3", "tp2"),
    ),
)
def test_tensor_parallel_ranks_agree_bitwise_and_draw_the_tokens_of_one_rank(
    workers: WorkerPool, family: str, layout: str
) -> None:
    # qwen2 has two key-value heads: four ranks hold each of them twice.
    results = workers.run(_generate, family, layout, world_size=int(layout[2:]))
    assert all(result == results[0] for result in results)
    assert {completion.sample_id: completion.token_ids for completion in results[0]} == _alone(family)


Uneven = tuple[tuple[str, str, str], ...]
UNEVEN_CASES: Uneven = (("llama", "tp3@1-3", "9/3"), ("qwen2", "tp4@0-3", "14/2"), ("gpt_neox", "tp2@2-3", "5/5"))
MORE_UNEVEN_CASES: Uneven = (
    ("llama", "tp2@0-1", "9/3"), ("qwen3", "tp4@0-3", "6/2"), ("qwen3", "tp3@0-2", "14/2"),
)  # fmt: skip
BOUND = 20_000


def _greedy_with_uneven_heads(
    cases: Uneven, max_cache_bytes: int | None
) -> list[tuple[list[tuple[int, ...]], int] | None]:
    """Return this rank's greedy tokens in each case, and preemptions; None outside of its layout."""
    meshes, found = MeshRegistry("cpu"), []
    meshes.create([Layout.parse(text) for _, text, _ in cases])
    for family, text, heads in cases:
        layout = Layout.parse(text)
        if dist.get_rank() not in layout:
            found.append(None)
            continue
        model = tiny_model(family, **UNEVEN_HEADS[heads])
        model = parallelize(model, ModelLayout(describe_model(model), layout), meshes)
        engine = GenerationEngine(model, max_slots=3, max_cache_bytes=max_cache_bytes)
        tokens = [completion.token_ids for completion in engine.generate(PROMPTS, FEW_GREEDY)]
        found.append((tokens, engine.stats.num_preemptions))
    return found


@pytest.mark.parametrize(
    ("cases", "max_cache_bytes"),
    matrix(itertools.product([UNEVEN_CASES, MORE_UNEVEN_CASES], [None, BOUND]), (UNEVEN_CASES, BOUND)),
)
def test_ranks_with_different_numbers_of_heads_generate_the_tokens_of_transformers(
    workers: WorkerPool, cases: Uneven, max_cache_bytes: int | None
) -> None:
    results = workers.run(_greedy_with_uneven_heads, cases, max_cache_bytes)
    for case, (family, text, heads) in enumerate(cases):
        model = tiny_model(family, **UNEVEN_HEADS[heads])
        expected = [tuple(reference_greedy(model, prompt, max_new_tokens=10)) for prompt in PROMPTS]
        answers = [result[case] for result in results if result[case] is not None]
        assert len(answers) == Layout.parse(text).dims.size
        assert all(tokens == expected for tokens, _ in answers)
        assert len({preemptions for _, preemptions in answers}) == 1


def _generate_packed(family: str) -> tuple[int, list[list[Completion]]]:
    """Return the number of layers with packed weights, and the completions before and after a change of weights."""
    layout = Layout.parse(f"tp{dist.get_world_size()}", world_size=dist.get_world_size())
    meshes = MeshRegistry("cpu")
    meshes.create([layout])
    model = tiny_model(family).to(torch.bfloat16)
    model = parallelize(model, ModelLayout(describe_model(model), layout), meshes)
    with packed_linears(model, num_steps=40):
        num_packed = sum("forward" in vars(module) for module in model.modules())
    engine, params = GenerationEngine(model, max_slots=3), SamplingParams(max_new_tokens=40, ignore_eos=True)
    made = []
    for _ in range(2):
        made.append(engine.generate(PROMPTS, params))
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
    return num_packed, made


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tensor_parallel_ranks_pack_their_shards_of_the_current_weights(workers: WorkerPool, family: str) -> None:
    require_packing(torch.bfloat16)
    (num_packed, made), other = workers.run(_generate_packed, family, world_size=2)
    assert (num_packed, made) == other
    # Queries, keys, values, gate and up in each of two blocks. Layers that sum over ranks and the head are not packed.
    assert num_packed == 10
    for scale, completions in zip((1.0, 0.9), made, strict=True):
        model = tiny_model(family)
        for parameter in model.parameters():
            parameter.data.mul_(scale)
        for completion in completions:
            assert completion.logprobs == pytest.approx(_logprobs(model, completion), abs=0.05)


def _logprobs(model: nn.Module, completion: Completion) -> list[float]:
    prompt = PROMPTS[completion.prompt_index]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion.token_ids]]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
    tokens = torch.tensor(completion.token_ids)[:, None]
    return list(logits.log_softmax(-1).gather(1, tokens)[:, 0].tolist())


def _generate_by_own_clocks() -> list[list[Completion]]:
    """Return the completions of a tensor-parallel rank whose own clock advances at random."""
    layout = Layout.parse("tp2", world_size=2)
    meshes = MeshRegistry("cpu")
    meshes.create([layout])
    model = tiny_model("llama")
    model = parallelize(model, ModelLayout(describe_model(model), layout), meshes)
    group, rng = meshes.group(layout, "tp"), random.Random(dist.get_rank())
    ticks = itertools.accumulate(rng.uniform(0.0, 1.0) for _ in range(10**6))

    def first_ones(numbers: Sequence[float]) -> list[float]:
        agreed = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(agreed, group=group, group_src=0)
        return list(agreed.tolist())

    engine = GenerationEngine(
        model, max_slots=6, speculation=Speculation(), agree=first_ones, clock=lambda: next(ticks)
    )
    params = SamplingParams(max_new_tokens=30, n=2, temperature=0.3, ignore_eos=True)
    return [engine.generate(PROMPTS, params, sample_ids=range(10)) for _ in range(4)]


def test_tensor_parallel_ranks_with_different_clocks_generate_the_same(workers: WorkerPool) -> None:
    first, second = workers.run(_generate_by_own_clocks, world_size=2)
    assert first == second


@pytest.mark.parametrize(
    ("family", "layout"),
    matrix(
        [("llama", "fsdp4"), ("llama", "fsdp2.tp2"), ("deepseek_v3", "fsdp2.tp2")],
        ("llama", "fsdp2.tp2"),
        ("deepseek_v3", "fsdp2.tp2"),
    ),
)
def test_sharded_ranks_with_unequal_work_draw_the_tokens_of_one_rank(
    workers: WorkerPool, family: str, layout: str
) -> None:
    results = workers.run(_generate, family, layout, world_size=4)
    drawn = {completion.sample_id: completion.token_ids for result in results for completion in result}
    assert drawn == _alone(family)
    if layout == "fsdp4":
        assert results[3] == []
