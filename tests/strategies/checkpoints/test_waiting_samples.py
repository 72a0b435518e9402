"""A rank reads the results of waiting batches that it needs, whatever run saved them, also of earlier versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples, samples_state
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import CheckpointError
from lightning_realloc.strategies.checkpoints.waiting_samples import (
    WAITING_BATCHES,
    encode_results,
    read_waiting,
    results_file,
)
from lightning_realloc.strategies.exchange.waiting_batches import WaitingBatches

PLAN = ExecutionPlan.from_mapping({"calls": {"actor.generate": "dp2.tp2@0-3", "actor.train": "fsdp4@0-3"}})
BATCH = {"batch": {}, "calls": ["actor.generate"], "version": 3}
IDS = {0: [0, 1], 1: [], 2: [2, 3], 3: []}
"""Rank -> ids of its responses: the first rank of each pair holds them."""


def _responses(ids: list[int]) -> Samples:
    tokens = Ragged.from_list([[7] * (sample_id + 1) for sample_id in ids])
    return Samples(torch.tensor(ids, dtype=torch.int64), {"response_ids": tokens, "prompt_id": torch.tensor(ids)})


def _write(folder: Path, ids: dict[int, list[int]]) -> dict[str, Any]:
    """Write the files of all ranks, and return the description."""
    for rank, own in ids.items():
        made = {"actor.generate": _responses(own)} if own else {}
        content = encode_results(WaitingBatches([BATCH, BATCH], [made, {}]))
        assert content is not None
        (folder / results_file(rank)).write_bytes(content)
    return {"world_size": len(ids), "plan": PLAN.to_mapping()}


def _read(
    folder: Path, description: dict[str, Any], rank: int, world_size: int = 4, plan: Any = PLAN
) -> list[list[int]]:
    facts: Any = SimpleNamespace(rank=rank, world_size=world_size)
    meta = {WAITING_BATCHES: [BATCH, BATCH]}
    waiting = read_waiting(folder, description, meta, plan=plan, facts=facts)
    assert list(waiting.batches) == [BATCH, BATCH]
    for results in waiting.results:
        for made in results.values():
            assert made.equals(_responses(made.ids.tolist()))
    return [sorted(results["actor.generate"].ids.tolist()) if results else [] for results in waiting.results]


def test_a_run_with_the_same_plan_reads_its_share(tmp_path: Path) -> None:
    description = _write(tmp_path, IDS)
    (tmp_path / results_file(3)).unlink()
    assert [_read(tmp_path, description, rank) for rank in (0, 1)] == [[[0, 1], []]] * 2
    with pytest.raises(CheckpointError, match="__3_waiting"):
        _read(tmp_path, description, 2)


@pytest.mark.parametrize("plan", [replace(PLAN, offload=("actor",)), None])
def test_another_run_reads_all(tmp_path: Path, plan: ExecutionPlan | None) -> None:
    description = _write(tmp_path, IDS)
    assert _read(tmp_path, description, 0, 4 if plan else 1, plan or PLAN) == [[0, 1, 2, 3], []]


def test_results_that_two_ranks_hold_are_read_once(tmp_path: Path) -> None:
    description = _write(tmp_path, {0: [0, 1], 1: [1, 0, 4], 2: [], 3: [4, 5]})
    assert _read(tmp_path, description, 0, 1) == [[0, 1, 4, 5], []]


def test_a_run_without_waiting_batches_has_no_files() -> None:
    assert encode_results(WaitingBatches()) is None


@pytest.mark.parametrize("key", ["waiting_batch", WAITING_BATCHES])
def test_checkpoints_of_earlier_versions_hold_all_results_in_one_file(tmp_path: Path, key: str) -> None:
    batch = BATCH | {"made": {"actor.generate": samples_state(_responses([4, 2]))}}
    facts: Any = SimpleNamespace(rank=1, world_size=4)
    meta = {key: batch if key == "waiting_batch" else [batch]}
    waiting = read_waiting(tmp_path, {}, meta, plan=PLAN, facts=facts)
    assert waiting.results[0]["actor.generate"].equals(_responses([4, 2]))
