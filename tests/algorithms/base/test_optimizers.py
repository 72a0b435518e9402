"""Optimizers of roles: settings per role over common ones, and the weights that decay."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Muon, SparseAdam
from torch.optim.lr_scheduler import StepLR

from lightning_realloc.algorithms.base.optimizers import RoleOptimizer, parameters_of
from lightning_realloc.errors import ConfigError
from tests.models import tiny_model
from tests.strategies import runs


def entries(module: Any) -> dict[str, dict[str, Any]]:
    """Return role -> its entry of ``configure_optimizers``."""
    module.configure_model()
    return {entry["optimizer"].param_groups[0]["name"]: entry for entry in module.configure_optimizers()}


def test_each_role_may_have_its_own_optimizer_rate_and_schedule() -> None:
    own = RoleOptimizer(optimizer=partial(SGD, lr=0.5), lr_scheduler=partial(StepLR, step_size=3))
    found = entries(runs.ppo(learning_rate=0.25, optimizers={"critic": own}))
    assert type(found["actor"]["optimizer"]) is AdamW and found["actor"]["optimizer"].defaults["lr"] == 0.25
    assert type(found["critic"]["optimizer"]) is SGD and found["critic"]["optimizer"].defaults["lr"] == 0.5
    assert "lr_scheduler" not in found["actor"]
    assert found["critic"]["lr_scheduler"]["scheduler"].step_size == 3
    # A rate alone keeps the common optimizer, and a schedule starts from that rate.
    found = entries(runs.ppo(optimizer=partial(SGD, lr=0.5), lr_scheduler=partial(StepLR, step_size=1, gamma=0.1),
                             optimizers={"critic": RoleOptimizer(learning_rate=0.125)}))  # fmt: skip
    for role, rate in (("actor", 0.5), ("critic", 0.125)):
        optimizer = found[role]["optimizer"]
        assert type(optimizer) is SGD and optimizer.param_groups[0]["lr"] == rate
        optimizer.step()
        found[role]["lr_scheduler"]["scheduler"].step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / 10)


def test_weights_without_decay_are_chosen_by_kind() -> None:
    model = tiny_model("qwen2")  # norms without biases, projections with some, a head tied to the embeddings
    weights = dict(model.named_parameters())

    def names(*kinds: Any) -> set[str]:
        ids = {id(parameter) for parameter in parameters_of(model, kinds)}
        return {name for name, parameter in weights.items() if id(parameter) in ids}

    assert names("embeddings") == {"model.embed_tokens.weight"}
    assert names("norms") == {name for name in weights if "norm" in name}
    assert names("biases") == {name for name in weights if name.endswith("bias")}
    assert len(names("norms")) == 5 and len(names("biases")) == 6

    module = runs.sft(actor=model, learning_rate=0.5, weight_decay=0.1)
    optimizer = entries(module)["actor"]["optimizer"]
    decaying, others = optimizer.param_groups
    assert (decaying["name"], decaying["weight_decay"]) == ("actor", 0.1)
    assert (others["name"], others["weight_decay"]) == ("actor/1", 0.0)
    assert len(others["params"]) == 11 and len(decaying["params"]) == len(weights) - 11
    # With gradients of zero AdamW still subtracts lr * weight_decay of each decaying weight, and nothing of the others.
    before = {name: parameter.detach().clone() for name, parameter in module.actor.named_parameters()}
    for parameter in module.actor.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in module.actor.named_parameters():
        left = 1.0 if name.endswith("bias") or "norm" in name else 0.95
        assert torch.allclose(parameter, before[name] * left, atol=1e-7), name


def test_weight_decay_may_differ_between_roles() -> None:
    own = {"critic": RoleOptimizer(weight_decay=0.2, no_decay=("embeddings",))}
    found = entries(runs.ppo(weight_decay=0.1, optimizers=own))
    actor, critic = (found[role]["optimizer"].param_groups for role in ("actor", "critic"))
    assert [group["weight_decay"] for group in actor] == [0.1, 0.0]
    assert [group["weight_decay"] for group in critic] == [0.2, 0.0]
    assert len(critic[1]["params"]) == 1 < len(actor[1]["params"])


def test_invalid_optimizer_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="optimizers names reference, and the trained roles are actor, critic; write"):
        runs.ppo(optimizers={"reference": RoleOptimizer(learning_rate=1.0)}).configure_model()
    with pytest.raises(ConfigError, match=r"critic_learning_rate=0\.5 and optimizers.'critic'..learning_rate=0\.1 say"):
        runs.ppo(critic_learning_rate=0.5, optimizers={"critic": RoleOptimizer(learning_rate=0.1)})
    with pytest.raises(ConfigError, match=r"learning_rate=0\.5 is for the default AdamW, and optimizer=Plain has"):
        runs.sft(learning_rate=0.5, optimizer=Plain)
    with pytest.raises(
        ConfigError, match=r"and set lr=0\.5 in the optimizer: partial\(SGD, lr=\.\.\.\), or its init_args"
    ):
        runs.ppo(learning_rate=0.5, optimizer=partial(SGD, lr=0.1))
    with pytest.raises(ConfigError, match="no_decay='norm' must be one of norms, biases, embeddings"):
        RoleOptimizer(no_decay=("norm",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no_decay=\('norms',\) of actor spares weights where none decay; give"):
        entries(runs.sft(no_decay=("norms",)))
    with pytest.raises(ConfigError, match=r"weight_decay=-1\.0 may not be negative"):
        runs.sft(weight_decay=-1.0)
    with pytest.raises(ConfigError, match=r"weight_decay=0\.1 of actor is for an optimizer that knows it; Plain"):
        entries(runs.sft(weight_decay=0.1, optimizer=Plain))
    made = AdamW(tiny_model("llama").parameters())
    for setting, value, message in (
        ("optimizer", made, r"optimizer is a AdamW, and every role makes one of its own; give .* partial\(AdamW"),
        ("lr_scheduler", {"interval": "step"}, "lr_scheduler is a dict, and every role makes one of its own; give"),
        ("optimizer", lambda parameters: {"optimizer": made}, "optimizer= made a dict; give a function that returns"),
        ("lr_scheduler", lambda made: {"scheduler": StepLR(made, 1)}, "lr_scheduler= made a dictionary of scheduler"),
    ):
        with pytest.raises(ConfigError, match=message):
            entries(runs.sft(**{setting: value}))


class Plain(torch.optim.Optimizer):
    """A custom optimizer without weight decay."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        """Descend along the gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


def test_memory_is_estimated_for_the_optimizer_with_the_largest_state() -> None:
    own = {"critic": RoleOptimizer(optimizer=partial(Adagrad, lr=0.1)), "actor": RoleOptimizer(optimizer=Plain)}
    assert runs.ppo(optimizers=own).optimizer_bytes == 4  # one sum of squares per weight
    assert runs.ppo().optimizer_bytes == 8


def test_optimizers_that_cannot_be_made_or_step_so_have_errors_that_name_the_role() -> None:
    for kind in (LBFGS, SparseAdam):  # refused by the strategy, which knows why
        assert runs.sft(optimizer=partial(kind, lr=0.1)).optimizer_bytes == 0
    with pytest.raises(ConfigError, match=r"actor: its optimizer cannot be made \(ValueError: Muon only supports 2D"):
        entries(runs.sft(optimizer=partial(Muon, lr=0.1)))
