"""Every policy loss, compared with a loop over responses, and its edge cases by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from lightning_realloc.algorithms.losses.loss_reduction import averaged_loss
from lightning_realloc.algorithms.losses.policy_losses import (
    POLICY_LOSSES,
    Cispo,
    Clip,
    PolicyLoss,
    PolicyLossName,
    RatioLevel,
    Sapo,
    Vespo,
    log_ratios,
    resolve_policy_loss,
)
from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Totals
from lightning_realloc.errors import ConfigError

LENGTHS = [2, 3, 1]
ADVANTAGES = [1.5, -0.5, -2.0]
Responses = list[Tensor]


def packed(model_mask: list[list[bool]] | None = None) -> PackedBatch:
    """Return three responses to prompts of two tokens."""
    columns: dict[str, Any] = {
        "prompt_ids": Ragged.from_list([[5, 6]] * 3),
        "response_ids": Ragged.from_list([[7] * length for length in LENGTHS]),
    }
    if model_mask is not None:
        columns["model_mask"] = Ragged.from_list(model_mask, dtype=torch.bool)
    return pack(Samples(torch.arange(3), columns))


def drawn(seed: int) -> Responses:
    """Return log-probabilities of the responses' tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [-2 * torch.rand(length, generator=generator) for length in LENGTHS]


def flat(responses: Responses) -> Tensor:
    """Return the responses as a flat pack, with arbitrary values at the prompts."""
    return torch.cat([torch.cat([torch.tensor([9.0, -9.0]), response]) for response in responses])


def clip(r: Tensor, p: Tensor, a: float, product: Tensor) -> Tensor:
    """Clip to 0.8 and 1.3; a negative advantage's ratio stays below 1.5."""
    return -torch.min(r.clamp(max=1.5) * a, r.clamp(0.8, 1.3) * a)


def cispo(r: Tensor, p: Tensor, a: float, product: Tensor) -> Tensor:
    """Weight the log-probability by the ratio, at most 1.3."""
    return -r.detach().clamp(max=1.3) * a * p


def sapo(r: Tensor, p: Tensor, a: float, product: Tensor) -> Tensor:
    """Gate the ratio with temperature 2 or 3."""
    t = 2.0 if a > 0 else 3.0
    return -4 / t / (1 + (-t * (r - 1)).exp()) * a


def vespo(r: Tensor, p: Tensor, a: float, product: Tensor) -> Tensor:
    """Weight by w^k exp(l (1 - w)) of the product w."""
    k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    return -(product**k * (decay * (1 - product)).exp()).detach() * a * p


NAIVE: dict[str, Callable[[Tensor, Tensor, float, Tensor], Tensor]] = {
    "clip": clip, "cispo": cispo, "sapo": sapo, "vespo": vespo
}  # fmt: skip


SETTINGS: dict[str, PolicyLoss] = {
    "clip": Clip(high=0.3, most=1.5), "cispo": Cispo(high=0.3), "sapo": Sapo(positive=2.0, negative=3.0),
    "vespo": Vespo(),
}  # fmt: skip
"""The constants of the naive formulas."""
LEVELS = [(loss, level) for loss in NAIVE for level in get_args(RatioLevel) if loss != "vespo"]


def losses_of(loss: PolicyLoss, now: Tensor, before: Tensor, advantages: Tensor, batch: PackedBatch, level: Any) -> Any:
    """Return the losses of tokens, and which were clipped."""
    return loss(now, log_ratios(now - before, batch, level=level), advantages, batch)


@pytest.mark.parametrize(("loss", "level"), [*LEVELS, ("vespo", "token")])
@pytest.mark.parametrize("average", ["sequence", "token", "constant", "sum"])
def test_losses_and_gradients_are_those_of_a_loop_over_responses(loss: Any, level: Any, average: Any) -> None:
    before = drawn(1)
    naive = [row.requires_grad_() for row in drawn(0)]
    ours = [row.requires_grad_() for row in drawn(0)]
    by_response = []
    for now, old, advantage in zip(naive, before, ADVANTAGES, strict=True):
        differences = now - old
        product = differences.sum().exp()
        ratio = {"token": differences.exp(), "sequence": differences.mean().exp(), "product": product}[level]
        by_response.append(NAIVE[loss](ratio, now, advantage, product).expand(len(now)))
    means, total = torch.stack([row.mean() for row in by_response]), torch.cat(by_response).sum()
    expected = {"sequence": means.mean(), "token": total / 6, "constant": total / (3 * 10), "sum": total / 3}[average]
    batch = packed()
    advantages = batch.per_token(torch.tensor(ADVANTAGES))
    values = losses_of(SETTINGS[loss], flat(ours), flat(before), advantages, batch, level).values
    found = averaged_loss(values, batch, Totals(3, 6), average=average, max_tokens=10)
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    found.backward()
    expected.backward()
    for mine, theirs in zip(ours, naive, strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)


def test_every_loss_has_a_name_and_a_naive_formula() -> None:
    assert set(get_args(PolicyLossName)) == set(POLICY_LOSSES) == set(NAIVE)
    assert {type(loss) for loss in SETTINGS.values()} == set(POLICY_LOSSES.values())
    assert all(resolve_policy_loss(name) == POLICY_LOSSES[name]() for name in POLICY_LOSSES)


def test_tokens_of_an_environment_do_not_enter_a_responses_ratio() -> None:
    batch = packed([[True, False], [True, True, True], [True]])
    now, before = drawn(0), drawn(1)
    ones = torch.ones(batch.num_tokens)
    values = losses_of(Clip(low=9.0, high=9.0), flat(now), flat(before), ones, batch, "product").values
    assert values[2].item() == pytest.approx(-math.exp(float(now[0][0] - before[0][0])), abs=1e-6)


def test_clipped_tokens_are_counted() -> None:
    batch = packed()
    ratios = torch.tensor([1.1, 1.4, 0.7, 1.1, 1.7, 0.9])
    now = flat(list(torch.split(ratios.log(), LENGTHS)))
    advantages = batch.per_token(torch.tensor(ADVANTAGES))
    for loss, expected in (
        (Clip(high=0.3), [False, True, True, False, False, False]),
        (Clip(high=0.3, most=1.5), [False, True, True, False, True, False]),
        (Cispo(high=0.3), [False, True, False, False, False, False]),
    ):
        clipped = loss(now, now, advantages, batch).clipped[batch.response_mask]
        assert clipped.tolist() == expected, loss


def test_invalid_constants_and_names_are_refused() -> None:
    for make, message in (
        (lambda: Clip(most=1.1), r"most=1.1 must lie above 1 \+ high=1.2"),
        (lambda: Clip(low=-0.1), "low=-0.1 may not be negative; write 0 or more"),
        (lambda: resolve_policy_loss(Clip), r"policy_loss=Clip is a class; make an object of it, as in Clip\(\)"),
        (lambda: Clip(low="a"), "low='a' is a str; write a number"),
        (lambda: Clip(high=None), "high=None is a NoneType; write a number"),
        (lambda: Clip(most="a"), "most='a' is a str; write a number"),
        (lambda: Cispo(high=-0.1), "high=-0.1 may not be negative"),
        (lambda: Sapo(negative=0.0), "negative=0.0 must be positive"),
        (lambda: Sapo(positive="ab"), "positive='ab' is a str; write a number"),
        (lambda: Vespo(lambda_negative="a"), "lambda_negative='a' is a str; write a number"),
        (lambda: resolve_policy_loss("ppo"), f"policy_loss='ppo' must be one of {', '.join(get_args(PolicyLossName))}"),
        (
            lambda: resolve_policy_loss("dapo"),
            r"clip, .*; dapo is here policy_loss=Clip\(high=0.28\) with loss_average='token'",
        ),
        (lambda: resolve_policy_loss("Dr-GRPO"), "is here policy_loss='clip' with loss_average='constant'"),
        (lambda: resolve_policy_loss(0.2), "policy_loss=0.2 is a float; write a name, or a value such as Clip"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def test_the_policy_loss_is_clipped_only_where_that_is_pessimistic() -> None:
    # ratio 1.5, A = +2: min(3.0, 1.2 * 2 = 2.4) = 2.4, clipped;  A = -2: min(-3.0, -2.4) = -3.0, not
    # ratio 0.5, A = +2: min(1.0, 0.8 * 2 = 1.6) = 1.0, not;      A = -2: min(-1.0, -1.6) = -1.6, clipped
    # ratio 1.1 lies inside either way: 1.1 * 2 = 2.2
    logs = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]).log().requires_grad_()
    loss = Clip()(logs, logs, torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0]), packed())
    assert loss.values.tolist() == pytest.approx([-2.4, 3.0, -1.0, 1.6, -2.2])
    assert loss.clipped.tolist() == [True, False, False, True, False]
    # the gradient of -ratio * A by log p is -ratio * A itself; none where clipped
    (gradient,) = torch.autograd.grad(loss.values.sum(), logs)
    assert gradient.tolist() == pytest.approx([0.0, 3.0, -1.0, 0.0, -2.2])


def test_the_two_clip_bounds_are_set_apart() -> None:
    # ratio 1.5 with A = 1: clipped at 1.28; ratio 0.5 with A = -1: clipped at 0.9
    logs = torch.tensor([1.5, 0.5]).log()
    loss = Clip(low=0.1, high=0.28)(logs, logs, torch.tensor([1.0, -1.0]), packed())
    assert loss.values.tolist() == pytest.approx([-1.28, 0.9])
