"""Heads that are split over the vocabulary, or computed in tiles, give the results of one process.

No rank holds all logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_realloc import limits
from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.forward import tiled_logits
from lightning_realloc.runtime.forward.divergence import TeacherHead, TeacherTokens, vocabulary_divergence
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.packed_forward import predicting_logits, token_logprobs
from lightning_realloc.runtime.parallel.parallelize import parallelize
from lightning_realloc.runtime.parallel.shards import local_tensor
from tests.matrices import few_and_more
from tests.models import UNEVEN_HEADS
from tests.runtime.reference import Case, local_part
from tests.workers import WorkerPool

UNEVEN = {"vocab_size": 131}
CAPPED = {"final_logit_softcapping": 0.5, **UNEVEN}
CASES = {
    "uneven": Case("llama", "tp2@0-1", UNEVEN),
    "tied, double precision": Case("qwen2", "tp2@3,2", UNEVEN, dtype=torch.float64),
    "soft cap, tied": Case("gemma2", "tp2@0-1", CAPPED),
    "own name, all logits made": Case("gpt_neox", "tp4@0-3", UNEVEN),
    "sharded, checkpointing": Case("qwen3", "fsdp2.tp2@0-3", UNEVEN, checkpointing=True),
    "uneven attention heads": Case("llama", "tp2@0-1", UNEVEN_HEADS["9/3"]),
    "fewer key-value heads than ranks, tied": Case("qwen2", "tp4@0-3", UNEVEN_HEADS["14/2"]),
    "adapters on the head": Case("llama", "tp2@2-3", UNEVEN, lora_modules=("lm_head", "q_proj", "down_proj")),
}
SHARDED = {
    "tied": Case("qwen2", "fsdp4@0-3", UNEVEN),
    "replicas": Case("gemma", "dp2.fsdp2@0-3", UNEVEN),
    "own name, all logits made": Case("gpt_neox", "fsdp2@0-1", UNEVEN),
    "soft cap": Case("gemma2", "fsdp2@2-3", CAPPED),
    "adapters on the head": Case("llama", "fsdp2@0-1", UNEVEN, lora_modules=("lm_head", "q_proj")),
}
"""Cases whose heads only tiles keep from having all logits."""
SPLIT = {f"{name}, split": case for name, case in CASES.items()}
TILED = {**SPLIT, **SHARDED}
FEW = ("soft cap, tied, split", "sharded, checkpointing, split", "adapters on the head, split", "tied")
TILE_ROWS, HIDDEN_SIZE = 10, 64
WHOLE_HEAD = Case("llama", "tp2@0-1", UNEVEN, tp_plan={"lm_head": "replicate"})


class MostLogits(TorchDispatchMode):
    """Records the largest tensor with an entry for every token of the vocabulary, in both passes."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.num_rows = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            # Joining pads shares: 2 of 66 columns for 131 tokens.
            if isinstance(tensor, Tensor) and tensor.ndim and self.vocabulary <= tensor.shape[-1] < self.vocabulary + 4:
                num_rows = tensor.numel() // tensor.shape[-1]
                if num_rows != HIDDEN_SIZE:  # the head's weight, transposed
                    self.num_rows = max(self.num_rows, num_rows)
        return made


@contextmanager
def tiled_always(num_elements: int) -> Iterator[None]:
    """Compute more than ``num_elements`` logits in tiles, for a trained head, too."""
    with (
        mock.patch.object(limits, "TILE_ELEMENTS", num_elements),
        mock.patch.object(limits, "TILED_ROWS_PER_WIDTH", 0),
        mock.patch.object(tiled_logits, "TILE_ELEMENTS", num_elements),
    ):
        yield


def _pack() -> PackedBatch:
    generator = torch.Generator().manual_seed(3)

    def draw(*lengths: int) -> Ragged:
        return Ragged(torch.randint(0, 131, (sum(lengths),), generator=generator), torch.tensor(lengths))

    columns = {"prompt_ids": draw(3, 1, 5, 2), "response_ids": draw(6, 2, 9, 0)}
    columns["response_ids"].values[:4] = torch.tensor([0, 65, 66, 130])  # the ends of the shares of two ranks
    return pack(Samples(torch.arange(4), columns))


def _say(model: nn.Module, packed: PackedBatch, dtype: torch.dtype) -> list[Tensor]:
    """Return all statistics of a model's distributions, and accumulate the gradients of their sum."""
    said = token_logprobs(model, packed, temperature=0.7, with_entropy=True, with_collision=True, only_responses=True)
    assert said.entropy is not None and said.collision is not None
    weights = torch.linspace(-1, 2, packed.num_tokens)
    (weights * (said.logprobs + 0.3 * said.entropy)).sum().backward()
    with torch.no_grad():
        inferred = token_logprobs(model, packed).logprobs
    targets = packed.response_mask.nonzero().squeeze(1)
    generator = torch.Generator().manual_seed(4)
    states, head = (torch.randn(size, 8, generator=generator).to(dtype) for size in (len(targets), 131))
    teacher = TeacherTokens(states, TeacherHead(head))
    divergence = vocabulary_divergence(
        predicting_logits(model, packed, targets), teacher, divergence="js", temperature=0.7
    )  # fmt: skip
    divergence.sum().backward()
    return [said.logprobs, said.entropy, said.collision, inferred, divergence]


def _differences(cases: list[Case], tile_rows: int | None = None) -> list[tuple[list[str], int] | None]:
    """Return for every case of this rank the differences, and the number of rows with all logits."""
    meshes, rank = MeshRegistry("cpu"), dist.get_rank()
    meshes.create([Layout.parse(case.layout) for case in cases])
    packed, found = _pack(), []
    for case in cases:
        layout = Layout.parse(case.layout)
        if rank not in layout:
            found.append(None)
            continue
        whole, model = case.build(), case.build()
        model_layout = ModelLayout(describe_model(model, tp_plan=case.tp_plan), layout)
        parallelize(model, model_layout, meshes, tp_plan=case.tp_plan)
        expected = _say(whole, packed, case.dtype)
        columns = -(-131 // layout.dims.tp)
        tile_elements = tiled_logits.TILE_ELEMENTS if tile_rows is None else tile_rows * columns
        with tiled_always(tile_elements), MostLogits(131) as most:
            answers = _say(model, packed, case.dtype)
        tolerance = case.tolerance
        wrong = [
            str(index)
            for index, (answer, other) in enumerate(zip(answers, expected, strict=True))
            if not torch.allclose(answer, other, rtol=tolerance, atol=tolerance)
        ]
        for name, parameter in model.named_parameters():
            full = whole.get_parameter(name).grad
            if full is None:
                continue
            part = local_part(full, model_layout, name, rank)
            own = torch.zeros_like(part) if parameter.grad is None else local_tensor(parameter.grad)
            if not torch.allclose(own, part, rtol=0, atol=tolerance * float(full.abs().max())):
                wrong.append(name)
        found.append((wrong, most.num_rows))
    return found


FEW_WHOLE = (
    "own name, all logits made", "sharded, checkpointing", "uneven attention heads",
    "fewer key-value heads than ranks, tied",
)  # fmt: skip
"""Of the other cases, tiles below have the soft cap and the adapters."""


@few_and_more(FEW_WHOLE, [name for name in CASES if name not in FEW_WHOLE])
def test_statistics_equal_those_of_one_process_and_no_rank_has_all_logits(
    workers: WorkerPool, cases: list[str]
) -> None:
    for answers in workers.run(_differences, [CASES[name] for name in cases]):
        taken = {name: answer for name, answer in zip(cases, answers, strict=True) if answer is not None}
        assert taken == dict.fromkeys(taken, ([], 0))


@pytest.mark.exhaustive  # whole logits: above
@few_and_more(FEW, [name for name in TILED if name not in FEW])
def test_tiles_equal_whole_logits_of_one_process(workers: WorkerPool, cases: list[str]) -> None:
    for answers in workers.run(_differences, [TILED[name] for name in cases], TILE_ROWS):
        taken = {name: answer for name, answer in zip(cases, answers, strict=True) if answer is not None}
        assert [(name, wrong) for name, (wrong, _) in taken.items() if wrong] == []
        assert taken and all(num_rows <= TILE_ROWS for _, num_rows in taken.values())


def test_a_head_that_is_not_split_gives_all_logits_to_every_rank(workers: WorkerPool) -> None:
    for answers in workers.run(_differences, [WHOLE_HEAD], world_size=2):
        ((wrong, num_rows),) = answers
        assert wrong == [] and num_rows >= 24  # tokens that have a predecessor


def _nothing_to_predict() -> list[bool]:
    meshes, layout = MeshRegistry("cpu"), Layout.parse("tp2@0-1")
    meshes.create([layout])
    model = Case("llama", "tp2@0-1").build()
    parallelize(model, ModelLayout(describe_model(model), layout), meshes)
    columns = {"prompt_ids": Ragged.from_list([[5]]), "response_ids": Ragged.from_list([[]])}
    token_logprobs(model, pack(Samples(torch.tensor([0]), columns)), with_entropy=True).logprobs.sum().backward()
    return [parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters()]


def test_a_pack_without_predicted_tokens_still_reaches_every_parameter_of_a_rank(workers: WorkerPool) -> None:
    assert all(all(reached) for reached in workers.run(_nothing_to_predict, world_size=2))
