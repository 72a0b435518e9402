"""Ranks that divide the tokens of each row give the values, gradients and updates of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import ConfigError, LayoutError
from lightning_realloc.layout import Layout
from lightning_realloc.runtime.forward.token_group import TokenGroup
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.packed_forward import (
    packed_logits,
    predicting_states,
    sequence_scores,
    token_logprobs,
)
from lightning_realloc.runtime.parallel.parallelize import divide_tokens
from tests.matrices import few_and_more
from tests.models import tiny_model
from tests.runtime.reference import Case, Pair
from tests.workers import WorkerPool

PROMPT = (5, 6, 7, 8, 9)
PACKS = ((PROMPT, 3), (PROMPT, 1), ((11,), 6), ((12, 13), 5)), ((PROMPT, 2), (PROMPT, 2), ((11,), 9)), (((11,), 1),)
"""Prompts and response lengths of the packs of a step: rows of 23, 19 and 2 tokens, the first two with a shared prompt.
No row is a multiple of four, and the last one leaves two of four ranks without a token."""


def packs(num_shares: int) -> list[list[PackedBatch]]:
    """Return the packs of every share."""
    generator = torch.Generator().manual_seed(7)

    def one(rows: Sequence[tuple[Sequence[int], int]]) -> PackedBatch:
        responses = [torch.randint(3, 128, (size,), generator=generator) for _, size in rows]
        columns = {
            "prompt_ids": Ragged.from_list([list(prompt) for prompt, _ in rows]),
            "response_ids": Ragged.from_list(responses),
        }
        return pack(Samples(torch.arange(len(rows)), columns), share_prompts=True)

    return [[one(rows) for rows in PACKS] for _ in range(num_shares)]


def beside_the_reference(cases: list[Case]) -> dict[str, list[str]]:
    """Infer and train each case next to one process with the whole model; return the differences by case."""
    meshes = MeshRegistry("cpu")
    meshes.create([Layout.parse(case.layout) for case in cases])
    return {str(case): _Pair(case, meshes).run() for case in cases if dist.get_rank() in Layout.parse(case.layout)}


class _Pair(Pair):
    def run(self) -> list[str]:
        shares = packs(self.layout.data_parallel_size)
        mine = shares[self.layout.data_parallel_index(self.rank)]
        with torch.no_grad():
            got, expected = (self._read(model, mine[0]) for model in (self.model, self.whole))
        found = [d for name in expected for d in self.compare(name, got[name], expected[name])]
        averaged = self.layout.count(*self.layout.replica_axes, *self.layout.shard_axes)
        for index, batch in enumerate(mine):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(index == len(mine) - 1)
            (self._loss(self.model, batch) * averaged).backward()
        self.train_whole(lambda: sum(self._loss(self.whole, batch) for share in shares for batch in share))  # type: ignore[arg-type, return-value]
        return found + self.compare_gradients() + self.compare_updates()

    def _read(self, model: nn.Module, batch: PackedBatch) -> dict[str, Tensor]:
        """Return all values that a forward pass gives per token or per sequence."""
        if self.case.num_labels is not None:
            return {"scores": sequence_scores(model, batch)}
        said = token_logprobs(model, batch, with_entropy=True, with_collision=True)
        assert said.entropy is not None and said.collision is not None
        values = {"logprobs": said.logprobs, "entropy": said.entropy, "collision": said.collision}
        return values | {"logits": packed_logits(model, batch), "states": predicting_states(model, batch)}

    def _loss(self, model: nn.Module, batch: PackedBatch) -> Tensor:
        if self.case.num_labels is not None:
            return sequence_scores(model, batch).square().sum()
        said = token_logprobs(model, batch, temperature=0.7, with_entropy=True, only_responses=True)
        assert said.entropy is not None
        weights = torch.linspace(-1, 1, batch.num_tokens)
        return (weights * (said.logprobs + 0.3 * said.entropy)).sum() + packed_logits(model, batch).square().mean()


WINDOW = {"sliding_window": 4}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}


@few_and_more(
    [
        Case("qwen3", "fsdp2.cp2", checkpointing=True),
        Case("mixtral", "dp2.cp2@3,1,2,0"),
        Case("gemma", "cp2@1,2", num_labels=1),
        Case("gpt_oss", "cp4", overrides=TWO_HEADS, checkpointing=True),  # keys of rows, by two shares of the heads
        Case("gemma2", "cp2.tp2", overrides=UNEVEN),  # soft caps, a window, and keys of rows by all heads
    ],
    [
        Case("llama", "cp4"),
        Case("granite_swa", "cp2.tp2@1,0,3,2"),  # attention sinks, and a sliding window
        Case("gemma2", "cp2.tp2@1,0,3,2", overrides=WINDOW),
        Case("gpt_oss", "fsdp2.cp2", checkpointing=True),
        Case("gpt_oss", "cp4"),
        Case("mistral", "cp2.tp2", overrides={"sliding_window": 4}),
        Case("llama", "cp2.tp2", overrides={"num_attention_heads": 8, "num_key_value_heads": 2}),
        Case("llama", "dp2.cp2", overrides={"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}),
        Case("qwen2", "fsdp2.cp2", lora_modules=("q_proj", "down_proj")),
        Case("qwen3_moe", "cp4", lora_modules=("k_proj", "experts.gate_up_proj", "experts.down_proj")),
        Case("gpt2", "cp4"),
        Case("phi3", "cp2.tp2"),
        Case("gpt_neox", "fsdp2.cp2"),
        Case("qwen3_moe", "cp4"),
        Case("gemma2", "cp4"),
        Case("gpt_oss", "cp2.tp2@3,1,2,0"),
        Case("qwen3_moe", "cp4", overrides=TWO_HEADS),
        Case("llama", "cp4", overrides={"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}),
        Case("mistral", "cp4", overrides={"sliding_window": 3, **UNEVEN}),
        Case("qwen2", "cp2.tp2", overrides=TWO_HEADS, lora_modules=("q_proj", "down_proj")),
        Case("granite_swa", "cp2.tp2", overrides=UNEVEN),
        Case("phi3", "dp2.cp2", overrides={"num_attention_heads": 1, "num_key_value_heads": 1}),
        Case("gpt2", "fsdp2.cp2", overrides={"num_attention_heads": 1}),
    ],
)
def test_ranks_that_divide_rows_equal_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    answers = workers.run(beside_the_reference, cases, deadline_s=170.0)
    assert any(answers)
    for rank, differences in enumerate(answers):
        for case, found in differences.items():
            assert not found, f"rank {rank}, {case}: {found[:6]}"


def test_calls_and_models_that_need_whole_rows_are_refused() -> None:
    class OfTwo(TokenGroup):
        def __init__(self) -> None:
            self.size, self.index, self.head_shares, self._last = 2, 0, 2, None

    model, (batch, _, short) = tiny_model("llama"), packs(1)[0]
    divide_tokens(model, OfTwo())
    with pytest.raises(LayoutError, match=r"called on whole rows; call it by token_logprobs.*cp=1"):
        model(input_ids=batch.input_ids)
    with pytest.raises(ConfigError, match=r"further inputs \['pixels'\], and cp=2 divides token ids"):
        token_logprobs(model, replace(batch, extras={"pixels": torch.zeros(1)}))
    stretched = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model("llama", max_position_embeddings=1, rope_parameters=stretched)
    divide_tokens(model, OfTwo())
    with pytest.raises(ConfigError, match=r"cp=2 divides the row \(2 tokens\)"):
        token_logprobs(model, short)
