from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import TENSOR_PARALLEL_FAMILIES
from tests.runtime.reference import Case, train_beside_the_reference
from tests.workers import WorkerPool


def _assert_all_equal(answers: list[dict[str, list[str]]]) -> None:
    for rank, differences in enumerate(answers):
        for case, found in differences.items():
            assert not found, f"rank {rank}, {case}: {found[:6]}"


@pytest.mark.parametrize("layout", ["tp2@0-1", "tp4@0-3", "fsdp2.tp2@0-3"])
def test_training_under_tensor_parallelism_equals_one_process(workers: WorkerPool, layout: str) -> None:
    cases = [Case(family, layout) for family in TENSOR_PARALLEL_FAMILIES]

    _assert_all_equal(workers.run(train_beside_the_reference, cases))
