from __future__ import annotations

import pytest

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.parallel.model_spec import describe_model
from tests.matrices import few_and_more
from tests.models import TIED_FAMILIES, tiny_model
from tests.runtime.parallel.pipeline_cases import Case, move_weights_between_layouts, pipeline_beside_the_reference
from tests.workers import WorkerPool

TIED = {"tie_word_embeddings": True}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "gpt_neox", "gpt2")


def _assert_equal_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    for rank, answer in enumerate(workers.run(pipeline_beside_the_reference, cases, deadline_s=340.0)):
        for case, found in answer.items():
            assert not found, f"rank {rank}, {case}: {found[:6]}"


@few_and_more(
    [
        Case("qwen2", "pp2.vpp2.fsdp2@3,1,2,0", TIED, num_layers=4, checkpointing=True, num_micro_batches=5),
        Case("qwen3", "pp3.vpp2@0,2,3", num_layers=6, lora_modules=("q_proj", "down_proj"), num_micro_batches=4),
    ],
    [
        *(Case("qwen2", f"pp2.vpp3.{axis}2", TIED, num_layers=6) for axis in ("dp", "fsdp", "cp", "tp")),
        Case("mixtral", "pp2.vpp2.fsdp2.ep2", num_layers=4, checkpointing=True, num_micro_batches=4),
        Case("llama", "pp2.vpp2.fsdp2", num_layers=4, token_classifier=True, num_micro_batches=4),
        Case("qwen2", "pp2.vpp2.cp2", TIED, num_layers=4, lora_modules=("q_proj", "down_proj")),
        Case("mixtral", "pp2.vpp2.cp2", num_layers=4, lora_modules=("v_proj", "experts.down_proj")),
        *(Case("llama", "pp4.vpp2", num_layers=8, num_micro_batches=count) for count in (1, 5)),
    ],
)
def test_interleaved_stages_equal_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    _assert_equal_one_process(workers, cases)


@few_and_more(
    [Case("llama", "pp2.vpp2.tp2", num_layers=5, schedule="zero_bubble")],
    [
        Case("qwen2", "pp2.vpp2.fsdp2", TIED, num_layers=5, num_micro_batches=4, schedule="zero_bubble"),
        Case("qwen2", "pp2.vpp2.cp2", TIED, num_layers=5, num_micro_batches=1, schedule="zero_bubble"),
        Case("mixtral", "pp2.vpp2.dp2.ep2", num_layers=4, schedule="zero_bubble"),
        Case("llama", "pp4.vpp2", num_layers=9, num_micro_batches=5, schedule="zero_bubble", checkpointing=True),
        Case("llama", "pp2.vpp2@0-1", num_layers=4, tile_rows=2),
    ],
)
def test_interleaved_stages_with_waiting_gradients_equal_one_process(workers: WorkerPool, cases: list[Case]) -> None:
    _assert_equal_one_process(workers, cases)


@pytest.mark.exhaustive
def test_interleaved_stages_of_every_family_equal_one_process(workers: WorkerPool) -> None:
    tied = {family: TIED if family in TIED_FAMILIES else {} for family in FAMILIES}
    cases = [Case(family, "pp2.vpp2@0-1", overrides, num_layers=4) for family, overrides in tied.items()]
    _assert_equal_one_process(workers, cases)


def test_weights_move_between_interleaved_stages_and_other_layouts_bit_for_bit(workers: WorkerPool) -> None:
    pairs = [
        ("pp2.vpp2@0-1", "dp2@0-1"),
        ("pp2.vpp2.fsdp2", "pp4"),
        ("pp2.vpp2.cp2", "cp4@3,1,2,0"),
        ("pp2.vpp2@3,1", "pp2.tp2"),
    ]

    assert workers.run(move_weights_between_layouts, "qwen2", pairs) == [[]] * 4


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("pp2.vpp3", r"pp=2 with vpp=3 needs pp\*vpp=6 blocks but the model has 5; use vpp of at most 2"),
        ("pp4.vpp2", r"pp\*vpp=8 blocks but the model has 5; leave vpp out"),
        ("vpp2.fsdp2", "vpp=2 is the number of runs of blocks of each pipeline stage, and pp=1 has one stage"),
    ],
)
def test_runs_without_blocks_or_stages_are_refused(layout: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ModelLayout(describe_model(tiny_model("llama", num_hidden_layers=5)), Layout.parse(layout))
