"""The mean over tokens is over those that are learnt, in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from lightning_realloc.batch.samples import Samples
from lightning_realloc.rewards import Failed
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
        learn_truncated=False, loss_average="token", normalize_by_std=False,
    )  # fmt: skip
    plan = runs.calls(actor_generate="dp2", actor_train=layout)
    outcome = runs.train(module, plan, 2, runs.Batches(1), max_steps=1)
    return outcome.logged[0]["actor/loss"], module.expected


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "pp2"])
def test_a_mean_over_tokens_leaves_out_samples_that_are_not_learnt(layout: str, workers: WorkerPool) -> None:
    for loss, expected in workers.run(losses, layout, world_size=2, init_process_group=False):
        assert abs(expected) > 1e-3
        assert loss == pytest.approx(expected, abs=1e-5)
