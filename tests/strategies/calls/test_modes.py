"""Dropout is active only in training calls, regardless of the mode that Lightning sets."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_realloc import SFT, infer, train
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.training import Loss, Totals
from lightning_realloc.layout import Layout
from lightning_realloc.strategies.calls.train_call import TrainCalls
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


@pytest.mark.parametrize("text", ["pp2.dp2.tp2", "dp2.fsdp2.tp2", "pp2.fsdp3", "pp2.dp2.fsdp2.tp2"])
def test_ranks_draw_equal_dropout_masks_if_they_work_on_the_same_activations(text: str) -> None:
    layout, masks = Layout.parse(text), {}
    for rank in layout.ranks:
        context = SimpleNamespace(rank=rank, algorithm=SimpleNamespace(seed=1), device=torch.device("cpu"))
        calls: Any = SimpleNamespace(_context=context, _hooks=SimpleNamespace(iteration=5))
        replica: Any = SimpleNamespace(layout=layout)
        with TrainCalls._dropout_masks(calls, replica):
            masks[rank] = torch.rand(()).item()
    for rank, mask in masks.items():
        assert [other for other in masks if masks[other] == mask] == list(layout.group(rank, "tp"))
