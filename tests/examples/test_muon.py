"""The optimizer of Muon and AdamW does what both do alone, and learns the same where experts are divided."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.optim import AdamW, Muon

from examples.muon import MuonAndAdamW
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerPool


def test_matrices_of_blocks_step_by_muon_and_all_others_by_adamw() -> None:
    module = runs.sft(
        optimizer=partial(MuonAndAdamW, lr=0.01), weight_decay=0.1, no_decay=("norms", "biases", "embeddings")
    )
    model = module.actor = tiny_model("llama")
    (entry,) = module.configure_optimizers()
    weights = dict(model.named_parameters())
    matrices = [name for name, weight in weights.items() if weight.ndim == 2 and "embed" not in name]
    before = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    others = [name for name in weights if name not in matrices]
    muon = Muon([before[name] for name in matrices], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW([before[name] for name in others], lr=0.01, weight_decay=0.0)
    for step in range(2):
        for name, weight in weights.items():
            generator = torch.Generator().manual_seed(step)
            weight.grad = torch.randn(weight.shape, generator=generator)
            before[name].grad = weight.grad.clone()
        for optimizer in (entry["optimizer"], muon, adamw):
            optimizer.step()
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    assert {name for name, weight in weights.items() if "momentum_buffer" in entry["optimizer"].state[weight]} == set(
        matrices
    )


def _train(layouts: list[str]) -> list[Outcome]:
    """Train a mixture of experts in each layout."""
    optimizer = partial(MuonAndAdamW, lr=0.01)
    plans = [runs.calls(actor_train=layout, actor_infer="dp2") for layout in layouts]
    modules = [runs.sft(actor=tiny_model("qwen3_moe"), optimizer=optimizer) for _ in plans]
    return [runs.train(one, plan, 2, Batches(1, responses=True)) for one, plan in zip(modules, plans, strict=True)]


def test_it_trains_where_experts_are_divided_as_where_they_are_whole(workers: WorkerPool) -> None:
    whole, divided = workers.run(_train, ["dp2", "dp2.ep2"], world_size=2, init_process_group=False)[0]
    assert runs.largest_difference(divided.weights, whole.weights) < 1e-4
    assert runs.largest_difference(divided.weights, dict(tiny_model("qwen3_moe").named_parameters())) > 1e-3
