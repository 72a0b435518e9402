"""Every preference loss, compared with its formula and with values known by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from lightning_realloc.algorithms.losses.preference_losses import (
    Divergence,
    PairLossName,
    PairLossSettings,
    Pairs,
    bradley_terry_loss,
    divergence_scores,
    kto_loss,
    odds_ratio_loss,
    of_equal_rank,
    pair_loss,
    rank_matches,
    shared_length_sums,
    smoothed_logistic,
    step_loss,
)

CHOSEN, REJECTED = [-5.0, -9.0, -2.0], [-6.0, -4.0, -2.5]
REF_CHOSEN, REF_REJECTED = [-6.0, -8.0, -2.25], [-5.0, -6.0, -4.5]
LENGTHS = [3, 6, 2], [4, 3, 5]
BETA, EPS = 0.5, 0.1


def pairs(matched: PairLossName | None = None) -> Pairs:
    """Return three pairs whose log-ratios are 1, -1, 0.25 and -1, 2, 2."""
    tensors = [torch.tensor(row) for row in (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)]
    lengths = [torch.tensor(row) for row in LENGTHS]
    found = Pairs(*tensors, *lengths)
    return found if matched is None else Pairs(*tensors, *lengths, matches=rank_matches(matched, found))


def s(x: float) -> float:
    """Return the logistic function."""
    return 1 / (1 + math.exp(-x))


def smoothed(x: float) -> float:
    """Return the logistic loss for a share of 0.1 wrong labels."""
    return -(1 - EPS) * math.log(s(x)) - EPS * math.log(s(-x))


# Log-ratios c, r and lengths m, n of a pair -> its loss.
EXPECTED: dict[PairLossName, Callable[[float, float, int, int], float]] = {
    "sigmoid": lambda c, r, m, n: smoothed(BETA * (c - r)),
    "sigmoid_norm": lambda c, r, m, n: smoothed(BETA * (c / m - r / n)),
    "hinge": lambda c, r, m, n: max(0.0, 1 - BETA * (c - r)),
    "ipo": lambda c, r, m, n: (c / m - r / n - 1 / (2 * BETA)) ** 2,
    "exo_pair": lambda c, r, m, n: sum(
        s(x) * math.log(s(x) / p) for x, p in ((BETA * (c - r), 1 - EPS), (BETA * (r - c), EPS))
    ),
    "nca_pair": lambda c, r, m, n: -math.log(s(BETA * c)) - (math.log(s(-BETA * c)) + math.log(s(-BETA * r))) / 2,
    "robust": lambda c, r, m, n: (
        (-(1 - EPS) * math.log(s(BETA * (c - r))) + EPS * math.log(s(-BETA * (c - r)))) / (1 - 2 * EPS)
    ),
    "bco_pair": lambda c, r, m, n: -math.log(s(BETA * c)) - math.log(s(-BETA * r)),
    "sppo_hard": lambda c, r, m, n: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda c, r, m, n: 1 - s(BETA * c) + s(BETA * r),
    "apo_down": lambda c, r, m, n: s(BETA * c) + 1 - s(BETA * (c - r)),
    "discopop": lambda c, r, m, n: (
        -math.log(s(BETA * (c - r))) * (1 - s(BETA * (c - r) / 0.05))
        + math.exp(-BETA * (c - r)) * s(BETA * (c - r) / 0.05)
    ),
    # Margins 1, -5, 0.5 rank third, first, second; the reference's -1, -2, 2.25 in order are -2, -1, 2.25.
    "aot": lambda c, r, m, n: smoothed(BETA * {3: 1 - 2.25, 6: -5 + 2, 2: 0.5 + 1}[m]),
    # Chosen log-ratios 1, -1, 0.25 rank third, first, second; the rejected ones in order are -1, 2, 2.
    "aot_unpaired": lambda c, r, m, n: smoothed(BETA * {3: 1 - 2, 6: -1 + 1, 2: 0.25 - 2}[m]),
}
SETTINGS = PairLossSettings(beta=BETA, label_smoothing=EPS)


@pytest.mark.parametrize("name", get_args(PairLossName))
def test_every_loss_of_pairs_is_its_formula(name: PairLossName) -> None:
    found = pair_loss(name, pairs(name if name.startswith("aot") else None), SETTINGS)
    ratios = zip([1, -1, 0.25], [-1, 2, 2], *LENGTHS, strict=True)
    expected = [EXPECTED[name](c, r, m, n) for c, r, m, n in ratios]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_losses_by_rank_do_not_depend_on_the_order() -> None:
    values, others = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([10.0, 30.0, 20.0])
    assert of_equal_rank(values, others).tolist() == [30.0, 10.0, 20.0]
    assert of_equal_rank(torch.tensor([1.0, 1.0]), torch.tensor([5.0, 4.0])).tolist() == [4.0, 5.0]


def test_losses_by_rank_add_up_over_micro_batches_with_the_gradient_of_the_whole() -> None:
    chosen = torch.tensor([1.0, -1.0, 0.25], requires_grad=True)
    rejected = torch.tensor([-1.0, 2.0, 0.5], requires_grad=True)
    (whole := smoothed_logistic(BETA * (chosen.sort().values - rejected.sort().values), EPS).sum()).backward()
    wanted = [chosen.grad, rejected.grad]
    chosen.grad = rejected.grad = None
    zeros, ones = torch.zeros(3), torch.ones(3)
    matches = rank_matches("aot_unpaired", Pairs(chosen, rejected, zeros, zeros, ones, ones))
    total = 0.0
    for rows in ([0], [1, 2]):
        part = Pairs(
            chosen[rows], rejected[rows], zeros[rows], zeros[rows], ones[rows], ones[rows],
            matches=(matches[0][rows], matches[1][rows]),
        )  # fmt: skip
        loss = pair_loss("aot_unpaired", part, SETTINGS).sum()
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.item(), abs=1e-6)
    for ours, theirs in zip((chosen.grad, rejected.grad), wanted, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("divergence", "derivative"),
    [
        ("reverse_kl", math.log),
        ("forward_kl", lambda t: 1 - 1 / t),
        ("js", lambda t: math.log(2 * t / (1 + t))),
        ("alpha", lambda t: (t**-0.5 - 1) / -0.5),
    ],
)
def test_scores_are_the_derivatives_of_their_divergences(
    divergence: Divergence, derivative: Callable[[float], float]
) -> None:
    ratios = torch.tensor([-2.0, 0.0, 1.5])
    expected = [derivative(math.exp(ratio)) for ratio in ratios.tolist()]
    assert divergence_scores(ratios, divergence, alpha=0.5).tolist() == pytest.approx(expected, abs=1e-6)


def test_alpha_of_one_is_the_reverse_kl_and_large_ratios_stay_finite() -> None:
    ratios = torch.tensor([-3.0, 500.0])
    assert divergence_scores(ratios, "alpha", alpha=1.0).equal(ratios)
    assert divergence_scores(ratios, "alpha", alpha=2.0).isfinite().all()


def test_desirable_responses_rise_and_undesirable_ones_fall() -> None:
    ratios = torch.tensor([1.0, 1.0], requires_grad=True)
    loss = kto_loss(
        ratios, torch.tensor([True, False]), torch.tensor(0.5), beta=2.0, desirable_weight=1.5, undesirable_weight=0.5
    )
    # 1.5 * (1 - s(2 * 0.5)) and 0.5 * (1 - s(2 * -0.5))
    assert loss.tolist() == pytest.approx([1.5 * (1 - s(1)), 0.5 * (1 - s(-1))], abs=1e-6)
    loss.sum().backward()
    assert ratios.grad[0] < 0 < ratios.grad[1]


def test_odds_are_those_of_the_mean_token() -> None:
    # p = 0.8 and 0.5: odds 4 and 1, so the log odds ratio is log 4 and its loss log(1 + 1/4)
    means = torch.tensor([math.log(0.8)], requires_grad=True), torch.tensor([math.log(0.5)], requires_grad=True)
    loss = odds_ratio_loss(*means)
    assert loss.item() == pytest.approx(math.log(1.25), abs=1e-6)
    loss.backward()
    assert means[0].grad < 0 < means[1].grad


@pytest.mark.parametrize("mean", [-1e-6, -0.6931472, -1.0, -60.0])
def test_odds_of_near_certain_and_near_impossible_responses_have_finite_gradients(mean: float) -> None:
    means = torch.tensor([mean], requires_grad=True)
    loss = odds_ratio_loss(means, torch.tensor([-1.0]))
    loss.backward()
    assert loss.isfinite() and means.grad.isfinite()


def test_scores_of_a_pair_differ_by_the_margin_and_centre_around_zero() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0])
    plain = [-math.log(s(1)), -math.log(s(-1))]
    assert bradley_terry_loss(chosen, rejected).tolist() == pytest.approx(plain, abs=1e-6)
    # margins of 3 and 0, and a hundredth of 3^2 and 1^2
    shaped = bradley_terry_loss(chosen, rejected, torch.tensor([3.0, 0.0]), centre_coef=0.01)
    assert shaped.tolist() == pytest.approx([-math.log(s(-2)) + 0.09, -math.log(s(-1)) + 0.01], abs=1e-6)


def test_only_the_ends_of_steps_enter_the_step_loss() -> None:
    scores = torch.tensor([5.0, 1.0, 5.0, 1.0])
    ends, labels = torch.tensor([False, True, False, True]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    expected = [0.0, -math.log(s(1)), 0.0, -math.log(s(-1))]
    assert step_loss(scores, labels, ends).tolist() == pytest.approx(expected, abs=1e-6)


def test_tokens_after_the_end_of_the_shorter_response_count_less() -> None:
    logprobs: Tensor = torch.tensor([-1.0, -2.0, -4.0, -3.0])
    places, shared = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 1, 1])
    assert shared_length_sums(logprobs, places, shared, tail_weight=0.5).tolist() == [-1.0, -1.0, -2.0, -3.0]


def test_the_slope_of_discopop_at_equal_log_ratios_is_that_by_hand() -> None:
    zeros, lengths = torch.zeros(1), torch.ones(1)
    for tau in (0.05, 0.2):
        chosen = torch.zeros(1, requires_grad=True)
        even = Pairs(chosen, zeros, zeros, zeros, lengths, lengths)
        pair_loss("discopop", even, PairLossSettings(beta=BETA, discopop_tau=tau)).sum().backward()
        # With x = beta d and w' = 1 / (4 tau): w' (exp(-x) - log(1 + exp(-x))) - 1/2 * 1/2 - 1/2 * 1.
        slope = (1 - math.log(2)) / (4 * tau) - 0.75
        assert chosen.grad is not None and chosen.grad.item() == pytest.approx(BETA * slope, abs=1e-6)
        assert (slope > 0) == (tau == 0.05)
