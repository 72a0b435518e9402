"""Dropout is active only in training calls, regardless of the mode that Lightning sets."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from lightning_realloc import SFT, infer, train
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.training import Loss, Totals
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, calls
from tests.workers import WorkerPool


class ScoredSFT(SFT):
    """SFT that also scores every batch before it trains on it, in the same layout."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(tiny_model("llama"), tokenizer=byte_tokenizer(), **settings)
        self.modes: list[str] = []

    @infer("actor", needs="batch", produces="logprobs")
    def score(self, actor: nn.Module, batch: PackedBatch) -> Tensor:
        """Record the mode."""
        self.modes.append("training" if actor.training else "evaluation")
        return super().score(actor, batch)

    @train("actor", needs=("batch", "logprobs"))
    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Record the mode."""
        self.modes.append("training" if actor.training else "evaluation")
        return super().actor_loss(actor, batch, totals)


def run_scored(batches: Batches) -> tuple[list[str], list[str]]:
    """Return the modes of the calls in two iterations, and the warnings about modes."""
    module = ScoredSFT()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.train(module, calls(actor_train="dp1", actor_infer="dp1"), runs.world_size(), batches)
    return module.modes, [str(warning.message) for warning in caught if "eval mode" in str(warning.message)]


def test_only_training_calls_run_in_training_mode(workers: WorkerPool) -> None:
    ((modes, warned),) = workers.run(run_scored, Batches(2, responses=True), world_size=1, init_process_group=False)
    assert modes == ["evaluation", "training"] * 2
    assert warned == []
