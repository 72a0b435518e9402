"""Optimizers that cannot run on parts of weights, without a closure or on dense gradients are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from examples.muon import MuonAndAdamW
from lightning_realloc.errors import ConfigError
from lightning_realloc.layout import (
    Layout,
    ModelLayout,
    ModelSpec,
    ParamSpec,
    TensorParallelCut,
    sharded,
    sharded_experts,
)
from lightning_realloc.strategies.checkpoints.optimizer_settings import record_given
from lightning_realloc.strategies.lightning.optimizer_checks import check_optimizers


class TrustRatio(optim.Optimizer):
    """Scales each weight's gradient by the weight's norm over the gradient's, as LAMB and LARS do."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(group["lr"] * weight.norm() / weight.grad.norm() * weight.grad)


class GlobalNorm(TrustRatio):
    """Divides by the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            norm = torch.stack([weight.grad.norm() for weight in group["params"]]).norm()
            for weight in group["params"]:
                weight.sub_(group["lr"] / norm * weight.grad)


class Signs(TrustRatio):
    """Looks at every element alone, as Lion does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(group["lr"] * weight.grad.sign())


class NeedsNames(TrustRatio):
    """Cannot step on other weights than its own."""

    def step(self, closure: Any = None) -> None:
        """Fail."""
        raise KeyError("model.embed_tokens.weight")


def _layouts(text: str, *, experts: bool = False) -> dict[str, ModelLayout]:
    """Return the actor's layout, with a weight that tensor parallelism cuts by columns and one by rows, or experts."""
    kinds = (sharded_experts(),) if experts else (sharded(TensorParallelCut(0)), sharded(TensorParallelCut(1)))
    params = (ParamSpec(f"w{index}", (4, 4), cuts, block=index) for index, cuts in enumerate(kinds))
    refusal = None if experts else "it has no experts"
    return {
        "actor": ModelLayout(ModelSpec(tuple(params), num_blocks=len(kinds), ep_refusal=refusal), Layout.parse(text))
    }


def _refused(kind: Any, layout: str, *, experts: bool = False) -> str:
    """Return the axes that a refusal says to leave out; empty without one."""
    optimizer = kind([nn.Parameter(torch.randn(4, 4))], lr=0.1)
    LambdaLR(optimizer, lambda step: step / 10)  # wraps the step of this instance, and starts at a rate of 0
    record_given([optimizer])
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a user's hook runs on a probe"))
    try:
        check_optimizers({"actor": optimizer}, _layouts(layout, experts=experts))
    except ConfigError as error:
        assert f"actor: {kind.__name__} updates an element by other elements, too" in str(error)
        assert not optimizer.state
        named, _, legal = str(error).partition("in a layout with ")[2].partition(", such as ")
        assert legal.startswith(f"dp{Layout.parse(layout).dims.size}, or use an elementwise")
        return named
    return ""


def test_optimizers_that_are_not_elementwise_are_refused_in_layouts_that_cut_weights() -> None:
    layouts = ("dp2", "fsdp2", "tp2", "pp2", "pp2.fsdp2.tp2")
    assert [_refused(optim.Muon, layout) for layout in layouts] == ["", "fsdp=1", "tp=1", "", "fsdp=1, tp=1"]
    assert _refused(optim.Muon, "fsdp2.cp2") == "cp=1, fsdp=1"
    assert [_refused(optim.Muon, layout, experts=True) for layout in ("dp2.ep2", "dp2")] == ["ep=1", ""]
    for kind in (optim.Adafactor, TrustRatio):  # norms of rows and columns, and of whole weights
        assert [_refused(kind, layout) for layout in layouts[1:]] == ["fsdp=1", "tp=1", "", "fsdp=1, tp=1"]
    assert [_refused(GlobalNorm, layout) for layout in layouts[2:]] == ["tp=1", "pp=1", "fsdp=1, tp=1, pp=1"]
    for kind in (optim.AdamW, optim.SGD, type("Mine", (optim.Adam,), {}), Signs):
        assert not any(_refused(kind, layout) for layout in layouts)


def test_a_group_is_checked_for_the_cuts_of_its_own_weights() -> None:
    attention, experts = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    params = (ParamSpec("attention", (4, 4), block=0), ParamSpec("experts", (4, 4), sharded_experts(), block=0))
    names = {"actor": {id(attention): "attention", id(experts): "experts"}}

    def check(optimizer: optim.Optimizer, layout: str) -> None:
        layouts = {"actor": ModelLayout(ModelSpec(params, num_blocks=1, ep_refusal=None), Layout.parse(layout))}
        check_optimizers({"actor": optimizer}, layouts, names)

    check(optim.Muon([attention]), "dp2.ep2")  # whole on every rank
    check(MuonAndAdamW([{"params": [attention]}, {"params": [experts]}]), "dp2.ep2")
    for parameter in (experts, nn.Parameter(torch.randn(4, 4))):  # divided, unknown
        with pytest.raises(ConfigError, match="train actor in a layout with ep=1"):
            check(optim.Muon([parameter]), "dp2.ep2")


def test_optimizers_that_need_a_closure_or_sparse_gradients_are_refused_in_every_layout() -> None:
    weights, layouts = [nn.Parameter(torch.randn(4, 4))], _layouts("dp1")
    with pytest.raises(ConfigError, match=r"actor: LBFGS computes the loss anew inside a step, .* such as AdamW"):
        check_optimizers({"actor": optim.LBFGS(weights)}, layouts)
    with pytest.raises(ConfigError, match=r"actor: SparseAdam needs sparse gradients, .*; use Adam"):
        check_optimizers({"actor": optim.SparseAdam(weights)}, layouts)


def test_an_optimizer_that_cannot_be_tried_warns_where_weights_are_cut() -> None:
    weights = [nn.Parameter(torch.randn(4, 4))]
    for optimizer in (NeedsNames(weights), Signs(weights, lr=0.0)):
        check_optimizers({"actor": optimizer}, _layouts("dp2"))
        tried = f"whether {type(optimizer).__name__} updates every element on its own could not be tried"
        with pytest.warns(UserWarning, match=tried):
            check_optimizers({"actor": optimizer}, _layouts("fsdp2"))
