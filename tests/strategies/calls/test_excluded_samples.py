"""The mean over tokens is over those that are learnt, in every layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.batch.shares import MicroBatch
from lightning_realloc.batch.training import Totals
from lightning_realloc.rewards import Failed
from lightning_realloc.strategies.calls.train_call import TrainCalls
from lightning_realloc.strategies.exchange.sample_table import PositionedRows
from tests.matrices import matrix
from tests.strategies import runs
from tests.workers import WorkerPool


def some_fail(completion_ids: list[list[int]], **columns: Any) -> list[float | Failed]:
    """Reward low tokens, and fail on some responses."""
    rewards = zip(runs.low_tokens(completion_ids), completion_ids, strict=True)
    return [Failed("no luck") if sum(ids) % 4 == 0 else reward for reward, ids in rewards]


some_fail.on_failure = "mask"  # type: ignore[attr-defined]


class Kept(runs.RecordedGRPO):
    """GRPO that keeps the mean loss that follows from advantages and lengths, while ratios are 1."""

    expected = 0.0

    def summarize(self, samples: Samples) -> Mapping[str, Tensor]:  # type: ignore[override]
        """Compute the loss sample by sample."""
        advantages = samples.tensor("advantages").tolist()
        lengths = samples.ragged("response_ids").lengths.tolist()
        learnt = [(a, n) for a, n in zip(advantages, lengths, strict=True) if a == a]
        assert 0 < len(learnt) < len(advantages), "some are learnt from, and some are not"
        self.expected = -sum(a * n for a, n in learnt) / sum(n for _, n in learnt)
        return super().summarize(samples)


def losses(layout: str) -> tuple[float, float]:
    """Return the logged loss of one step, and the expected one."""
    model = runs.tiny_model("llama")
    module = Kept(
        model, some_fail, sampling=runs.SAMPLING, tokenizer=runs.byte_tokenizer(), kl_coef=0.0, learning_rate=1e-2,
        learn_truncated=False, loss_average="token", advantages="group_mean",
    )  # fmt: skip
    plan = runs.calls(actor_generate="dp2", actor_train=layout)
    outcome = runs.train(module, plan, 2, runs.Batches(1), max_steps=1)
    return outcome.logged[0]["actor/loss"], module.expected


@pytest.mark.parametrize("layout", matrix(["dp2", "fsdp2", "tp2", "pp2"], "fsdp2", "pp2"))
def test_a_mean_over_tokens_leaves_out_samples_that_are_not_learnt(layout: str, workers: WorkerPool) -> None:
    for loss, expected in workers.run(losses, layout, world_size=2, init_process_group=False):
        assert abs(expected) > 1e-3
        assert loss == pytest.approx(expected, abs=1e-5)


def test_a_sample_that_is_repeated_to_stay_in_step_counts_once() -> None:
    # Positions 1, 4 and 6 have 2, 3 and 4 tokens, and 4 is not learnt. The rank repeats 1.
    columns = {
        "response_ids": Ragged.from_list([[5] * 2, [5] * 3, [5] * 4]),
        "advantages": torch.tensor([1.0, math.nan, -1.0]),
    }
    job: Any = SimpleNamespace(
        rows=PositionedRows(Samples(torch.arange(3), columns), np.array([1, 4, 6])),
        replica=SimpleNamespace(layout=None),
    )
    context = SimpleNamespace(
        algorithm=SimpleNamespace(excluded_by=("advantages",)),
        device=torch.device("cpu"),
        pool=SimpleNamespace(meshes=SimpleNamespace(batch_group=lambda layout: None)),
    )
    ours: Any = SimpleNamespace(_context=context)
    call: Any = SimpleNamespace(needs=("rollout", "advantages"))
    micro_batches = [MicroBatch((1, 4), True), MicroBatch((6,), True), MicroBatch((1,), False)]
    assert TrainCalls._without_excluded(ours, job, call, micro_batches, Totals(3, 9)).num_tokens == 6
