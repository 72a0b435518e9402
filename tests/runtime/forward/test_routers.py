"""Routers of transformers' mixtures of experts are counted, recorded, and given the experts of a record."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.routers import (
    RoutedPass,
    Routers,
    balance_weight,
    check_balance,
    install_routers,
    load_metrics,
    routers_of,
)
from lightning_realloc.runtime.model.training_mode import set_training_mode
from tests.models import EXPERT_FAMILIES, FURTHER_EXPERT_FAMILIES, tiny_model
from tests.runtime.forward.test_tiled_logits import a_model

FAMILIES = (*EXPERT_FAMILIES, *FURTHER_EXPERT_FAMILIES, "gpt_oss")
IDS = torch.arange(20, 32)[None]


def _mixture(family: str) -> tuple[PreTrainedModel, Routers]:
    """Return a model with routers that prefer some experts, and their sizes."""
    model = tiny_model(family)
    for name, weight in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(3))
    routers = install_routers(model)
    assert routers is not None
    return model, routers


def _run(model: PreTrainedModel, routed: RoutedPass | None = None) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False, **({} if routed is None else routed.arguments)).logits
    return logits


def _naive_weights(family: str, config: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Return the weights of given experts by the formulas of the models' papers."""
    if family == "gpt_oss":
        return logits.gather(1, experts).softmax(-1)
    scores = logits.sigmoid() if family in ("glm4_moe", "deepseek_v3") else logits.softmax(-1)
    chosen = scores.gather(1, experts)
    if family == "mixtral" or config.norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen * getattr(config, "routed_scaling_factor", 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_given_experts_get_the_weights_of_the_router_s_formula_with_gradient(family: str) -> None:
    model, routers = _mixture(family)
    seen: list[Any] = []
    routed_block = next(m for m in model.modules() if hasattr(m, "top_k") and hasattr(m, "weight"))
    routed_block.register_forward_hook(lambda module, inputs, output: seen.append(output))
    given = torch.stack([torch.randperm(routers.num_experts)[: routers.num_chosen] for _ in range(12)])
    record = given.repeat(1, routers.num_layers).to(routers.dtype)
    _run(model, RoutedPass(routers, replayed=record))
    logits, weights, experts = seen[0]
    assert experts.equal(given)
    expected = _naive_weights(family, model.config, logits.float(), given)
    torch.testing.assert_close(weights.float(), expected)
    (ours,), (theirs,) = (torch.autograd.grad(each.square().sum(), [logits], retain_graph=True)
                          for each in (weights, expected))  # fmt: skip
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_replaying_a_record_changes_no_bit_and_counts_are_those_of_the_record(family: str) -> None:
    model, routers = _mixture(family)
    plain, counts = _run(model), routers.no_counts(torch.device("cpu"))
    seen = RoutedPass(routers, counts=counts, counted=torch.arange(12) > 4, records=True)
    assert _run(model, seen).equal(plain)
    record = seen.record()
    assert record.dtype == torch.uint8 and record.shape == (12, routers.num_layers * routers.num_chosen)
    replayed = RoutedPass(routers, replayed=record, records=True)
    assert _run(copy.deepcopy(model), replayed).equal(plain) and replayed.record().equal(record)
    record[3] = routers.unknown
    assert _run(model, RoutedPass(routers, replayed=record)).equal(plain)
    naive = [[int((part == expert).sum()) for expert in range(routers.num_experts)]
             for part in replayed.record()[5:].split(routers.num_chosen, 1)]  # fmt: skip
    assert counts.tolist() == naive == routers.count(replayed.record()[5:]).tolist()


def test_a_backward_pass_that_recomputes_replays_again_and_counts_nothing() -> None:
    model, routers = _mixture("mixtral")
    given = torch.tensor([[0, 1]]).repeat(12, routers.num_layers).to(routers.dtype)
    found = []
    for recomputes in (False, True):
        model.zero_grad()
        model.train()
        if recomputes:
            model.gradient_checkpointing_enable()
        counts = routers.no_counts(torch.device("cpu"))
        _run(model, RoutedPass(routers, replayed=given, counts=counts)).square().mean().backward()
        assert counts.tolist() == [[12, 12, 0, 0]] * 2
        found.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
        _run(model, RoutedPass(routers))  # other passes between the two
    torch.testing.assert_close(found[0], found[1])


def test_models_without_known_routers_have_none() -> None:
    model = tiny_model("llama")
    assert install_routers(model) is None and routers_of(model) is None


def test_a_router_that_chooses_otherwise_is_refused_by_name() -> None:
    model, routers = _mixture("mixtral")
    routed_block = next(m for m in model.modules() if hasattr(m, "top_k") and hasattr(m, "weight"))
    tap = vars(routed_block)["forward"]
    tap._forward = lambda states: (states, states, torch.zeros(12, 2, dtype=torch.int64))
    record = torch.zeros(12, routers.width, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="MixtralTopKRouter chooses experts by 0 calls"):
        _run(model, RoutedPass(routers, replayed=record))


def test_the_config_asks_for_a_loss_where_transformers_adds_it_and_a_setting_overrides() -> None:
    asking = {"output_router_logits": True, "router_aux_loss_coef": 0.25}
    assert balance_weight(tiny_model("mixtral", **asking), None, "actor") == 0.25
    assert balance_weight(tiny_model("mixtral", **asking), 0.0, "actor") == 0.0
    assert balance_weight(tiny_model("mixtral", router_aux_loss_coef=0.25), None, "actor") == 0.0
    assert balance_weight(tiny_model("olmoe"), 0.5, "actor") == 0.5
    for family in ("deepseek_v3", "glm4_moe", "llama"):  # transformers defines no such loss
        model = tiny_model(family, **asking)
        assert balance_weight(model, None, "actor") == 0.0
        with pytest.raises(
            ConfigError, match=f"actor has router_aux_loss_coef=0.5, .* no loss of {type(model).__name__}"
        ):
            balance_weight(model, 0.5, "actor")


@torch.no_grad()
@pytest.mark.parametrize("family", ["mixtral", "phimoe"])
def test_noise_of_routers_is_drawn_where_dropout_is(family: str) -> None:
    model = a_model(family, num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    for module in model.modules():
        for name in ("jitter_noise", "router_jitter_noise"):
            if hasattr(module, name):
                setattr(module, name, 0.5)
    plain = _run(model)
    set_training_mode(model, dropout=False)
    assert _run(model).equal(plain)
    set_training_mode(model, dropout=True)
    assert not _run(model).equal(plain)


def test_biases_are_updated_in_models_that_have_them_alone() -> None:
    options = TrainOptions(router_bias_update_rate=0.001)
    for family in ("deepseek_v3", "glm4_moe"):
        check_balance(tiny_model(family), options, "actor")
    for family in ("mixtral", "llama"):
        model = tiny_model(family)
        check_balance(model, TrainOptions(), "actor")
        with pytest.raises(ConfigError, match=f"router_bias_update_rate=0.001 and is a {type(model).__name__} without"):
            check_balance(model, options, "actor")


def test_a_config_whose_routers_are_not_known_is_refused() -> None:
    model = tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.25)
    for module in model.modules():
        vars(module).pop("top_k", None)
    with pytest.raises(ConfigError, match="actor has output_router_logits=True in its config"):
        balance_weight(model, None, "actor")


def test_loads_by_hand() -> None:
    # Layer 0: shares 3/4, 1/4, 0, 0. Layer 1: uniform. Busiest: 3/4 of 4 experts' mean 1/4.
    found = load_metrics(torch.tensor([[6, 2, 0, 0], [2, 2, 2, 2]]))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert found == pytest.approx({"expert_load": 3.0, "unused_experts": 0.25, "expert_entropy": (entropy + 1) / 2})
    assert load_metrics(torch.zeros(2, 4)) == {}


def test_a_byte_holds_255_experts() -> None:
    assert (Routers(1, 255, 1).dtype, Routers(1, 255, 1).unknown) == (torch.uint8, 255)
    assert (Routers(1, 256, 1).dtype, Routers(1, 256, 1).unknown) == (torch.int16, 32767)
