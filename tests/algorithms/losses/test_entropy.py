"""Rules for entropy: marked tokens and losses against verl's and TRL's formulas, the weight by hand, runs on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from lightning_realloc.algorithms.losses.entropy import (
    ENTROPY_RULES,
    AdaptiveEntropy,
    ClipCov,
    EntropyName,
    EntropyRule,
    EntropyWeight,
    KLCov,
    MarkingRule,
    TopShare,
    covariances,
    resolve_entropy,
)
from lightning_realloc.algorithms.losses.policy_losses import Clip
from lightning_realloc.errors import ConfigError
from tests.algorithms.losses.test_policy_losses import packed


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row])


@pytest.mark.parametrize(
    ("name", "rule", "loss"),
    [
        # verl draws as many as the share says; all between the bounds here.
        ("clip-cov", ClipCov(share=1.0, low=0.2, high=0.9), Clip()),
        ("kl-cov", KLCov(share=0.3, weight=0.7), Clip(low=1.0, high=1e6)),
    ],
)
def test_losses_and_gradients_equal_verls(name: str, rule: MarkingRule, loss: Clip) -> None:
    table = json.loads(Path("tests/parity/verl_tables.json").read_text())["entropy"]
    before, now = flat(table["behaviour"]), flat(table["logprobs"]).requires_grad_()
    advantages = flat([[a] * len(row) for a, row in zip(table["advantages"], table["behaviour"], strict=True)])
    plain = loss(now, now - before, advantages, packed())
    marked = rule.mark(now.detach(), advantages, generator())
    if name == "clip-cov":  # verl marks by the current policy, and no token that is clipped already
        marked &= ~plain.clipped
    found = rule.losses(plain.values, marked, now - before).mean()
    assert found.item() == pytest.approx(table[name]["loss"], abs=1e-6)
    found.backward()
    assert now.grad is not None and torch.allclose(now.grad, flat(table[name]["gradient"]), atol=1e-6)
    assert 0 < int(marked.sum()) < len(marked)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 1.0])
def test_the_top_share_is_a_quantile_as_in_trl(share: float) -> None:
    entropies = torch.rand(37, generator=generator())
    marked = TopShare(share=share).mark(entropies, torch.zeros(37), generator())
    assert torch.equal(marked, entropies >= torch.quantile(entropies, 1 - share))
    values = torch.arange(37.0) + 1
    assert torch.equal(TopShare(share=share).losses(values, marked, values), values * marked)


def test_clip_cov_draws_its_share_between_the_bounds() -> None:
    values, advantages = torch.randn(1000, generator=generator()), torch.randn(1000, generator=generator())
    rule = ClipCov(share=0.02, low=0.1, high=0.5)
    found = covariances(values, advantages)
    marked = rule.mark(values, advantages, generator())
    assert int(marked.sum()) == 20 and bool(((found > 0.1) & (found < 0.5))[marked].all())
    assert not torch.equal(marked, rule.mark(values, advantages, torch.Generator().manual_seed(4)))
    assert int(ClipCov(low=50.0, high=60.0).mark(values, advantages, generator()).sum()) == 0


def test_an_adaptive_weight_follows_the_entropy() -> None:
    weight = EntropyWeight(0.01, AdaptiveEntropy(target=0.5, step=0.01, low=0.005, high=0.03))
    found = [weight.current]
    for entropy in (0.4, 0.5, 0.45, float("nan"), 0.6, 0.7, 0.7, 0.7, 0.2):
        weight.update(torch.tensor(entropy))
        found.append(weight.current)
    # It grows to its bound, is off while the entropy is high, and meanwhile shrinks to its other bound.
    assert found == pytest.approx([0.01, 0.02, 0.03, 0.03, 0.03, 0.0, 0.0, 0.0, 0.0, 0.015])
    again = EntropyWeight(0.0, weight.rule)
    again.load_state_dict(weight.state_dict())
    assert again.current == weight.current


def test_every_name_has_a_rule() -> None:
    assert set(get_args(EntropyName)) == set(ENTROPY_RULES)
    for name, kind in ENTROPY_RULES.items():
        assert resolve_entropy(name, 0.0) == kind()


def test_invalid_rules_are_refused() -> None:
    for make, message in (
        (lambda: ClipCov(low=5.0), "low=5.0 must lie below high=5.0"),
        (lambda: TopShare(share=1.5), "share=1.5 must lie between 0 and 1"),
        (lambda: KLCov(share=0), "share=0 marks no token"),
        (lambda: KLCov(weight=-1.0), "weight=-1.0 must be positive"),
        (lambda: AdaptiveEntropy(target=0.0), "target=0.0 must be positive"),
        (lambda: AdaptiveEntropy(low=0.5, high=0.2), "low=0.5 must lie below high=0.2"),
        (lambda: resolve("cov"), "entropy='cov' must be one of adaptive, clip-cov, kl-cov, top-share"),
        (lambda: resolve(0.01), "entropy=0.01 is a weight; write entropy_coef=0.01"),
        (lambda: resolve([]), r"entropy=\[\] is a list; write one of adaptive, .*, or a value such as TopShare"),
        (lambda: resolve(True), "entropy=True is a bool; write one of adaptive, "),
        (lambda: resolve(TopShare), r"entropy=TopShare is a class; make an object of it, as in TopShare\(\)"),
        (lambda: resolve(AdaptiveEntropy(low=0.1), 0.0), "entropy_coef=0.0 is where the weight of .* begins"),
        (lambda: resolve(None, -0.1), "entropy_coef=-0.1 may not be negative"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def resolve(given: Any, entropy_coef: float = 0.0) -> Any:
    """Return the rule of a setting."""
    return resolve_entropy(given, entropy_coef)


@pytest.mark.parametrize("rule", [*ENTROPY_RULES.values()], ids=lambda rule: rule.__name__)
def test_yaml_names_every_rule_by_its_class(rule: type[EntropyRule]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--entropy", type=EntropyRule | EntropyName | None)
    path = f"{rule.__module__}.{rule.__name__}"
    chosen = parser.parse_object({"entropy": {"class_path": path}})
    assert parser.instantiate_classes(chosen).entropy == rule()
